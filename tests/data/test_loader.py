"""The same rows in the same order, each once an epoch, whatever the ranks, the micro-batch and where one starts."""

import numpy as np
import pytest
import torch

from tunekit.data.dataloader.batch import IGNORE, MULTIPLE, Batch, Collator
from tunekit.data.dataloader.map_style import MapDataLoader
from tunekit.data.dataloader.mixture import Mixture
from tunekit.data.datasets import TextDataset
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.errors import UserError

ROWS, BATCH, PAD = 43, 8, 7
CAPACITY = 40


def documents() -> TokenizedDataset:
    """Rows of 2 to 30 tokens that say their row in the first token: 1000, 1001, …"""
    random = np.random.default_rng(0)
    rows = []
    for row in range(ROWS):
        tokens = random.integers(10, 900, random.integers(2, 31)).astype(np.int32)
        tokens[0], learnt = 1000 + row, random.random(len(tokens)) < 0.5
        learnt[-1] = True
        rows.append(Document(tokens, learnt, len(tokens)))
    return TokenizedDataset(rows)


def loader(place, micro: int = BATCH, packed: bool = False, shuffle: bool = True) -> MapDataLoader:
    rows = documents()
    mix = Mixture.of(TextDataset("rows", max_length=CAPACITY, packing=packed, shuffle=shuffle))
    layout = Collator(BATCH, micro, place.rank, place.size, PAD, mix.capacity)
    return MapDataLoader(mix, (rows,), layout, place.seed)


def found(batches: list[Batch]) -> list[tuple[tuple[int, ...], ...]]:
    """(tokens, targets, positions) of every document that is learnt, without padding: one begins where positions do."""
    result = []
    for batch in batches:
        starts = (batch.positions == 0).flatten().nonzero().flatten().tolist() + [batch.positions.numel()]
        for start, end in zip(starts, starts[1:], strict=False):
            parts = [part.flatten()[start:end] for part in (batch.tokens, batch.targets, batch.positions)]
            assert bool((parts[1][parts[0] == PAD] == IGNORE).all())
            parts = [part[parts[0] != PAD] for part in parts]
            if (parts[1] != IGNORE).any():
                result.append(tuple(tuple(part.tolist()) for part in parts))
    return result


