"""The loader gives the same rows in the same order, each once an epoch, on any layout and from any step."""

import numpy as np
import pytest
import torch

from tunekit.data.dataloader.batch import IGNORE, LENGTH_MULTIPLE, Batch, Collator
from tunekit.data.dataloader.map_style import MapDataLoader
from tunekit.data.dataloader.mixture import Mixture
from tunekit.data.datasets import TextDataset
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.errors import UserError

ROWS, BATCH, PAD = 43, 8, 7
CAPACITY = 40


def make_documents() -> TokenizedDataset:
    """Rows of 2 to 30 tokens. The first token is the row number plus 1000."""
    rng = np.random.default_rng(0)
    rows = []
    for row in range(ROWS):
        tokens = rng.integers(10, 900, rng.integers(2, 31)).astype(np.int32)
        tokens[0], mask = 1000 + row, rng.random(len(tokens)) < 0.5
        mask[-1] = True
        rows.append(Document(tokens, mask, len(tokens)))
    return TokenizedDataset.from_documents(rows)


def make_loader(dist, micro: int = BATCH, packed: bool = False, shuffle: bool = True) -> MapDataLoader:
    rows = make_documents()
    mix = Mixture.from_config(TextDataset("rows", max_length=CAPACITY, packing=packed, shuffle=shuffle))
    layout = Collator(BATCH, micro, dist.rank, dist.world_size, PAD, mix.capacity)
    return MapDataLoader(mix, (rows,), layout, dist.seed)


def documents_of(batches: list[Batch]) -> list[tuple[tuple[int, ...], ...]]:
    """(tokens, targets, positions) of every document with targets, without padding. Positions restart at a document."""
    documents = []
    for batch in batches:
        starts = (batch.positions == 0).flatten().nonzero().flatten().tolist() + [batch.positions.numel()]
        for start, end in zip(starts, starts[1:], strict=False):
            values = [value.flatten()[start:end] for value in (batch.tokens, batch.targets, batch.positions)]
            assert bool((values[1][values[0] == PAD] == IGNORE).all())
            values = [value[values[0] != PAD] for value in values]
            if (values[1] != IGNORE).any():
                documents.append(tuple(tuple(value.tolist()) for value in values))
    return documents


