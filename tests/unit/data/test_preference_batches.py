"""Answers of a pair stay together on any layout, and a batch has the document index of each token."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tunekit.data.dataloader import preference_data, stream_blocks
from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.map_style import MapDataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.preference_data import AutoPreferenceDataset, PreferenceMixture, PreferenceMixtureMember
from tunekit.data.datasets import DatasetConfig, PreferenceDataset, UnpairedPreferenceDataset
from tunekit.data.document import DocFlags, Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

PAIRS, BATCH, PAD, LENGTH = 23, 6, 7, 30


def make_documents() -> TokenizedDataset:
    """Pairs whose first tokens are the document number plus 1000."""
    rng, documents = np.random.default_rng(0), []
    for number in range(2 * PAIRS):
        tokens = rng.integers(10, 900, rng.integers(4, LENGTH + 1)).astype(np.int32)
        tokens[0], mask = 1000 + number, np.arange(len(tokens)) >= len(tokens) // 2
        documents.append(Document(tokens, mask, len(tokens), (DocFlags.DESIRABLE, DocFlags.UNDESIRABLE)[number % 2]))
    return TokenizedDataset.from_documents(documents)


def build_loader(dist, rows: DatasetConfig, micro: int = BATCH) -> MapDataLoader:
    mix = MixtureBase.from_config(rows)
    layout = Collator(
        BATCH, micro, dist.rank, dist.world_size, PAD, mix.capacity, mix.docs_per_row, with_document_ids=True
    )
    return MapDataLoader(mix, (make_documents(),), layout, dist.seed)


def build_pair_loader(dist, packed: bool, micro: int = BATCH) -> MapDataLoader:
    return build_loader(dist, PreferenceDataset("rows", max_length=LENGTH, packing=packed), micro)


def documents_of(batch: Batch) -> list[tuple[int, list[int], list[int]]]:
    """Number, tokens and targets of each document of a batch, selected by its owner."""
    assert batch.documents.indices is not None
    documents = []
    for index, number in enumerate(batch.documents.indices.tolist()):
        mask = batch.documents.ids == index
        assert mask.any(1).sum() == 1, "a document is in one row"
        assert batch.positions[mask].tolist() == list(range(int(mask.sum())))
        documents.append((number, batch.tokens[mask].tolist(), batch.targets[mask].tolist()))
    assert int((batch.documents.ids >= 0).sum()) == batch.num_tokens
    return documents


def expected_document(rows: TokenizedDataset, number: int) -> tuple[int, list[int], list[int]]:
    """Expected number, tokens and targets of a document."""
    document = rows[number]
    next_tokens = zip(document.tokens[1:].tolist(), document.loss_mask[1:].tolist(), strict=True)
    return (
        number,
        document.tokens.tolist(),
        [*(token if is_target else IGNORE for token, is_target in next_tokens), IGNORE],
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 4])
def test_pairs_stay_together_on_any_layout(make_dist, packed: bool, size: int, micro: int) -> None:
    single = build_pair_loader(make_dist(), packed)
    ranks = [build_pair_loader(make_dist(rank, size), packed, micro) for rank in range(size)]
    assert single.num_steps(2) == ranks[0].num_steps(2)
    for step in range(single.num_steps(2)):
        rank_batches = [rank[step] for rank in ranks]
        assert len({len(micro_batches) for micro_batches in rank_batches}) == 1
        batches = [batch for micro_batches in rank_batches for batch in micro_batches]
        for batch in batches:
            assert batch.documents.indices[1::2].tolist() == (batch.documents.indices[::2] + 1).tolist()
            assert batch.documents.flags.tolist() == [DocFlags.DESIRABLE, DocFlags.UNDESIRABLE] * (
                len(batch.documents.flags) // 2
            )
            owned = batch.documents.ids
            rows = [set(row.tolist()) - {-1} for row in owned]
            assert len(rows) <= (micro if packed else 2 * micro)
            if packed:
                assert all(number ^ 1 in row for row in rows for number in row), "a pair is in one row"
                assert batch.tokens.shape[1] <= 2 * LENGTH
        documents = sorted(document for batch in batches for document in documents_of(batch))
        assert documents == sorted(document for batch in single[step] for document in documents_of(batch))
        assert documents == [expected_document(single.documents, number) for number, *_ in documents]
    numbers = [
        number for step in range(single.num_steps(1)) for batch in single[step] for number, *_ in documents_of(batch)
    ]
    assert sorted(numbers) == list(range(2 * PAIRS))


@pytest.mark.parametrize("packed", [False, True])
def test_sums_by_owner_equal_those_of_each_document(make_dist, packed: bool) -> None:
    loader = build_pair_loader(make_dist(), packed, 4)
    for step in range(loader.num_steps(1)):
        for batch in loader[step]:
            values = torch.sin(batch.tokens.double()) * (batch.targets != IGNORE)
            # padding has owner -1: its sum is at index 0, which is ignored
            sums = torch.zeros(len(batch.documents.indices) + 1, dtype=torch.double)
            sums.index_add_(0, batch.documents.ids.flatten() + 1, values.flatten())
            for number, total in zip(batch.documents.indices.tolist(), sums[1:].tolist(), strict=True):
                document = loader.documents[number]
                expected = np.sin(document.tokens[:-1].astype(float))[document.loss_mask[1:]].sum()
                assert total == pytest.approx(expected)


@pytest.mark.parametrize("packed", [False, True])
def test_rank_without_pairs_owns_no_tokens(make_dist, packed: bool) -> None:
    """With 7 ranks, one has no rows."""
    last = build_pair_loader(make_dist(), packed).num_steps(1) - 1
    batches = [batch for rank in range(7) for batch in build_pair_loader(make_dist(rank, 7), packed, 1)[last]]
    batch = next(batch for batch in batches if not len(batch.documents.indices))
    assert (batch.num_target_tokens, batch.num_tokens) == (0, 0)
    assert bool((batch.documents.ids == -1).all())
    assert batch.documents.flags.shape == batch.documents.indices.shape == (0,)
    assert batch.to("meta").documents.ids.is_meta


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "rows", [PreferenceDataset("rows", max_length=LENGTH), UnpairedPreferenceDataset("rows", max_length=LENGTH)]
)
def test_mismatched_answer_is_that_of_the_next_row(make_dist, rows: DatasetConfig, packed: bool) -> None:
    dataset = type(rows)("rows", max_length=LENGTH, packing=packed)
    for size, micro in ((1, BATCH), (2, 1), (3, 4)):
        ranks = [build_loader(make_dist(rank, size), dataset, micro) for rank in range(size)]
        for rank in ranks:
            rank.add_mismatched()
        for step in range(ranks[0].num_steps(1)):
            order = np.concatenate(ranks[0].document_indices(step))
            next_numbers = dict(zip(order.tolist(), np.roll(order, -dataset.docs_per_row).tolist(), strict=True))
            batches = [batch for rank in ranks for batch in rank[step]]
            documents = [document for batch in batches for document in documents_of(batch.documents.mismatched)]
            assert sorted(number for number, *_ in documents) == sorted(order.tolist())
            assert [batch.documents.mismatched.documents.flags.tolist() for batch in batches] == [
                batch.documents.flags.tolist() for batch in batches
            ]
            for number, tokens, targets in documents:
                own_document, next_document = ranks[0].documents[number], ranks[0].documents[next_numbers[number]]
                prompt_length, answer_start = len(own_document.tokens) // 2, len(next_document.tokens) // 2
                answer = next_document.tokens[answer_start:].tolist()
                assert tokens == [*own_document.tokens[:prompt_length].tolist(), *answer][:LENGTH]
                assert targets == [*[IGNORE] * (prompt_length - 1), *answer, IGNORE][: LENGTH - 1] + [IGNORE] * (
                    prompt_length + len(answer) >= LENGTH
                )


def test_mismatched_answer_of_a_single_row_is_its_own(make_dist) -> None:
    loader = build_loader(make_dist(), UnpairedPreferenceDataset("rows", max_length=LENGTH))
    loader.collator = Collator(1, 1, 0, 1, PAD, None, with_document_ids=True)
    loader.add_mismatched()
    (batch,) = loader.collator.micro_batches(loader.documents, [np.array([5])])
    assert documents_of(batch.documents.mismatched) == documents_of(batch)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


def make_pair(number: int, name: str = "row") -> dict[str, str]:
    suffix = " so" * (number % 7)
    return {"prompt": f"{name} {number}{suffix}", "chosen": " is good" + suffix, "rejected": f" is bad {number}"}


def make_unpaired(number: int) -> dict[str, object]:
    return {"prompt": f"ask {number}", "completion": f" say {number}", "label": number % 3 == 0}


def write_rows(directory: Path, name: str, rows: list[dict]) -> str:
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair_texts(batches: list[Batch], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Texts of each pair, sorted."""
    pairs = []
    for batch in batches:
        texts = [tokenizer.decode(tokens, special=True) for _, tokens, _ in documents_of(batch)]
        pairs += list(zip(texts[::2], texts[1::2], strict=True))
    return sorted(pairs)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_streamed_pairs_stay_together(pack, size, tokenizer, make_dist, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stream_blocks, "ROUND_DOCUMENTS", 20)
    source = write_rows(tmp_path, "rows", [make_pair(number) for number in range(31)])
    rows = PreferenceDataset(source, max_length=50, packing=pack, streaming=True, num_proc=0)
    single = build_dataloader(rows, tokenizer, 4, 4, make_dist())
    ranks = [build_dataloader(rows, tokenizer, 4, 1, make_dist(rank, size)) for rank in range(size)]
    seen, numbers, states = Counter(), [], []
    for step in range(12):
        states.append(single.state_dict(step))
        step_batches = single[step]
        pairs = pair_texts(step_batches, tokenizer)
        assert pairs == pair_texts([batch for rank in ranks for batch in rank[step]], tokenizer)
        assert all(chosen.split(" is ")[0] == rejected.split(" is ")[0] for chosen, rejected in pairs)
        assert all(" is good" in chosen and " is bad" in rejected for chosen, rejected in pairs)
        seen.update(pairs)
        numbers += [number for batch in step_batches for number in batch.documents.indices.tolist()]
    assert len(set(numbers)) == len(numbers), "numbers of a stream are unique"
    assert max(seen.values()) <= 1 + (seen.total() + 20) // 31
    resumed = build_dataloader(rows, tokenizer, 4, 4, make_dist())
    resumed.load_state_dict(states[7])
    assert pair_texts(resumed[7], tokenizer) == pair_texts(read_up_to(rows, tokenizer, make_dist(), 7), tokenizer)
    for loader in (single, resumed, *ranks):
        loader.close()


