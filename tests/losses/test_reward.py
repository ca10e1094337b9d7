"""Losses of models that score, against those of transformers, and the same wherever documents lie."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.checkpoints import FP32, FULL, PLAINLY, error, made
from tests.parallel.ranks import on
from tunekit import build
from tunekit.checkpoint import save_model
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Batch, Collator, empty_batch
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import PreferenceDataset, TextDataset
from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.reward_datasets import LabeledDataset
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import UserError
from tunekit.losses.reward import BradleyTerry, Classification, ProcessReward, Regression, RewardLoss, scores
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NoQuantization

PAD = 1
LENGTHS = (9, 14, 5, 21, 1, 13)  # the last one has padding of its own at its end
LOSSES: dict[str, RewardLoss] = {
    "pairs": BradleyTerry(center_rewards_coefficient=0.1),
    "classes": Classification(3),
    "values": Regression(),
    "steps": ProcessReward(3),
}


def documents(steps: bool) -> TokenizedDataset:
    """Documents with labels, or with steps that end at every fourth token."""
    random, found = np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        tokens = random.integers(4, 60, length).astype(np.int32)
        tokens[-2:] = [PAD, PAD] if number == len(LENGTHS) - 1 and not steps else tokens[-2:]
        learnt = np.arange(length) % 4 == 3 if steps else np.ones(length, bool)
        values = np.arange(learnt.sum()) % 3 if steps else np.array([number % 3])
        signs = DocFlags.STEPS if steps else DocFlags(0)
        found.append(Document(tokens, learnt, length, signs, values.astype(np.float32)))
    return TokenizedDataset(found)


def batches(
    loss: RewardLoss, capacity: int | None = None, micro_batch: int = 3, rank: int = 0, size: int = 1
) -> list[Batch]:
    each = 2 if isinstance(loss, BradleyTerry) else 1
    rows = [np.arange(at, at + each) for at in range(0, len(LENGTHS), each)]
    rows = [np.concatenate(rows[:2]), np.concatenate(rows[2:])] if capacity else rows
    layout = Collator(len(rows), micro_batch, rank, size, PAD, capacity, each, owned=True)
    return layout.batches(documents(isinstance(loss, ProcessReward)), rows)


def model(folder: Path, loss: RewardLoss) -> tuple[HFCheckpoint, Decoder]:
    source = with_score_head(HFCheckpoint.open(folder), loss.score(PAD))
    return source, build.build_model(source, NoQuantization(), FULL, FP32, PLAINLY, DistributedContext(0, "cpu"))


def whole(loss: RewardLoss, net: Decoder, parts: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss and all gradients."""
    net.zero_grad()
    total = torch.zeros(())
    for part in parts:
        judged = loss(net, part)
        judged.loss.backward()
        total += judged.loss.detach()
    return total, {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["classes", "values", "steps"])
def test_loss_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    loss = LOSSES[kind]
    source, net = model(made(tmp_path / "base", "llama3.2"), loss)
    (tmp_path / "ours").mkdir()
    save_model.save_model(tmp_path / "ours", net, source, quiet=True)
    token = transformers.AutoModelForTokenClassification
    auto: Any = token if kind == "steps" else transformers.AutoModelForSequenceClassification
    other = auto.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    other.config.problem_type = loss.problem
    found = documents(kind == "steps")
    (part,) = batches(loss, micro_batch=len(LENGTHS))
    rows = [found[int(i)] for i in part.numbers]
    width = max(LENGTHS)
    tokens = torch.tensor([[*row.tokens, *[PAD] * (width - len(row.tokens))] for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row.tokens) for row in rows])[:, None]
    if kind == "steps":
        labels = torch.full_like(tokens, -100)
        for line, row in zip(labels, rows, strict=True):
            line[: len(row.tokens)][torch.tensor(row.learnt)] = torch.tensor(row.values).long()
    else:
        labels = (
            torch.tensor([row.value for row in rows])
            if kind == "values"
            else torch.tensor([int(row.value) for row in rows])
        )
    wanted = other(tokens, attention_mask=mask.long(), labels=labels).loss
    wanted.backward()
    count = loss.units(part, net.spec.outputs)
    total, gradients = whole(loss, net, [part])
    assert (total / count).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert error(gradients["head.weight"] / count, other.score.weight.grad) < 1e-5
    assert error(gradients["embed.weight"] / count, other.model.embed_tokens.weight.grad) < 1e-5


