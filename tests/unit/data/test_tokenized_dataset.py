"""Documents in memory-mapped files equal those written, with their locations, flags and counts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.data.document import DocFlags, Document
from tunekit.data.preprocess.tokenized_dataset import (
    METADATA_FILE,
    PreprocessSummary,
    TokenizedChunk,
    TokenizedDataset,
    TokenizedDatasetWriter,
    flatten_documents,
    is_complete,
)
from tunekit.data.readers.row_reader import BadRow

WHERES = ("rows.jsonl:1", "rows.jsonl:17", "data set train row 9", "a/007", "no_number", "", "3", "x\ny:10")


def make_document(length: int, seed: int, num_cut: int = 0) -> Document:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2**31 - 1, length).astype(np.int32)
    return Document(tokens, rng.random(length) < 0.5, length + num_cut, DocFlags(seed % 4))


def make_chunk(documents: list[Document], locations: list[str], bad_rows: list[BadRow] | None = None) -> TokenizedChunk:
    bad_rows = bad_rows or []
    summary = PreprocessSummary(rows=len(documents) + len(bad_rows), skipped=len(bad_rows))
    return TokenizedChunk(None, summary, bad_rows, flatten_documents(documents, locations))


def is_same(document: Document, other: Document) -> bool:
    equal = np.array_equal(document.tokens, other.tokens) and np.array_equal(document.loss_mask, other.loss_mask)
    return equal and (document.full_length, document.doc_flags) == (other.full_length, other.doc_flags)


def write_documents(directory: Path, documents: list[Document], locations: list[str], size: int) -> TokenizedDataset:
    """Write chunks of `size` documents and open them."""
    with TokenizedDatasetWriter(directory) as writer:
        for start in range(0, len(documents), size):
            rows = slice(start, start + size)
            writer.add(make_chunk(documents[rows], locations[rows]))
        writer.finish()
    return TokenizedDataset.open(directory)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.sampled_from(WHERES)), min_size=1, max_size=12),
    size=st.integers(1, 5),
)
def test_documents_round_trip(sizes: list, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    documents = [make_document(length, seed, cut) for seed, (length, cut, _) in enumerate(sizes)]
    locations = [where for *_, where in sizes]
    written = write_documents(tmp_path_factory.mktemp("docs"), documents, locations, size)
    in_memory = TokenizedDataset.from_documents(documents, locations)
    for dataset in (written, in_memory):
        assert len(dataset) == len(documents)
        assert all(is_same(dataset[i], expected) for i, expected in enumerate(documents))
        assert all(is_same(expected, other) for expected, other in zip(dataset, documents, strict=True))
        assert [dataset.row_location(i) for i in range(len(dataset))] == locations
        assert dataset.lengths.tolist() == [len(expected.tokens) for expected in documents]
        assert dataset.bounds.tolist() == [0, *np.cumsum(dataset.lengths).tolist()]
        assert dataset.num_truncated == sum(cut > 0 for _, cut, _ in sizes)
        assert dataset.num_target_tokens == sum(int(expected.loss_mask[1:].sum()) for expected in documents)
    assert written.fingerprint == in_memory.fingerprint
    with pytest.raises(IndexError):
        written[len(documents)]


def test_digest_depends_on_tokens_masks_and_bounds_only() -> None:
    first, second = make_document(5, 0), make_document(4, 1)
    digests = {
        TokenizedDataset.from_documents(docs).fingerprint
        for docs in ([first, second], [second, first], [first], [first, second, second])
    }
    joined = Document(np.append(first.tokens, second.tokens), np.append(first.loss_mask, second.loss_mask), 9)
    digests |= {
        TokenizedDataset.from_documents([joined]).fingerprint,
        TokenizedDataset.from_documents([first._replace(loss_mask=~first.loss_mask), second]).fingerprint,
    }
    assert len(digests) == 6
    assert (
        TokenizedDataset.from_documents([first, second], ["a:1", "a:2"]).fingerprint
        == TokenizedDataset.from_documents([first, second]).fingerprint
    )


def test_bad_rows_are_listed_and_counted(tmp_path: Path) -> None:
    bad_rows = [BadRow("rows.jsonl:2", "a lone \ud800"), BadRow("rows.jsonl:3", "no column\nat all")]
    with TokenizedDatasetWriter(tmp_path) as writer:
        writer.add(make_chunk([make_document(3, 0)], ["rows.jsonl:1"], bad_rows))
        writer.finish()
    prepared = TokenizedDataset.open(tmp_path).summary
    assert (prepared.rows, prepared.skipped) == (3, 2)
    assert prepared.format("skipped") == "3 rows, 2 skipped" and prepared.format("bad") == "3 rows, 2 bad"
    assert prepared.bad_rows is not None
    assert len(prepared.bad_rows.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "lengths", "row_numbers", "bounds", METADATA_FILE])
def test_truncated_file_is_incomplete(tmp_path: Path, name: str) -> None:
    write_documents(tmp_path, [make_document(5, 0), make_document(6, 1)], ["a:1", "a:2"], 1)
    assert is_complete(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-1])
    assert not is_complete(tmp_path)
    file.unlink()
    assert not is_complete(tmp_path)