def read_up_to(rows: DatasetConfig, tokenizer: Tokenizer, dist, step: int) -> list[Batch]:
    loader = build_dataloader(rows, tokenizer, 4, 4, dist)
    batches = [loader[i] for i in range(step + 1)][-1]
    loader.close()
    return batches


@pytest.mark.parametrize("pack", [False, True])
def test_mixture_counts_pairs(pack: bool, tokenizer, make_dist, tmp_path) -> None:
    repeated = write_rows(tmp_path, "one", [make_pair(number, "one") for number in range(9)])
    other = write_rows(tmp_path, "other", [make_pair(number, "other") for number in range(20)])
    mix = PreferenceMixture(
        (
            PreferenceMixtureMember(AutoPreferenceDataset(repeated), repeat=2),
            PreferenceMixtureMember(PreferenceDataset(other), max_samples_per_epoch=7),
        ),
        max_length=50,
        packing=pack,
    )
    loader = build_dataloader(mix, tokenizer, 4, 2, make_dist())
    assert [(share.rows, share.passes) for share in loader.summary.datasets] == [(18, 2), (7, 7 / 20)]
    batches = [batch for step in range(loader.num_steps(1)) for batch in loader[step]]
    pairs = pair_texts(batches, tokenizer)
    assert Counter(text.split()[0] for text, _ in pairs) == {"one": 18, "other": 7}
    assert all(chosen.split(" is ")[0] == rejected.split(" is ")[0] for chosen, rejected in pairs)
    assert loader.summary.tokens == sum(batch.num_tokens for batch in batches)
    if pack:
        assert loader.summary.num_packed_rows == sum(len(batch.tokens) for batch in batches)
        assert loader.summary.fill_ratio == pytest.approx(
            loader.summary.tokens / (loader.summary.num_packed_rows * 100)
        )


