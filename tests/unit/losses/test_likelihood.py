"""Losses are sums: splitting a step into micro-batches or packing it does not change the gradient."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.random_checkpoints import load_model, make_checkpoint, random_tokens, relative_error
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.datasets import TextDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.kernels import cross_entropy
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.losses import cross_entropy as likelihood
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.spec import MLP

LENGTHS = (2, 31, 3, 17, 9, 24, 5, 12)


def write_texts(directory: Path) -> str:
    """Write rows of very different lengths."""
    generator = torch.Generator().manual_seed(4)
    rows = [[f"w{int(i)}" for i in torch.randint(0, 60, (n,), generator=generator)] for n in LENGTHS]
    (directory / "rows.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in rows))
    return str(directory / "rows.jsonl")


def compute_step(model: Decoder, micro_batches: list[Batch]) -> tuple[float, list[Tensor]]:
    """Mean loss of a step and its gradients, computed like in a recipe."""
    model.zero_grad()
    num_target_tokens = sum(micro_batch.num_target_tokens for micro_batch in micro_batches)
    total = 0.0
    for micro_batch in micro_batches:
        loss = CrossEntropy()(model, micro_batch) / num_target_tokens
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def gradient_error(actual: Tensor, expected: Tensor) -> float:
    """Maximum difference relative to the largest value; absolute for gradients that are only rounding errors."""
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-2)).item()


def make_batches(directory: Path, source: str, micro_batch: int, **options: object) -> list[Batch]:
    dataset = TextDataset(source, **options)
    loader = build_dataloader(
        dataset, Tokenizer.open(directory), len(LENGTHS), micro_batch, DistributedContext(0, "cpu")
    )
    assert loader.num_steps(1) == 1
    return loader[0]


# Full attention, windows, chunks, latent attention, delta nets and experts.
KINDS = ["llama3.2", "mistral", "qwen3-sliding", "llama4", "deepseek-v3", "qwen3.5", "qwen3-next", "qwen3.5-moe"]
KINDS += ["qwen3-moe", "mixtral", "gpt-oss", "olmoe", "gemma4-moe"]
# The number of rows of an expert determines the order of summation in BLAS: 1.2e-5 for gpt-oss with MKL on an Intel
# Xeon without AVX512-BF16, below 1e-5 on an AMD EPYC.
MAX_GRADIENT_ERROR = 2e-5


@pytest.mark.parametrize("name", KINDS)
def test_micro_batches_and_packing_do_not_change_gradients(name: str, tmp_path: Path) -> None:
    directory, source = make_checkpoint(tmp_path / "model", name), write_texts(tmp_path)
    model = load_model(directory)
    loss, expected = compute_step(model, make_batches(directory, source, 8))
    for micro_batch in (1, 2, 4):
        micro_batches = make_batches(directory, source, micro_batch)
        assert len(micro_batches) == 8 // micro_batch
        other, grads = compute_step(model, micro_batches)
        assert other == pytest.approx(loss, rel=1e-5)
        assert max(map(gradient_error, grads, expected)) < MAX_GRADIENT_ERROR
    for length, micro_batch in ((40, 8), (40, 1), (33, 2), (120, 1)):
        micro_batches = make_batches(directory, source, micro_batch, packing=True, max_length=length)
        assert sum(batch.num_target_tokens for batch in micro_batches) == sum(LENGTHS)
        other, grads = compute_step(model, micro_batches)
        assert other == pytest.approx(loss, rel=1e-5)
        assert max(map(gradient_error, grads, expected)) < MAX_GRADIENT_ERROR


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_documents_do_not_leak(name: str, tmp_path: Path) -> None:
    """Changing a document does not change the logits of the others, which equal those of single documents.

    With experts this is not exact: the changed document affects the number of rows per expert, and thereby the order in
    which BLAS sums up a row.
    """
    model = load_model(make_checkpoint(tmp_path, name))
    bounds = [0, 7, 8, 21, 30, 40]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)]).view(2, 20)
    layout = SequenceLayout(torch.tensor(bounds, dtype=torch.int32))
    rows = random_tokens(2, 20)
    packed = model(rows, positions, layout).flatten(0, 1)
    for a, b in zip(bounds, bounds[1:], strict=False):
        assert relative_error(packed[a:b], model(rows.view(1, -1)[:, a:b])[0]) < 1e-5
    other = rows.flatten().clone()
    other[8:21] = random_tokens(1, 13, seed=9)
    changed = model(other.view(2, 20), positions, layout).flatten(0, 1)
    before, after = (torch.cat([logits[:8], logits[21:]]) for logits in (packed, changed))
    if all(isinstance(layer.ffn, MLP) for layer in model.spec.layers):
        assert torch.equal(before, after)
    assert relative_error(before, after) < 2e-6
    assert (packed[8:21] != changed[8:21]).any()


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_activation_checkpointing_changes_no_bit(name: str, tmp_path: Path) -> None:
    directory, source = make_checkpoint(tmp_path / "model", name), write_texts(tmp_path)
    for options in ({}, {"packing": True, "max_length": 40}):
        micro_batches = make_batches(directory, source, 4, **options)
        default, checkpointed = (
            compute_step(load_model(directory, memory=MemoryConfig(activation_checkpointing=mode)), micro_batches)
            for mode in ("none", "full")
        )
        assert default[0] == checkpointed[0]
        assert all(map(torch.equal, default[1], checkpointed[1]))


def test_tokens_without_target_do_not_count(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama2"))
    rows = random_tokens(1, 9)
    targets = torch.full_like(rows, IGNORE)
    targets[0, 3] = 5
    batch = Batch(rows, targets, torch.arange(9)[None], None, 1, 9)
    expected = -model(rows)[0, 3].log_softmax(-1)[5]
    assert CrossEntropy()(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_eval_loss_is_the_mean_over_target_tokens_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, source = make_checkpoint(tmp_path / "model", "llama3.2"), write_texts(tmp_path)
    model, run, gradient_flags = load_model(directory), DistributedContext(0, "cpu"), []

    def recording_losses(
        logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool
    ) -> Tensor:
        gradient_flags.append(gradient)
        return cross_entropy.token_losses_reference(logits, targets, weights, terms, gradient)

    monkeypatch.setattr(cross_entropy, "token_losses", recording_losses)
    loader = build_dataloader(TextDataset(source), Tokenizer.open(directory), len(LENGTHS), 2, run)
    loss = likelihood.eval_loss(CrossEntropy(), model, loader, run)
    micro_batches = loader[0]
    logits = [model(batch.tokens, batch.positions).flatten(0, 1) for batch in micro_batches]
    targets = torch.cat([batch.targets.flatten() for batch in micro_batches])
    expected = F.cross_entropy(torch.cat(logits).double(), targets, ignore_index=IGNORE)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert gradient_flags == [False] * 4 and model.training


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 1.5])
def test_label_smoothing_must_be_a_fraction(smoothing: float) -> None:
    with pytest.raises(FieldError, match="smoothing"):
        CrossEntropy(smoothing)
