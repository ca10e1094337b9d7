"""dtypes of weights and of compute, and compilation, which does not change results."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.random_checkpoints import (
    FULL,
    SHAPES,
    build,
    load_model,
    load_transformers_model,
    make_batch,
    make_checkpoint,
    random_tokens,
    relative_error,
    save,
    train,
)
from tunekit import devices
from tunekit.adapters.config import FrozenModel, LoRAConfig
from tunekit.checkpoint.hf_checkpoint import WEIGHTS
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.precision import PrecisionConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def mixed_checkpoint(tmp_path: Path) -> Path:
    """bf16 checkpoint with one layer in fp32 and one in fp16."""
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
def test_weights_have_the_requested_dtype(precision, trained, frozen, mixed_checkpoint: Path) -> None:
    model = load_model(mixed_checkpoint, LoRAConfig(2), precision)
    for name, p in model.named_parameters():
        stored = FP32 if "layers.0." in name else FP16 if "layers.1." in name else BF16
        assert p.dtype == (trained if p.requires_grad else frozen or stored), name
    assert {p.dtype for p in load_model(mixed_checkpoint, FULL, precision).parameters()} == {trained}
    logits = model(random_tokens())
    auto_dtype = BF16 if devices.has_fast_bf16(torch.device("cpu")) else FP32
    assert logits.dtype == {"bf16": BF16, "fp32": FP32, "auto": auto_dtype}[precision.compute_dtype]
    expected = load_transformers_model(mixed_checkpoint)(random_tokens()).logits
    assert relative_error(logits.float().detach(), expected.detach()) < (
        0.1 if BF16 in (logits.dtype, frozen) else 1e-5
    )


@pytest.mark.parametrize(("flags", "max_isa", "fast"), [
    ("fpu avx512f avx512_bf16", "", True), ("asimd bf16 i8mm", "", True), ("fpu avx2 f16c", "", False),
    (None, "", False), ("fpu avx512f avx512_bf16", "avx2", False), ("fpu amx_bf16", "AVX512_CORE", False),
    ("fpu amx_bf16", "AVX512_CORE_BF16", True),
])  # fmt: skip
def test_fast_bf16_is_detected_from_cpu_flags(flags, max_isa, fast, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr("tunekit.system.CPU_INFO", info)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", max_isa)
    assert devices.has_fast_bf16(torch.device("cpu")) is fast


def test_fp32_compute_does_not_depend_on_frozen_dtype(mixed_checkpoint: Path) -> None:
    model = load_model(mixed_checkpoint, FrozenModel(), PrecisionConfig("fp32", frozen_dtype="checkpoint"))
    assert torch.equal(
        model(random_tokens()),
        load_model(mixed_checkpoint, FrozenModel(), PrecisionConfig("fp32", frozen_dtype="fp32"))(random_tokens()),
    )


def test_gradients_of_bf16_compute_are_fp32(mixed_checkpoint: Path) -> None:
    model = load_model(mixed_checkpoint, LoRAConfig(4), PrecisionConfig("bf16"))
    train(model, LoRAConfig(4), steps=1)
    micro_batch = make_batch(random_tokens())
    (CrossEntropy()(model, micro_batch) / micro_batch.num_target_tokens).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert {g.dtype for g in grads} == {FP32}
    assert all(g.isfinite().all() for g in grads)


def test_bf16_error_is_at_most_that_of_transformers(tmp_path: Path) -> None:
    folder = save(build(SHAPES["qwen3"]).bfloat16(), tmp_path)
    reference = load_transformers_model(folder)
    with torch.no_grad():
        expected = reference(random_tokens()).logits
        actual = load_model(folder, FrozenModel(), PrecisionConfig("bf16"))(random_tokens()).float()
        other = reference.bfloat16()(random_tokens()).logits.float()
    assert (actual - expected).norm() < 1.5 * (other - expected).norm()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compilation needs g++")
def test_compiled_layers_match_eager(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3-sliding")
    results = []
    for on in (False, True):
        model = load_model(folder, compile=on)
        for rows in (random_tokens(2, 11), random_tokens(2, 17)):
            micro_batch = make_batch(rows)
            loss = CrossEntropy()(model, micro_batch) / micro_batch.num_target_tokens
            loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert max(map(relative_error, results[1][1], results[0][1])) < 1e-4
