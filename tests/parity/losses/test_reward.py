"""Losses of reward models equal those of transformers, and do not depend on the layout of documents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers.random_checkpoints import DEFAULT_MEMORY, FP32, FULL, make_checkpoint, relative_error
from tests.helpers.ranks import run_ranks
from tunekit import build
from tunekit.checkpoint import save_model
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Batch, Collator, empty_batch
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import PreferenceDataset, TextDataset
from tunekit.data.document import DocFlags, Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.reward_datasets import LabeledDataset
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import UserError
from tunekit.losses.reward import BradleyTerry, Classification, ProcessReward, Regression, RewardLoss, document_scores
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NoQuantization

PAD = 1
LENGTHS = (9, 14, 5, 21, 1, 13)  # the last document ends with padding tokens
LOSSES: dict[str, RewardLoss] = {
    "pairs": BradleyTerry(center_rewards_coefficient=0.1),
    "classes": Classification(3),
    "values": Regression(),
    "steps": ProcessReward(3),
}


def make_documents(steps: bool) -> TokenizedDataset:
    """Documents with labels, or with steps that end at every fourth token."""
    rng, documents = np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        tokens = rng.integers(4, 60, length).astype(np.int32)
        tokens[-2:] = [PAD, PAD] if number == len(LENGTHS) - 1 and not steps else tokens[-2:]
        mask = np.arange(length) % 4 == 3 if steps else np.ones(length, bool)
        values = np.arange(mask.sum()) % 3 if steps else np.array([number % 3])
        flags = DocFlags.STEPWISE if steps else DocFlags(0)
        documents.append(Document(tokens, mask, length, flags, values.astype(np.float32)))
    return TokenizedDataset.from_documents(documents)


def make_batches(
    loss: RewardLoss, capacity: int | None = None, micro_batch: int = 3, rank: int = 0, size: int = 1
) -> list[Batch]:
    docs_per_row = 2 if isinstance(loss, BradleyTerry) else 1
    rows = [np.arange(first, first + docs_per_row) for first in range(0, len(LENGTHS), docs_per_row)]
    rows = [np.concatenate(rows[:2]), np.concatenate(rows[2:])] if capacity else rows
    layout = Collator(len(rows), micro_batch, rank, size, PAD, capacity, docs_per_row, with_document_ids=True)
    return layout.micro_batches(make_documents(isinstance(loss, ProcessReward)), rows)


def build_model(directory: Path, loss: RewardLoss) -> tuple[HFCheckpoint, Decoder]:
    source = with_score_head(HFCheckpoint.open(directory), loss.score_head(PAD))
    return source, build.build_model(source, NoQuantization(), FULL, FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu"))


def loss_and_grads(loss: RewardLoss, net: Decoder, micro_batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and all gradients."""
    net.zero_grad()
    total = torch.zeros(())
    for micro_batch in micro_batches:
        result = loss(net, micro_batch)
        result.loss.backward()
        total += result.loss.detach()
    return total, {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["classes", "values", "steps"])
def test_loss_and_gradients_equal_transformers(kind: str, tmp_path: Path) -> None:
    loss = LOSSES[kind]
    source, net = build_model(make_checkpoint(tmp_path / "base", "llama3.2"), loss)
    (tmp_path / "ours").mkdir()
    save_model.save_model(tmp_path / "ours", net, source, quiet=True)
    token = transformers.AutoModelForTokenClassification
    auto: Any = token if kind == "steps" else transformers.AutoModelForSequenceClassification
    transformers_model = auto.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    transformers_model.config.problem_type = loss.problem_type
    dataset = make_documents(kind == "steps")
    (micro_batch,) = make_batches(loss, micro_batch=len(LENGTHS))
    rows = [dataset[int(i)] for i in micro_batch.documents.indices]
    width = max(LENGTHS)
    tokens = torch.tensor([[*row.tokens, *[PAD] * (width - len(row.tokens))] for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row.tokens) for row in rows])[:, None]
    if kind == "steps":
        labels = torch.full_like(tokens, -100)
        for label_row, row in zip(labels, rows, strict=True):
            label_row[: len(row.tokens)][torch.tensor(row.loss_mask)] = torch.tensor(row.values).long()
    else:
        labels = (
            torch.tensor([row.value for row in rows])
            if kind == "values"
            else torch.tensor([int(row.value) for row in rows])
        )
    expected = transformers_model(tokens, attention_mask=mask.long(), labels=labels).loss
    expected.backward()
    count = loss.num_units(micro_batch, net.spec.outputs)
    total, gradients = loss_and_grads(loss, net, [micro_batch])
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(gradients["head.weight"] / count, transformers_model.score.weight.grad) < 3e-5
    assert relative_error(gradients["embed.weight"] / count, transformers_model.model.embed_tokens.weight.grad) < 3e-5


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_does_not_depend_on_the_layout(kind: str, tmp_path: Path) -> None:
    """In unpacked and packed rows, in any micro-batches, and with an additional empty batch."""
    loss = LOSSES[kind]
    _, net = build_model(make_checkpoint(tmp_path, "qwen3"), loss)
    expected, gradients = loss_and_grads(loss, net, make_batches(loss, micro_batch=6))
    units = sum(loss.num_units(micro_batch, net.spec.outputs) for micro_batch in make_batches(loss))
    for micro_batches in (
        make_batches(loss, micro_batch=1),
        make_batches(loss, capacity=64),
        make_batches(loss, capacity=64, micro_batch=1),
    ):
        total, grads = loss_and_grads(loss, net, [*micro_batches, empty_batch(micro_batches[0])])
        assert (
            sum(
                loss.num_units(micro_batch, net.spec.outputs)
                for micro_batch in [*micro_batches, empty_batch(micro_batches[0])]
            )
            == units
        )
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)
        assert all(relative_error(grads[name], gradients[name]) < 3e-5 for name in gradients)