@pytest.mark.parametrize("kind", LOSSES)
def test_it_is_the_same_wherever_documents_lie(kind: str, tmp_path: Path) -> None:
    """In rows of their own, in packed ones, in any micro-batches, and beside one that goes through the motions."""
    loss = LOSSES[kind]
    _, net = model(made(tmp_path, "qwen3"), loss)
    wanted, gradients = whole(loss, net, batches(loss, micro_batch=6))
    units = sum(loss.units(part, net.spec.outputs) for part in batches(loss))
    for parts in (batches(loss, micro_batch=1), batches(loss, capacity=64), batches(loss, capacity=64, micro_batch=1)):
        total, found = whole(loss, net, [*parts, empty_batch(parts[0])])
        assert sum(loss.units(part, net.spec.outputs) for part in [*parts, empty_batch(parts[0])]) == units
        assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert all(error(found[name], gradients[name]) < 1e-5 for name in gradients)


def test_a_margin_is_asked_for_and_rewards_stay_around_zero(tmp_path: Path) -> None:
    _, net = model(made(tmp_path, "llama3.2"), BradleyTerry())
    (part,) = batches(BradleyTerry())
    with torch.no_grad():
        rewards = scores(net, part).squeeze(1).double()
        apart, both = rewards[::2] - rewards[1::2], rewards[::2] + rewards[1::2]
        assert part.margins.any()
        wanted = -(torch.sigmoid(apart - part.margins)).log().sum() + 0.3 * both.square().sum()
        assert BradleyTerry(0.3)(net, part).loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def shared(folder: Path) -> list[tuple[float, dict[str, Tensor]]]:
    """What ranks that share rows make of them."""
    torch.set_num_threads(1)
    found = []
    with DistributedContext(0, "cpu", ParallelConfig(cp=2)) as run:
        for loss in LOSSES.values():
            source = with_score_head(HFCheckpoint.open(folder), loss.score(PAD))
            net = build.build_model(source, NoQuantization(), FULL, FP32, PLAINLY, run)
            total, gradients = whole(loss, net, batches(loss, capacity=64))
            found.append((total.item(), {name: run.averaged * full(grad) for name, grad in gradients.items()}))
    return found


def test_ranks_that_share_rows_tell_the_same(tmp_path: Path) -> None:
    folder = made(tmp_path, "llama3.2")
    for (one, mine), (other, _), loss in zip(*on(2, shared, folder), LOSSES.values(), strict=True):
        _, net = model(folder, loss)
        total, gradients = whole(loss, net, batches(loss, capacity=64))
        assert one == other == pytest.approx(total.item(), rel=1e-5)
        assert all(error(mine[name], gradients[name]) < 1e-5 for name in gradients)


def test_labels_that_cannot_be(tmp_path: Path) -> None:
    for kind, what in (("classes", "the label 2 is none of 2 classes"), ("steps", "the label 2 is none of 2 classes")):
        loss = replace(LOSSES[kind], num_labels=2)
        with pytest.raises(UserError, match=what):
            [loss.units(part, 2) for part in batches(loss)]
        with pytest.raises(UserError, match=what):
            loss.check_labels([documents(kind == "steps")], 2)
    LOSSES["values"].check_labels([documents(False)], 1)


def test_rows_of_another_kind_are_told_with_their_source_and_a_cure() -> None:
    pairs, labels = MixtureBase.of(PreferenceDataset("pairs.jsonl")), MixtureBase.of(LabeledDataset("texts.jsonl"))
    Regression().check(labels, "data")
    with pytest.raises(UserError) as caught:
        Classification().check(pairs, "data")
    assert str(caught.value) == (
        "data: these are preference rows, and `loss: classification` learns from labeled rows (pairs.jsonl): "
        "take loss=bradley_terry, or other rows by data.source and data.kind=labeled"
    )
    with pytest.raises(UserError, match=r"\(texts.jsonl\): take loss=classification or regression, or other rows by"):
        ProcessReward().check(labels, "data")
    with pytest.raises(UserError) as caught:
        ProcessReward().check(labels, "eval_data")
    assert str(caught.value) == (
        "eval_data: these are labeled rows, and `loss: process_reward` learns from stepwise rows (texts.jsonl): "
        "leave them "
        "out by eval_data=null, or take other rows by eval_data.source and eval_data.kind=stepwise"
    )


def test_rows_that_no_loss_learns_from_have_no_loss_as_a_cure() -> None:
    with pytest.raises(UserError) as caught:
        Regression().check(MixtureBase.of(TextDataset("prose.txt")), "data")
    assert str(caught.value).endswith("(prose.txt): take other rows by data.source and data.kind=labeled")
