"""Losses are sums: cut a step into micro-batches or pack it, and the gradient stays the same."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoints import error, made, ours, tokens
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


def texts(folder: Path) -> str:
    """Rows of very different lengths."""
    draw = torch.Generator().manual_seed(4)
    rows = [[f"w{int(i)}" for i in torch.randint(0, 60, (n,), generator=draw)] for n in LENGTHS]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def step(model: Decoder, batches: list[Batch]) -> tuple[float, list[Tensor]]:
    """Mean loss of a step, and its gradients, as the recipe takes them."""
    model.zero_grad()
    learnt = sum(part.learnt for part in batches)
    total = 0.0
    for part in batches:
        loss = CrossEntropy()(model, part) / learnt
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def apart(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of a gradient, of its largest number; of one that is only rounding, the difference itself."""
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-2)).item()


def batches(folder: Path, source: str, micro_batch: int, **options: object) -> list[Batch]:
    rows = TextDataset(source, **options)
    loader = build_dataloader(rows, Tokenizer.open(folder), len(LENGTHS), micro_batch, DistributedContext(0, "cpu"))
    assert loader.steps(1) == 1
    return loader[0]


# Full attention, windows, chunks, latent attention, delta nets and experts.
KINDS = ["llama3.2", "mistral", "qwen3-sliding", "llama4", "deepseek-v3", "qwen3.5", "qwen3-next", "qwen3.5-moe"]
KINDS += ["qwen3-moe", "mixtral", "gpt-oss", "olmoe", "gemma4-moe"]
# How many rows an expert gets decides in which order BLAS adds them up: 1.2e-5 for gpt-oss with MKL on an Intel Xeon
# without AVX512-BF16, below 1e-5 on an AMD EPYC.
MAX_GRADIENT_ERROR = 2e-5


@pytest.mark.parametrize("name", KINDS)
def test_micro_batches_and_packing_change_nothing(name: str, tmp_path: Path) -> None:
    folder, source = made(tmp_path / "model", name), texts(tmp_path)
    model = ours(folder)
    loss, wanted = step(model, batches(folder, source, 8))
    for micro_batch in (1, 2, 4):
        parts = batches(folder, source, micro_batch)
        assert len(parts) == 8 // micro_batch
        other, found = step(model, parts)
        assert other == pytest.approx(loss, rel=1e-5)
        assert max(map(apart, found, wanted)) < MAX_GRADIENT_ERROR
    for length, micro_batch in ((40, 8), (40, 1), (33, 2), (120, 1)):
        parts = batches(folder, source, micro_batch, packing=True, max_length=length)
        assert sum(part.learnt for part in parts) == sum(LENGTHS)
        other, found = step(model, parts)
        assert other == pytest.approx(loss, rel=1e-5)
        assert max(map(apart, found, wanted)) < MAX_GRADIENT_ERROR


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_documents_do_not_leak(name: str, tmp_path: Path) -> None:
    """Another text in one document changes no logit of the others, which are those of each document alone.

    Not to the bit where there are experts: what another document gives them changes how many rows one product has, and
    with that, in which order BLAS adds up a row.
    """
    model = ours(made(tmp_path, name))
    bounds = [0, 7, 8, 21, 30, 40]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)]).view(2, 20)
    layout = SequenceLayout(torch.tensor(bounds, dtype=torch.int32))
    rows = tokens(2, 20)
    packed = model(rows, positions, layout).flatten(0, 1)
    for a, b in zip(bounds, bounds[1:], strict=False):
        assert error(packed[a:b], model(rows.view(1, -1)[:, a:b])[0]) < 1e-5
    other = rows.flatten().clone()
    other[8:21] = tokens(1, 13, seed=9)
    changed = model(other.view(2, 20), positions, layout).flatten(0, 1)
    before, behind = (torch.cat([logits[:8], logits[21:]]) for logits in (packed, changed))
    if all(isinstance(layer.ffn, MLP) for layer in model.spec.layers):
        assert torch.equal(before, behind)
    assert error(before, behind) < 2e-6
    assert (packed[8:21] != changed[8:21]).any()


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_recompute_changes_no_bit(name: str, tmp_path: Path) -> None:
    folder, source = made(tmp_path / "model", name), texts(tmp_path)
    for options in ({}, {"packing": True, "max_length": 40}):
        parts = batches(folder, source, 4, **options)
        plain, saved = (
            step(ours(folder, memory=MemoryConfig(activation_checkpointing=mode)), parts) for mode in ("none", "full")
        )
        assert plain[0] == saved[0]
        assert all(map(torch.equal, plain[1], saved[1]))


def test_a_token_without_a_target_counts_for_nothing(tmp_path: Path) -> None:
    model = ours(made(tmp_path, "llama2"))
    rows = tokens(1, 9)
    targets = torch.full_like(rows, IGNORE)
    targets[0, 3] = 5
    part = Batch(rows, targets, torch.arange(9)[None], None, 1, 9)
    wanted = -model(rows)[0, 3].log_softmax(-1)[5]
    assert CrossEntropy()(model, part).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_validation_is_the_mean_over_learnt_tokens_and_takes_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, source = made(tmp_path / "model", "llama3.2"), texts(tmp_path)
    model, run, asked = ours(folder), DistributedContext(0, "cpu"), []

    def watched(logits: Tensor, targets: Tensor, weights: Tensor | None, terms: list[float], gradient: bool) -> Tensor:
        asked.append(gradient)
        return cross_entropy.token_losses_reference(logits, targets, weights, terms, gradient)

    monkeypatch.setattr(cross_entropy, "token_losses", watched)
    rows = build_dataloader(TextDataset(source), Tokenizer.open(folder), len(LENGTHS), 2, run)
    found = likelihood.eval_loss(CrossEntropy(), model, rows, run)
    parts = rows[0]
    logits = [model(part.tokens, part.positions).flatten(0, 1) for part in parts]
    targets = torch.cat([part.targets.flatten() for part in parts])
    wanted = F.cross_entropy(torch.cat(logits).double(), targets, ignore_index=IGNORE)
    assert found == pytest.approx(wanted.item(), rel=1e-6)
    assert asked == [False] * 4 and model.training


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 1.5])
def test_smoothing_is_a_share(smoothing: float) -> None:
    with pytest.raises(FieldError, match="smoothing"):
        CrossEntropy(smoothing)
