"""The choice of attention kernels as a table, and the numbers of every route against float64. No GPU is needed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.helpers.random_checkpoints import relative_error
from tests.unit.kernels.test_attention import make_inputs
from tunekit.devices import CPU, Capabilities, Device, find_row
from tunekit.kernels import attention, attention_choice, attention_cpu
from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.attention_choice import AttentionBackend, AttentionCall, choose_attention_backend
from tunekit.kernels.attention_decode import CachePositions, attend_decode
from tunekit.kernels.sequence_cases import attention_definition, visible_mask
from tunekit.kernels.sequence_layout import SequenceLayout

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GENERATIONS = ((7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
V100, T4, A100, ADA, H100, B200, RTX5090 = (find_row(Device("cuda", capability)) for capability in GENERATIONS)
MI300X = find_row(Device("cuda", arch="gfx942"))
MODERN = [A100, ADA, H100, B200, RTX5090]


def call(row: Capabilities, dtype: torch.dtype, head_dim: int, **properties: bool) -> AttentionCall:
    return AttentionCall("cpu" if row is CPU else "cuda", dtype, head_dim, row, **properties)


TABLE = [
    # packed documents
    *((call(c, BF16, 128, is_packed=True), "FLASH_VARLEN") for c in MODERN),
    *((call(c, FP16, 256, is_packed=True), "FLASH_VARLEN") for c in MODERN),
    (call(H100, BF16, 128, is_packed=True, has_softcap=True), "FLEX"),  # Gemma 2
    (call(A100, FP32, 128, is_packed=True), "FLEX"),
    (call(A100, FP32, 192, is_packed=True), "PER_DOCUMENT"),  # DeepSeek in fp32
    (call(H100, BF16, 512, is_packed=True), "PER_DOCUMENT"),  # global layers of Gemma 4
    (call(T4, FP16, 64, is_packed=True), "PER_DOCUMENT"),
    (call(V100, FP32, 128, is_packed=True, has_softcap=True), "PER_DOCUMENT"),
    # each document, block of queries or part of a row
    *((call(c, BF16, 128), "SDPA_FLASH") for c in MODERN),
    *((call(c, BF16, 128, has_mask=True), "SDPA_EFFICIENT") for c in MODERN),
    (call(H100, BF16, 512), "SDPA_EFFICIENT"),
    (call(H100, FP32, 64), "SDPA_EFFICIENT"),
    (call(T4, FP16, 64), "SDPA_EFFICIENT"),
    (call(V100, FP32, 192, has_mask=True), "SDPA_EFFICIENT"),
    (call(T4, BF16, 64), "MATH"),  # `precision` never chooses bf16 there
    (call(H100, FP64, 64), "MATH"),
    (call(H100, BF16, 64, has_softcap=True), "MATH"),  # a block of queries at a time
    # one query per row on a cache
    *((call(c, BF16, 128, is_decoding=True, has_mask=True), "FLASH_DECODE") for c in MODERN),
    (call(H100, BF16, 192, is_decoding=True, has_mask=True), "FLASH_DECODE"),  # DeepSeek
    (call(H100, BF16, 512, is_decoding=True, has_mask=True), "SDPA_EFFICIENT"),
    (call(H100, BF16, 256, is_decoding=True, has_mask=True, has_softcap=True), "MATH"),
    (call(H100, FP32, 64, is_decoding=True, has_mask=True), "SDPA_EFFICIENT"),
    (call(T4, FP16, 64, is_decoding=True, has_mask=True), "SDPA_EFFICIENT"),
    (call(MI300X, BF16, 64, is_decoding=True, has_mask=True), "SDPA_EFFICIENT"),
    (call(CPU, BF16, 64, is_decoding=True, has_mask=True), "CPU"),
    (call(CPU, FP32, 512), "CPU"),
]


@pytest.mark.parametrize(("case", "backend"), TABLE, ids=str)
def test_backend_table(case: AttentionCall, backend: str) -> None:
    assert choose_attention_backend(case) is AttentionBackend[backend]


def test_math_is_chosen_only_where_no_fused_kernel_exists() -> None:
    for row in (V100, T4, MI300X, *MODERN):
        for dtype in (FP16, FP32, *([BF16] if row.bf16 else [])):
            for head_dim in (64, 80, 128, 192, 256, 512):
                for has_mask in (False, True):
                    case = call(row, dtype, head_dim, has_mask=has_mask)
                    backend = choose_attention_backend(case)
                    assert backend in (AttentionBackend.SDPA_FLASH, AttentionBackend.SDPA_EFFICIENT)


class SdpaCalls(TorchFunctionMode):
    """Arguments of all calls of scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            assert not (kwargs or {}).get("enable_gqa"), "the memory-efficient kernel refuses grouped heads"
            self.calls.append(args[:3])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the way of a T4: no FlashAttention, no C++."""
    monkeypatch.setattr(attention_cpu, "is_available", lambda: False)
    for module in (attention, attention_choice):
        monkeypatch.setattr(module, "device_type", lambda x: "cuda")
    monkeypatch.setattr(attention_choice, "get_capabilities", lambda device: T4)


RULES = [
    AttentionParams(0.3),
    AttentionParams(0.3, 5),
    AttentionParams(0.3, chunk=4),
    AttentionParams(0.3, 3, 7),
    AttentionParams(0.3, softcap=2.0),
    AttentionParams(0.3, 5, softcap=2.0),
]
SHAPES = [(6, 2, 12), (6, 1, 64), (5, 5, 21), (4, 2, 512)]  # heads, heads of keys, channels


@pytest.mark.usefixtures("old_gpu")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_packed_documents_without_flash_use_the_memory_efficient_kernel(
    rule: AttentionParams, shape: tuple[int, int, int]
) -> None:
    heads, kv_heads, dim = shape
    q, k, v = (x.detach() for x in make_inputs(17, heads, kv_heads, dim, rows=1, v=dim))
    bounds = torch.tensor([0, 1, 9, 17], dtype=torch.int32)
    with SdpaCalls() as sdpa, torch.no_grad():
        y = attention.attention(q, k, v, rule, SequenceLayout(bounds))
    lengths = bounds.diff()
    document = torch.repeat_interleave(torch.arange(3), lengths)
    place = torch.cat([torch.arange(int(n)) for n in lengths])
    seen = visible_mask(place[None], place, rule) & (document[:, None] == document)
    assert (
        relative_error(y.double(), attention_definition(q, k, v, rule, seen)) < 1e-5
    )  # scores of wide heads are large
    assert all(a.shape[1] == b.shape[1] and a.shape[-1] % 8 == 0 for a, b, _ in sdpa.calls)
    assert sdpa.calls or rule.softcap


@pytest.mark.usefixtures("old_gpu")
@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.softcap], ids=str)
def test_cached_keys_without_flash_use_the_memory_efficient_kernel(rule: AttentionParams) -> None:
    """Sinks have a kernel call of their own, see test_decode_step.py."""
    _, k, v = (x.detach() for x in make_inputs(17))
    positions, q = torch.tensor([[0], [9], [14]]), torch.randn(3, 1, 6, 12)
    with SdpaCalls() as sdpa, torch.no_grad():
        y = attend_decode(q, k, v, CachePositions(positions, 17, 15), rule)
    mask = visible_mask(positions, torch.arange(17), rule)
    assert relative_error(y.double(), attention_definition(q, k, v, rule, mask)) < 1e-6
    assert len(sdpa.calls) == 1


@pytest.mark.usefixtures("old_gpu")
def test_gradients_reach_grouped_heads_that_were_repeated() -> None:
    inputs = make_inputs(17, 6, 2)
    seen = visible_mask(torch.arange(17).expand(3, 17), torch.arange(17), AttentionParams(0.3))
    weight = torch.randn(3, 17, 6, 12)
    with SdpaCalls():
        mine = torch.autograd.grad((attention.attention(*inputs, AttentionParams(0.3)) * weight).sum(), inputs)
    expected = torch.autograd.grad((attention_definition(*inputs, AttentionParams(0.3), seen) * weight).sum(), inputs)
    assert max(relative_error(a, b) for a, b in zip(mine, expected, strict=True)) < 1e-5


@pytest.mark.usefixtures("old_gpu")
def test_the_choice_compiles() -> None:
    inputs = [x.detach() for x in make_inputs(17, 6, 2)]
    compiled = torch.compile(attention.sdpa, backend="aot_eager", fullgraph=True)
    assert relative_error(compiled(*inputs, 0.3, causal=True), attention.sdpa(*inputs, 0.3, causal=True)) < 1e-6
