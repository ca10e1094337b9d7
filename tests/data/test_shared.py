"""What documents of a pair begin with is written once: nothing is lost by it, and rows hold more."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pairs import PAIRS, batches, documents
from tunekit.data.dataloader import shared_prefix, stream_blocks
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.sampler import unit_lengths
from tunekit.data.datasets import PreferenceDataset
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.data.tokenizer import Tokenizer

LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pairs that say which they are, some with much in common."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    ask = [f"question {i}" + " why" * (i % 9) for i in range(37)]
    rows = [
        {"prompt": one, "chosen": " yes" * (1 + i % 4), "rejected": " no" * (1 + i % 5)} for i, one in enumerate(ask)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def opened(source: str, tokenizer: Tokenizer, place, micro: int = 2, share: bool = True, **options) -> DataLoader:
    found = build_dataloader(
        PreferenceDataset(source, max_length=LENGTH, **({"packing": True} | options)), tokenizer, 4, micro, place
    )
    if share:
        found.share()
    return found


def written(batch: Batch) -> dict[int, list[tuple[int, int, int]]]:
    """Token, position and target of every token of each document, those in front of its own from where they are."""
    assert batch.owner is not None and batch.numbers is not None
    tokens, positions, owner = (x.flatten().tolist() for x in (batch.tokens, batch.positions, batch.owner))
    targets, found = batch.targets.flatten().tolist(), {}
    offsets = (
        batch.offsets.tolist() if batch.offsets is not None else [*range(0, len(tokens) + 1, batch.tokens.shape[1])]
    )
    prefixes = [[0, 0]] * (len(offsets) - 1) if batch.prefixes is None else batch.prefixes.tolist()
    for (start, end), (count, at) in zip(itertools.pairwise(offsets), prefixes, strict=True):
        if owner[start] < 0:
            assert count == 0
            continue
        before = [(tokens[i], positions[i], IGNORE) for i in range(at, at + count)]
        own = [(tokens[i], positions[i], targets[i]) for i in range(start, end) if owner[i] == owner[start]]
        found[int(batch.numbers[owner[start]])] = before + own
    return found


def whole(one: Document) -> list[tuple[int, int, int]]:
    targets = np.append(np.where(one.learnt[1:], one.tokens[1:], IGNORE), IGNORE)
    return list(zip(one.tokens.tolist(), range(len(one.tokens)), targets.tolist(), strict=True))


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_every_document_is_there(micro_batch: int) -> None:
    pairs, found = documents(), {}
    for batch in batches(True, micro_batch=micro_batch):
        found |= written(batch)
    assert found == {number: whole(one) for number, one in enumerate(pairs)}


def test_what_is_shared() -> None:
    """All that both begin with, but for the token that predicts the first learnt one."""
    pairs = list(documents())
    found = [shared_prefix.shared(*pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
    assert found == [*(prompt - 1 for prompt, *_ in PAIRS.values()), 0, 12]
    assert shared_prefix.shared_prefix_tokens(documents(), 2).tolist() == found


def test_counts_are_those_of_what_is_computed() -> None:
    once, twice = batches(True), batches(False)
    assert [batch.learnt for batch in once] == [batch.learnt for batch in twice]
    saved = shared_prefix.shared_prefix_tokens(documents(), 2).sum()
    assert sum(batch.real for batch in once) == sum(batch.real for batch in twice) - saved
    for batch in once:
        assert batch.owner is not None and batch.real == (batch.owner >= 0).sum()


def test_documents_without_anything_learnt_share_all_but_the_last_token() -> None:
    tokens = np.arange(5, 11, dtype=np.int32)
    first, other = (Document(tokens[:n], np.zeros(n, bool), n) for n in (6, 4))
    assert (shared_prefix.shared(first, other), shared_prefix.shared(other, first)) == (3, 4)


def steps(loaders: list[DataLoader], count: int) -> list[dict[int, list[tuple[int, int, int]]]]:
    """What is written in each step, on all ranks."""
    found = [{} for _ in range(count)]
    for loader in loaders:
        for step in range(count):
            for batch in loader[step]:
                found[step] |= written(batch) if batch.real else {}
    return found


def test_rows_hold_more_and_nothing_else(source: str, tokenizer: Tokenizer, place) -> None:
    """The same pairs as where each is written whole, in fewer rows, none of them too long."""
    once, twice = opened(source, tokenizer, place()), opened(source, tokenizer, place(), share=False)
    assert once.order.rows(0) < twice.order.rows(0)
    for batch in (batch for step in range(once.steps(1)) for batch in once[step]):
        assert batch.tokens.shape[1] <= 2 * LENGTH
    assert once.report.tokens == sum(batch.real for step in range(once.steps(1)) for batch in once[step])
    everything = [
        {number: one for step in steps([loader], loader.steps(1)) for number, one in step.items()}
        for loader in (once, twice)
    ]
    assert everything[0] == everything[1] and len(everything[0]) == 74


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_steps_are_the_same_on_any_layout(
    streamed: bool, size: int, source: str, tokenizer: Tokenizer, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_blocks, "DOCUMENTS", 40)
    options = {"streaming": True, "num_proc": 0} if streamed else {}
    one = opened(source, tokenizer, place(), **options)
    several = [opened(source, tokenizer, place(rank, size), micro=1, **options) for rank in range(size)]
    assert steps([one], 4) == steps(several, 4)
    state = one.state(4)
    again = opened(source, tokenizer, place(), **options)
    again.restore(state)
    assert written(one[4][0]) == written(again[4][0])
    assert (
        one.report.tokens
        == unit_lengths(one.parts[0].lengths, 2).sum() - shared_prefix.shared_prefix_tokens(one.parts[0], 2).sum()
    )
    for loader in (one, again, *several):
        loader.close()


def test_rows_of_their_own_are_whole(source: str, tokenizer: Tokenizer, place) -> None:
    once, twice = (opened(source, tokenizer, place(), packing=False, share=share) for share in (True, False))
    for mine, other in zip(once[0], twice[0], strict=True):
        assert mine.prefixes is None and torch.equal(mine.tokens, other.tokens)


def test_prefixes_stay_on_the_cpu(source: str, tokenizer: Tokenizer, place) -> None:
    batch = opened(source, tokenizer, place())[0][0].to("meta")
    assert batch.prefixes is not None and batch.prefixes.device.type == "cpu" and batch.tokens.is_meta
