"""Dtypes of weights and products, and compilation, which changes how numbers are made and not which."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FULL, SHAPES, batch, build, error, made, ours, save, theirs, tokens, train
from tunekit import devices
from tunekit.adapters.config import FrozenModel, LoRAConfig
from tunekit.checkpoint.hf_checkpoint import WEIGHTS
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.precision import PrecisionConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """bf16, with one layer in fp32 and one in fp16."""
    folder = save(build(SHAPES["llama-biases"]).bfloat16(), tmp_path)
    tensors = {name: t.clone() for name, t in load_file(folder / WEIGHTS).items()}
    for number, dtype in ((0, FP32), (1, FP16)):
        tensors |= {name: t.to(dtype) for name, t in tensors.items() if f"layers.{number}." in name}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("precision", "trained", "frozen"), [
    (PrecisionConfig(), FP32, None), (PrecisionConfig("fp32", "bf16", "fp32"), BF16, FP32),
    (PrecisionConfig("bf16", "bf16", "bf16"), BF16, BF16), (PrecisionConfig("fp32", "fp32", "bf16"), FP32, BF16),
])  # fmt: skip
def test_each_weight_has_the_dtype_that_was_asked(precision, trained, frozen, mixed: Path) -> None:
    model = ours(mixed, LoRAConfig(2), precision)
    for name, p in model.named_parameters():
        stored = FP32 if "layers.0." in name else FP16 if "layers.1." in name else BF16
        assert p.dtype == (trained if p.requires_grad else frozen or stored), name
    assert {p.dtype for p in ours(mixed, FULL, precision).parameters()} == {trained}
    logits = model(tokens())
    best = BF16 if devices.has_fast_bf16(torch.device("cpu")) else FP32
    assert logits.dtype == {"bf16": BF16, "fp32": FP32, "auto": best}[precision.compute_dtype]
    wanted = theirs(mixed)(tokens()).logits
    assert error(logits.float().detach(), wanted.detach()) < (0.1 if BF16 in (logits.dtype, frozen) else 1e-5)


@pytest.mark.parametrize(("flags", "fast"), [
    ("fpu avx512f avx512_bf16", True), ("asimd bf16 i8mm", True), ("fpu avx2 f16c", False), (None, False),
])  # fmt: skip
def test_bf16_is_for_processors_that_multiply_it(flags, fast, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr("tunekit.system.CPU_INFO", info)
    assert devices.has_fast_bf16(torch.device("cpu")) is fast


def test_products_of_fp32_do_not_care_how_frozen_weights_are_kept(mixed: Path) -> None:
    kept = ours(mixed, FrozenModel(), PrecisionConfig("fp32", frozen_dtype="checkpoint"))
    assert torch.equal(
        kept(tokens()), ours(mixed, FrozenModel(), PrecisionConfig("fp32", frozen_dtype="fp32"))(tokens())
    )


def test_gradients_of_bf16_products_are_fp32(mixed: Path) -> None:
    model = ours(mixed, LoRAConfig(4), PrecisionConfig("bf16"))
    train(model, LoRAConfig(4), steps=1)
    part = batch(tokens())
    (CrossEntropy()(model, part) / part.learnt).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert {g.dtype for g in grads} == {FP32}
    assert all(g.isfinite().all() for g in grads)


def test_bf16_is_as_near_to_fp32_as_that_of_transformers(tmp_path: Path) -> None:
    folder = save(build(SHAPES["qwen3"]).bfloat16(), tmp_path)
    exact = theirs(folder)
    with torch.no_grad():
        wanted = exact(tokens()).logits
        mine = ours(folder, FrozenModel(), PrecisionConfig("bf16"))(tokens()).float()
        other = exact.bfloat16()(tokens()).logits.float()
    assert (mine - wanted).norm() < 1.5 * (other - wanted).norm()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compilation needs g++")
def test_compiled_layers_give_the_same(tmp_path: Path) -> None:
    folder = made(tmp_path, "qwen3-sliding")
    results = []
    for on in (False, True):
        model = ours(folder, compile=on)
        for rows in (tokens(2, 11), tokens(2, 17)):
            part = batch(rows)
            loss = CrossEntropy()(model, part) / part.learnt
            loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert max(map(error, results[1][1], results[0][1])) < 1e-4
