"""Tensors that a generation or an evaluation leaves in caches are fit for a training step of the same shape."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpu.flash_on_cpu import cpu_flash
from tests.helpers.random_checkpoints import load_model, make_batch, make_checkpoint, random_tokens
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.kernels import attention_gpu, fake_mode, nf4, nf4_codes, sequence_layout
from tunekit.kernels.device_tensors import DeviceConstants
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout
from tunekit.losses.cross_entropy import CrossEntropy

CPU = torch.device("cpu")


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention as on a GPU, with the kernel of torch written down."""
    monkeypatch.setattr(attention_gpu, "is_supported", lambda q, capped: True)
    monkeypatch.setattr(attention_gpu, "HALF_DTYPES", (torch.float32,))
    sequence_layout.cached_rows_layout.cache_clear()
    with cpu_flash():
        yield
    sequence_layout.cached_rows_layout.cache_clear()


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("name", ["llama3.2", "phi3-long", "llama4"])
def test_training_after_generation(name: str, tmp_path: Path) -> None:
    model, rows = load_model(make_checkpoint(tmp_path, name)), random_tokens(2, 12)
    answers = generate_batch(model, rows.tolist(), SamplingConfig(max_new_tokens=2), frozenset())
    assert all(len(answer) == 2 for answer in answers)
    CrossEntropy()(model.train(), make_batch(rows)).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_derived_tensors_are_normal_tensors() -> None:
    with torch.inference_mode():
        layout = SequenceLayout(torch.tensor([0, 3, 8]), torch.tensor([[0, 0], [2, 0]]))
        rows = rows_layout(3, 71)
        constants = DeviceConstants(lambda n: torch.arange(n))
        cached: list[Tensor] = [layout.token_lengths(CPU), layout.key_cu_seqlens, rows.cu_seqlens]
        cached += [constants(5, CPU), attention_gpu.varlen_bounds(layout, 0, CPU)[0]]
    assert not any(x.is_inference() for x in cached)


def test_constants_are_made_once_per_device() -> None:
    built: list[int] = []
    constants = DeviceConstants(lambda n: built.append(n) or torch.arange(n))
    assert constants(3, CPU) is constants(3, CPU)
    assert constants(3, torch.device("meta")).is_meta
    assert built == [3, 3]


def test_tables_outlive_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [value for value in vars(nf4_codes).values() if isinstance(value, DeviceConstants)]
    for constants in tables:
        monkeypatch.setattr(constants, "tensors", {})
    weight = torch.randn(4, 64)
    with fake_mode.fake_mode("cuda"), FakeTensorMode() as fake:
        packed, scales = nf4.quantize(fake.from_tensor(weight))
        nf4.dequantize(packed.view(4, 32), scales.view(4, 1).view(torch.uint8), None)
        nf4.dynamic_map(CPU)
    assert tables
    packed, scales = nf4.quantize(weight)
    restored = nf4.dequantize(packed.view(4, 32), scales.view(4, 1).view(torch.uint8), None)
    assert type(restored) is Tensor
    torch.testing.assert_close(restored, weight, rtol=0, atol=0.16 * weight.abs().max().item())


def test_no_cached_function_returns_tensors() -> None:
    """Their tensors could be fake, or created in inference mode; `DeviceConstants` avoids both."""
    pattern = re.compile(r"@(?:functools\.)?(?:lru_)?cache[^\n]*\ndef (\w+)[^:]*\([^)]*\) -> [^\n]*Tensor")
    names = [
        f"{file.name}: {name}"
        for folder in ("kernels", "tunekit", "recipes")
        for file in (Path(__file__).parents[2] / folder).rglob("*.py")
        for name in pattern.findall(file.read_text())
    ]
    assert names == ["attention_gpu.py: softcap_mod"]  # a function of tensors
