"""Documents come back from mapped files as they were, with their places, signs and counts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import (
    ABOUT,
    Document,
    TokenizedChunk,
    TokenizedDataset,
    TokenizedDatasetWriter,
    flatten_documents,
    is_complete,
)
from tunekit.data.readers.row_reader import BadRow

WHERES = ("rows.jsonl:1", "rows.jsonl:17", "data set train row 9", "a/007", "no number", "", "3", "x\ny:10")


def document(length: int, seed: int, cut: int = 0) -> Document:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 2**31 - 1, length).astype(np.int32)
    return Document(tokens, random.random(length) < 0.5, length + cut, DocFlags(seed % 4))


def tokenised(documents: list[Document], wheres: list[str], faults: list[BadRow] | None = None) -> TokenizedChunk:
    faults = faults or []
    return TokenizedChunk(None, len(documents) + len(faults), 0, 0, 0, faults, flatten_documents(documents, wheres))


def same(one: Document, other: Document) -> bool:
    equal = np.array_equal(one.tokens, other.tokens) and np.array_equal(one.learnt, other.learnt)
    return equal and (one.whole, one.signs) == (other.whole, other.signs)


def write(folder: Path, documents: list[Document], wheres: list[str], size: int) -> TokenizedDataset:
    """In parts of `size` documents."""
    with TokenizedDatasetWriter(folder) as writer:
        for first in range(0, len(documents), size):
            part = slice(first, first + size)
            writer.add(tokenised(documents[part], wheres[part]))
        writer.finish()
    return TokenizedDataset.open(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.sampled_from(WHERES)), min_size=1, max_size=12),
    size=st.integers(1, 5),
)
def test_what_is_written_is_read(sizes: list, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    documents = [document(length, seed, cut) for seed, (length, cut, _) in enumerate(sizes)]
    wheres = [where for *_, where in sizes]
    found = write(tmp_path_factory.mktemp("docs"), documents, wheres, size)
    held = TokenizedDataset(documents, wheres)
    for kept in (found, held):
        assert len(kept) == len(documents)
        assert all(same(kept[i], one) for i, one in enumerate(documents))
        assert all(same(one, other) for one, other in zip(kept, documents, strict=True))
        assert [kept.where(i) for i in range(len(kept))] == wheres
        assert kept.lengths.tolist() == [len(one.tokens) for one in documents]
        assert kept.bounds.tolist() == [0, *np.cumsum(kept.lengths).tolist()]
        assert kept.truncated == sum(cut > 0 for _, cut, _ in sizes)
        assert kept.targets == sum(int(one.learnt[1:].sum()) for one in documents)
    assert found.digest == held.digest
    with pytest.raises(IndexError):
        found[len(documents)]


def test_the_digest_tells_tokens_masks_and_bounds_apart() -> None:
    one, other = document(5, 0), document(4, 1)
    digests = {TokenizedDataset(part).digest for part in ([one, other], [other, one], [one], [one, other, other])}
    joined = Document(np.append(one.tokens, other.tokens), np.append(one.learnt, other.learnt), 9)
    digests |= {TokenizedDataset([joined]).digest, TokenizedDataset([one._replace(learnt=~one.learnt), other]).digest}
    assert len(digests) == 6
    assert TokenizedDataset([one, other], ["a:1", "a:2"]).digest == TokenizedDataset([one, other]).digest, (
        "wherever rows lie"
    )


def test_faults_are_listed_and_counted(tmp_path: Path) -> None:
    faults = [BadRow("rows.jsonl:2", "a lone \ud800"), BadRow("rows.jsonl:3", "no column\nat all")]
    with TokenizedDatasetWriter(tmp_path) as writer:
        writer.add(tokenised([document(3, 0)], ["rows.jsonl:1"], faults))
        writer.finish()
    prepared = TokenizedDataset.open(tmp_path).prepared
    assert (prepared.rows, prepared.skipped) == (3, 2)
    assert str(prepared) == "3 rows, 2 skipped" and prepared.told("bad") == "3 rows, 2 bad"
    assert prepared.bad_rows is not None
    assert len(prepared.bad_rows.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["tokens", "learnt", "lengths", "numbers", "bounds", ABOUT])
def test_half_of_it_is_not_whole(tmp_path: Path, name: str) -> None:
    write(tmp_path, [document(5, 0), document(6, 1)], ["a:1", "a:2"], 1)
    assert is_complete(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-1])
    assert not is_complete(tmp_path)
    file.unlink()
    assert not is_complete(tmp_path)