def test_format_is_detected_from_first_row(tokenizer, make_dist, tmp_path) -> None:
    unpaired = build_dataloader(
        AutoPreferenceDataset(write_rows(tmp_path, "marks", [make_unpaired(number) for number in range(6)])),
        tokenizer,
        6,
        6,
        make_dist(),
    )
    (batch,) = unpaired[0]
    labels = {number: make_unpaired(number)["label"] for number in range(6)}
    assert [flags == DocFlags.DESIRABLE for flags in batch.documents.flags.tolist()] == [
        labels[number] for number in batch.documents.indices.tolist()
    ]
    assert "unpaired preferences" in str(unpaired.summary)
    assert "preference pairs" in str(
        build_dataloader(
            AutoPreferenceDataset(write_rows(tmp_path, "a", [make_pair(1)])), tokenizer, 1, 1, make_dist()
        ).summary
    )
    chats = write_rows(tmp_path, "chats", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(UserError, match="chosen and rejected"):
        build_dataloader(AutoPreferenceDataset(chats), tokenizer, 1, 1, make_dist())


def test_pairs_and_unpaired_rows_cannot_be_mixed(tokenizer, make_dist, tmp_path) -> None:
    paired, unpaired = write_rows(tmp_path, "one", [make_pair(1)]), write_rows(tmp_path, "other", [make_unpaired(1)])
    with pytest.raises(UserError, match="unpaired_preference"):
        build_dataloader(
            PreferenceMixture(
                (
                    PreferenceMixtureMember(AutoPreferenceDataset(paired)),
                    PreferenceMixtureMember(AutoPreferenceDataset(unpaired)),
                )
            ),
            tokenizer,
            1,
            1,
            make_dist(),
        )
    with pytest.raises(FieldError, match="excess_length_strategy"):
        preference_data.AutoPreferenceDataset(paired, excess_length_strategy="split")