def row_numbers(batches: list[Batch]) -> list[int]:
    return [tokens[0] - 1000 for tokens, _, _ in documents_of(batches)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_steps_have_the_same_rows_on_any_layout(make_dist, packed: bool, size: int, micro: int) -> None:
    expected = make_loader(make_dist(), packed=packed)
    ranks = [make_loader(make_dist(rank, size), micro, packed) for rank in range(size)]
    steps = range(2 * expected.num_steps(1))
    for step in steps:
        micro_batches = [rank[step] for rank in ranks]
        assert len({len(rank_batches) for rank_batches in micro_batches}) == 1, (
            "ranks differ in their number of micro-batches"
        )
        assert all(len(batch.tokens) <= micro for rank_batches in micro_batches for batch in rank_batches)
        assert sorted(documents_of([batch for rank_batches in micro_batches for batch in rank_batches])) == sorted(
            documents_of(expected[step])
        )
    for epoch in (steps[: expected.num_steps(1)], steps[expected.num_steps(1) :]):
        assert sorted(row for step in epoch for rank in ranks for row in row_numbers(rank[step])) == list(range(ROWS))


@pytest.mark.parametrize("packed", [False, True])
def test_step_is_a_pure_function_of_seed_and_step(make_dist, packed: bool) -> None:
    data, other_data = make_loader(make_dist(), packed=packed), make_loader(make_dist(), packed=packed)
    last = 3 * data.num_steps(1)
    forward = [row_numbers(data[step]) for step in range(last)]
    assert forward == [row_numbers(other_data[step]) for step in reversed(range(last))][::-1]
    epochs = [forward[first : first + data.num_steps(1)] for first in range(0, last, data.num_steps(1))]
    assert epochs[0] != epochs[1]
    assert [
        row_numbers(make_loader(make_dist(seed=1), packed=packed)[step]) for step in range(data.num_steps(1))
    ] != epochs[0]


def test_rows_stay_in_order_without_shuffling(make_dist) -> None:
    data = make_loader(make_dist(), shuffle=False)
    for step in range(data.num_steps(1)):
        assert sorted(row_numbers(data[step])) == list(range(step * BATCH, min(step * BATCH + BATCH, ROWS)))
    packed = make_loader(make_dist(), packed=True, shuffle=False)
    first_rows = [min(row) for row in packed.first_plan.rows(0, ROWS)]
    assert first_rows == sorted(first_rows)


def test_resuming_with_other_rows_is_an_error(make_dist) -> None:
    data, other_data = make_loader(make_dist()), make_loader(make_dist())
    other_data.load_state_dict(data.state_dict(0))
    other_data.documents.loss_mask[-1] ^= True
    with pytest.raises(UserError, match="data"):
        other_data.load_state_dict(data.state_dict(0))


def test_token_beyond_vocabulary_is_an_error(make_dist) -> None:
    data = make_loader(make_dist())
    highest = int(data.documents.tokens.max())
    data.check_vocab(highest + 1)
    with pytest.raises(UserError, match=f"{highest}.* {highest}"):
        data.check_vocab(highest)


@pytest.mark.parametrize("packed", [False, True])
def test_targets_are_masked_next_tokens_of_the_same_document(make_dist, packed: bool) -> None:
    data = make_loader(make_dist(), 3, packed)
    for step in range(data.num_steps(1)):
        batches = data[step]
        for tokens, targets, positions in documents_of(batches):
            document = data.documents[tokens[0] - 1000]
            next_tokens = zip(document.tokens[1:].tolist(), document.loss_mask[1:].tolist(), strict=True)
            expected = [token if is_target else IGNORE for token, is_target in next_tokens]
            assert list(tokens) == document.tokens.tolist()
            assert list(targets) == [*expected, IGNORE]
            assert list(positions) == list(range(len(tokens)))
        for batch in batches:
            assert batch.num_target_tokens == int((batch.targets != IGNORE).sum())
            assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
        lengths = [len(data.documents[row].tokens) for row in row_numbers(batches)]
        assert sum(batch.num_tokens for batch in batches) == sum(lengths)
        if not packed:
            assert lengths == sorted(lengths, reverse=True)
            widths = [batch.tokens.shape[1] for batch in batches]
            assert all(
                0 <= width - max_length < LENGTH_MULTIPLE
                for width, max_length in zip(widths, lengths[::3], strict=True)
            )
            assert all(width % LENGTH_MULTIPLE == 0 for width in widths)


def test_offsets_bound_documents_and_padding_of_packed_rows(make_dist) -> None:
    data = make_loader(make_dist(), 3, True)
    assert make_loader(make_dist())[0][0].cu_seqlens is None
    for step in range(data.num_steps(1)):
        for batch in data[step]:
            assert batch.cu_seqlens.dtype == torch.int32
            assert batch.tokens.shape[1] <= CAPACITY
            flat = batch.positions.flatten()
            assert batch.cu_seqlens.tolist() == [*(flat == 0).nonzero().flatten().tolist(), flat.numel()]
            width = batch.tokens.shape[1]
            assert set(range(0, flat.numel() + 1, width)) <= set(batch.cu_seqlens.tolist())
            tokens = batch.tokens.flatten()
            firsts = tokens[batch.cu_seqlens[:-1].long()]
            assert bool(((firsts >= 1000) | (firsts == PAD)).all())


def test_rank_without_rows_has_no_targets(make_dist) -> None:
    last = make_loader(make_dist()).num_steps(1) - 1
    batches = make_loader(make_dist(3, 4), 1)[last]
    assert [(batch.num_target_tokens, batch.num_tokens) for batch in batches] == [(0, 0)]
    assert bool((batches[0].targets == IGNORE).all())


def test_report_counts_equal_those_of_the_batches(make_dist) -> None:
    for packed in (False, True):
        data = make_loader(make_dist(), 3, packed)
        batches = [batch for step in range(data.num_steps(1)) for batch in data[step]]
        report = data.summary
        assert (report.rows, report.max_length) == (ROWS, max(data.documents.lengths))
        assert report.tokens == sum(batch.num_tokens for batch in batches)
        assert report.num_target_tokens == sum(batch.num_target_tokens for batch in batches)
        if packed:
            assert report.num_packed_rows == sum(len(batch.tokens) for batch in batches)
            assert report.fill_ratio == pytest.approx(report.tokens / (report.num_packed_rows * CAPACITY))
            assert "filled" in str(report)


def test_offsets_stay_on_the_cpu(make_dist) -> None:
    batch = make_loader(make_dist(), packed=True)[0][0].to("meta")
    assert batch.tokens.is_meta
    assert batch.targets.is_meta
    assert batch.positions.is_meta
    assert batch.cu_seqlens.device.type == "cpu"