def test_margin_is_subtracted_and_rewards_are_centered(tmp_path: Path) -> None:
    _, net = build_model(make_checkpoint(tmp_path, "llama3.2"), BradleyTerry())
    (micro_batch,) = make_batches(BradleyTerry())
    with torch.no_grad():
        rewards = document_scores(net, micro_batch).squeeze(1).double()
        differences, sums = rewards[::2] - rewards[1::2], rewards[::2] + rewards[1::2]
        assert micro_batch.documents.margins.any()
        expected = -(torch.sigmoid(differences - micro_batch.documents.margins)).log().sum() + 0.3 * sums.square().sum()
        assert BradleyTerry(0.3)(net, micro_batch).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def full_tensor(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def context_parallel_results(directory: Path) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of ranks with context parallelism."""
    torch.set_num_threads(1)
    results = []
    with DistributedContext(0, "cpu", ParallelConfig(cp=2)) as dist:
        for loss in LOSSES.values():
            source = with_score_head(HFCheckpoint.open(directory), loss.score_head(PAD))
            net = build.build_model(source, NoQuantization(), FULL, FP32, DEFAULT_MEMORY, dist)
            total, gradients = loss_and_grads(loss, net, make_batches(loss, capacity=64))
            results.append(
                (total.item(), {name: dist.grad_scale * full_tensor(grad) for name, grad in gradients.items()})
            )
    return results


def test_context_parallel_ranks_equal_one_process(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama3.2")
    for (first_loss, grads), (second_loss, _), loss in zip(
        *run_ranks(2, context_parallel_results, directory), LOSSES.values(), strict=True
    ):
        _, net = build_model(directory, loss)
        total, gradients = loss_and_grads(loss, net, make_batches(loss, capacity=64))
        assert first_loss == second_loss == pytest.approx(total.item(), rel=1e-5)
        assert all(relative_error(grads[name], gradients[name]) < 3e-5 for name in gradients)


def test_invalid_labels_are_rejected(tmp_path: Path) -> None:
    for kind, message in (("classes", "label 2 "), ("steps", "label 2 ")):
        loss = replace(LOSSES[kind], num_labels=2)
        with pytest.raises(UserError, match=message):
            [loss.num_units(micro_batch, 2) for micro_batch in make_batches(loss)]
        with pytest.raises(UserError, match=message):
            loss.check_labels([make_documents(kind == "steps")], 2)
    LOSSES["values"].check_labels([make_documents(False)], 1)


def test_dataset_of_another_format_names_loss_and_kind() -> None:
    pairs, labels = (
        MixtureBase.from_config(PreferenceDataset("pairs.jsonl")),
        MixtureBase.from_config(LabeledDataset("texts.jsonl")),
    )
    Regression().check_datasets(labels, "data")
    with pytest.raises(UserError) as caught:
        Classification().check_datasets(pairs, "data")
    message = str(caught.value)
    assert message.startswith("data: ") and "pairs.jsonl" in message
    assert "bradley_terry" in message and "data.kind=labeled" in message
    with pytest.raises(UserError, match="texts.jsonl.*classification.*regression"):
        ProcessReward().check_datasets(labels, "data")
    with pytest.raises(UserError) as caught:
        ProcessReward().check_datasets(labels, "eval_data")
    message = str(caught.value)
    assert message.startswith("eval_data: ") and "process_reward" in message and "texts.jsonl" in message
    assert "eval_data=null" in message and "eval_data.kind=stepwise" in message


def test_dataset_that_fits_no_loss_names_no_loss() -> None:
    with pytest.raises(UserError) as caught:
        Regression().check_datasets(MixtureBase.from_config(TextDataset("prose.txt")), "data")
    message = str(caught.value)
    assert "prose.txt" in message and "data.kind=labeled" in message and "Set loss=" not in message
