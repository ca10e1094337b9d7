"""The shared prefix of a preference pair is stored once: no token is lost, and rows contain more pairs."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.preference_pairs import PAIRS, make_batches, make_documents
from tunekit.data.dataloader import shared_prefix, stream_blocks
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.datasets import PreferenceDataset
from tunekit.data.document import Document
from tunekit.data.tokenizer import Tokenizer

LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pairs with unique prompts, some of which share a long prefix."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    prompts = [f"question {i}" + " why" * (i % 9) for i in range(37)]
    rows = [
        {"prompt": prompt, "chosen": " yes" * (1 + i % 4), "rejected": " no" * (1 + i % 5)}
        for i, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build_loader(source: str, tokenizer: Tokenizer, dist, micro: int = 2, share: bool = True, **options) -> DataLoader:
    loader = build_dataloader(
        PreferenceDataset(source, max_length=LENGTH, **({"packing": True} | options)), tokenizer, 4, micro, dist
    )
    if share:
        loader.share_prefixes()
    return loader


def contents_by_number(batch: Batch) -> dict[int, list[tuple[int, int, int]]]:
    """(token, position, target) of every token of each document, including those of its shared prefix."""
    tokens, positions, owner = (x.flatten().tolist() for x in (batch.tokens, batch.positions, batch.documents.ids))
    targets, contents = batch.targets.flatten().tolist(), {}
    offsets = (
        batch.cu_seqlens.tolist()
        if batch.cu_seqlens is not None
        else [*range(0, len(tokens) + 1, batch.tokens.shape[1])]
    )
    prefixes = [[0, 0]] * (len(offsets) - 1) if batch.shared_prefixes is None else batch.shared_prefixes.tolist()
    for (start, end), (length, first) in zip(itertools.pairwise(offsets), prefixes, strict=True):
        if owner[start] < 0:
            assert length == 0
            continue
        prefix = [(tokens[i], positions[i], IGNORE) for i in range(first, first + length)]
        answer = [(tokens[i], positions[i], targets[i]) for i in range(start, end) if owner[i] == owner[start]]
        contents[int(batch.documents.indices[owner[start]])] = prefix + answer
    return contents


def full_contents(document: Document) -> list[tuple[int, int, int]]:
    targets = np.append(np.where(document.loss_mask[1:], document.tokens[1:], IGNORE), IGNORE)
    return list(zip(document.tokens.tolist(), range(len(document.tokens)), targets.tolist(), strict=True))


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_every_document_is_complete(micro_batch: int) -> None:
    dataset, contents = make_documents(), {}
    for batch in make_batches(True, micro_batch=micro_batch):
        contents |= contents_by_number(batch)
    assert contents == {number: full_contents(document) for number, document in enumerate(dataset)}


def test_shared_prefix_length() -> None:
    """The common prefix, except for the token that predicts the first target."""
    pairs = list(make_documents())
    lengths = [shared_prefix.shared_prefix_length(*pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
    assert lengths == [*(prompt - 1 for prompt, *_ in PAIRS.values()), 0, 12]
    assert shared_prefix.shared_prefix_tokens(make_documents(), 2).tolist() == lengths


def test_counts_equal_computed_tokens() -> None:
    shared_batches, separate_batches = make_batches(True), make_batches(False)
    assert [batch.num_target_tokens for batch in shared_batches] == [
        batch.num_target_tokens for batch in separate_batches
    ]
    saved = shared_prefix.shared_prefix_tokens(make_documents(), 2).sum()
    assert (
        sum(batch.num_tokens for batch in shared_batches) == sum(batch.num_tokens for batch in separate_batches) - saved
    )
    for batch in shared_batches:
        assert batch.num_tokens == (batch.documents.ids >= 0).sum()


def test_documents_without_targets_share_all_but_the_last_token() -> None:
    tokens = np.arange(5, 11, dtype=np.int32)
    first, other = (Document(tokens[:n], np.zeros(n, bool), n) for n in (6, 4))
    assert (shared_prefix.shared_prefix_length(first, other), shared_prefix.shared_prefix_length(other, first)) == (
        3,
        4,
    )


def step_contents(loaders: list[DataLoader], count: int) -> list[dict[int, list[tuple[int, int, int]]]]:
    """Contents of each step, on all ranks."""
    contents = [{} for _ in range(count)]
    for loader in loaders:
        for step in range(count):
            for batch in loader[step]:
                contents[step] |= contents_by_number(batch) if batch.num_tokens else {}
    return contents


def test_rows_have_more_pairs_and_the_same_contents(source: str, tokenizer: Tokenizer, make_dist) -> None:
    """The same pairs as without sharing, in fewer rows, none of them too long."""
    shared_loader, separate_loader = (
        build_loader(source, tokenizer, make_dist()),
        build_loader(source, tokenizer, make_dist(), share=False),
    )
    assert len(shared_loader.first_plan) < len(separate_loader.first_plan)
    for batch in (batch for step in range(shared_loader.num_steps(1)) for batch in shared_loader[step]):
        assert batch.tokens.shape[1] <= 2 * LENGTH
    assert shared_loader.summary.tokens == sum(
        batch.num_tokens for step in range(shared_loader.num_steps(1)) for batch in shared_loader[step]
    )
    contents = [
        {number: content for step in step_contents([loader], loader.num_steps(1)) for number, content in step.items()}
        for loader in (shared_loader, separate_loader)
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 74


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_steps_are_the_same_on_any_layout(
    streamed: bool, size: int, source: str, tokenizer: Tokenizer, make_dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_blocks, "ROUND_DOCUMENTS", 40)
    options = {"streaming": True, "num_proc": 0} if streamed else {}
    single = build_loader(source, tokenizer, make_dist(), **options)
    ranks = [build_loader(source, tokenizer, make_dist(rank, size), micro=1, **options) for rank in range(size)]
    assert step_contents([single], 4) == step_contents(ranks, 4)
    state = single.state_dict(4)
    resumed = build_loader(source, tokenizer, make_dist(), **options)
    resumed.load_state_dict(state)
    assert contents_by_number(single[4][0]) == contents_by_number(resumed[4][0])
    saved = shared_prefix.shared_prefix_tokens(single.datasets[0], 2).sum()
    assert single.summary.tokens == single.datasets[0].lengths.sum() - saved
    for loader in (single, resumed, *ranks):
        loader.close()


def test_unpacked_rows_share_no_prefix(source: str, tokenizer: Tokenizer, make_dist) -> None:
    shared_loader, separate_loader = (
        build_loader(source, tokenizer, make_dist(), packing=False, share=share) for share in (True, False)
    )
    for batch, expected in zip(shared_loader[0], separate_loader[0], strict=True):
        assert batch.shared_prefixes is None and torch.equal(batch.tokens, expected.tokens)


def test_prefixes_stay_on_the_cpu(source: str, tokenizer: Tokenizer, make_dist) -> None:
    batch = build_loader(source, tokenizer, make_dist())[0][0].to("meta")
    assert batch.shared_prefixes is not None and batch.shared_prefixes.device.type == "cpu" and batch.tokens.is_meta