def ids(batches: list[Batch]) -> list[int]:
    return [tokens[0] - 1000 for tokens, _, _ in found(batches)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_steps_hold_the_same_rows_on_any_layout(place, packed: bool, size: int, micro: int) -> None:
    want = loader(place(), packed=packed)
    ranks = [loader(place(rank, size), micro, packed) for rank in range(size)]
    steps = range(2 * want.steps(1))
    for step in steps:
        parts = [rank[step] for rank in ranks]
        assert len({len(part) for part in parts}) == 1, "ranks differ in their number of micro-batches"
        assert all(len(batch.tokens) <= micro for part in parts for batch in part)
        assert sorted(found([batch for part in parts for batch in part])) == sorted(found(want[step]))
    for epoch in (steps[: want.steps(1)], steps[want.steps(1) :]):
        assert sorted(row for step in epoch for rank in ranks for row in ids(rank[step])) == list(range(ROWS))


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_is_a_pure_function_of_seed_and_step(place, packed: bool) -> None:
    want, again = loader(place(), packed=packed), loader(place(), packed=packed)
    last = 3 * want.steps(1)
    forward = [ids(want[step]) for step in range(last)]
    assert forward == [ids(again[step]) for step in reversed(range(last))][::-1]
    epochs = [forward[first : first + want.steps(1)] for first in range(0, last, want.steps(1))]
    assert epochs[0] != epochs[1]
    assert [ids(loader(place(seed=1), packed=packed)[step]) for step in range(want.steps(1))] != epochs[0]


def test_rows_stay_in_order_where_they_are_not_shuffled(place) -> None:
    rows = loader(place(), shuffle=False)
    for step in range(rows.steps(1)):
        assert sorted(ids(rows[step])) == list(range(step * BATCH, min(step * BATCH + BATCH, ROWS)))
    packed = loader(place(), packed=True, shuffle=False)
    firsts = [min(row) for row in packed.order.plan(0).rows(0, ROWS)]
    assert firsts == sorted(firsts)


def test_a_run_goes_on_only_with_its_own_rows(place) -> None:
    rows, others = loader(place()), loader(place())
    others.restore(rows.state(0))
    others.rows.learnt[-1] ^= True
    with pytest.raises(UserError, match="not the rows that the run began with"):
        others.restore(rows.state(0))


def test_tokens_that_the_model_lacks_are_told(place) -> None:
    rows = loader(place())
    highest = int(rows.rows.tokens.max())
    rows.check(highest + 1)
    with pytest.raises(UserError, match=f"token {highest}, the model knows {highest}"):
        rows.check(highest)


@pytest.mark.parametrize("packed", [False, True])
def test_targets_are_the_learnt_next_tokens_of_the_same_document(place, packed: bool) -> None:
    rows = loader(place(), 3, packed)
    for step in range(rows.steps(1)):
        batches = rows[step]
        for tokens, targets, positions in found(batches):
            document = rows.rows[tokens[0] - 1000]
            nexts = zip(document.tokens[1:].tolist(), document.learnt[1:].tolist(), strict=True)
            want = [token if learnt else IGNORE for token, learnt in nexts]
            assert list(tokens) == document.tokens.tolist()
            assert list(targets) == [*want, IGNORE]
            assert list(positions) == list(range(len(tokens)))
        for batch in batches:
            assert batch.learnt == int((batch.targets != IGNORE).sum())
            assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
        lengths = [len(rows.rows[row].tokens) for row in ids(batches)]
        assert sum(batch.real for batch in batches) == sum(lengths)
        if not packed:
            assert lengths == sorted(lengths, reverse=True)
            widths = [batch.tokens.shape[1] for batch in batches]
            assert all(0 <= width - most < MULTIPLE for width, most in zip(widths, lengths[::3], strict=True))
            assert all(width % MULTIPLE == 0 for width in widths)


def test_offsets_bound_the_documents_and_the_padding_of_packed_rows(place) -> None:
    rows = loader(place(), 3, True)
    assert loader(place())[0][0].offsets is None
    for step in range(rows.steps(1)):
        for batch in rows[step]:
            assert batch.offsets.dtype == torch.int32
            assert batch.tokens.shape[1] <= CAPACITY
            flat = batch.positions.flatten()
            assert batch.offsets.tolist() == [*(flat == 0).nonzero().flatten().tolist(), flat.numel()]
            width = batch.tokens.shape[1]
            assert set(range(0, flat.numel() + 1, width)) <= set(batch.offsets.tolist())
            tokens = batch.tokens.flatten()
            firsts = tokens[batch.offsets[:-1].long()]
            assert bool(((firsts >= 1000) | (firsts == PAD)).all())


def test_a_rank_without_rows_learns_nothing(place) -> None:
    last = loader(place()).steps(1) - 1
    batches = loader(place(3, 4), 1)[last]
    assert [(batch.learnt, batch.real) for batch in batches] == [(0, 0)]
    assert bool((batches[0].targets == IGNORE).all())


def test_the_report_counts_what_the_batches_hold(place) -> None:
    for packed in (False, True):
        rows = loader(place(), 3, packed)
        batches = [batch for step in range(rows.steps(1)) for batch in rows[step]]
        report = rows.report
        assert (report.rows, report.longest) == (ROWS, max(rows.rows.lengths))
        assert report.tokens == sum(batch.real for batch in batches)
        assert report.learnt == sum(batch.learnt for batch in batches)
        if packed:
            assert report.packed == sum(len(batch.tokens) for batch in batches)
            assert report.filled == pytest.approx(report.tokens / (report.packed * CAPACITY))
            assert "filled" in str(report)


def test_a_batch_moves_but_its_offsets_stay(place) -> None:
    batch = loader(place(), packed=True)[0][0].to("meta")
    assert batch.tokens.is_meta
    assert batch.targets.is_meta
    assert batch.positions.is_meta
    assert batch.offsets.device.type == "cpu"
