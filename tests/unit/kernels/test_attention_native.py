"""C++ attention: properties beyond those that test_attention.py checks for every backend."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from tests.helpers.random_checkpoints import relative_error
from tests.unit.kernels.test_attention import make_sinks
from tunekit.kernels import attention_cpu
from tunekit.kernels.attention import AttentionParams, attention, attention_per_document
from tunekit.kernels.sequence_cases import packed_attention_definition
from tunekit.kernels.sequence_layout import SequenceLayout

pytestmark = pytest.mark.skipif(not attention_cpu.is_available(), reason="no compiler, or a CPU without bf16 matmul")

RULES = {
    "causal": AttentionParams(0.2),
    "window": AttentionParams(0.2, window=70),
    "chunk": AttentionParams(0.2, chunk=90),
    "window and chunk": AttentionParams(0.2, window=33, chunk=150),
    "softcap": AttentionParams(0.2, softcap=3.0),
    "softcap and window": AttentionParams(0.2, window=70, softcap=3.0),
}
BOUNDS = {
    "whole": [0, 600],
    "many": [0, 1, 2, 130, 131, 387, 400, 464, 600],
    "empty ones": [0, 0, 0, 200, 200, 600, 600, 600],
}


def make_inputs(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int, tokens: int = 600) -> list[Tensor]:
    torch.manual_seed(tokens)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim)
    return [(1.5 * torch.randn(2, tokens // 2, *shape)).to(dtype).requires_grad_() for shape in shapes]


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum, whose weights are exact in bf16."""
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return list(torch.autograd.grad(y, inputs, weight.type_as(y)))


def relative_norm_error(actual: Tensor, expected: Tensor) -> float:
    """Relative error over all elements: the maximum error depends on a single rounding."""
    return float((actual.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (128, 128), (96, 32), (7, 5), (200, 200), (200, 256)])
@pytest.mark.parametrize("name", RULES)
def test_bf16_is_as_accurate_as_torch(name: str, dims: tuple[int, int]) -> None:
    inputs, rule, bounds = make_inputs(torch.bfloat16, 4, 2, *dims), RULES[name], BOUNDS["many"]
    expected, offsets = packed_attention_definition(inputs, rule, bounds), torch.tensor(bounds, dtype=torch.int32)
    actual, torch_result = (
        attention(*inputs, rule, SequenceLayout(offsets)),
        attention_per_document(*inputs, rule, offsets, None),
    )
    # For values wider than keys, torch has no kernel and computes in fp32 throughout.
    limits = (3e-3, 6e-3) if dims[1] > dims[0] else (0.0, 0.0)
    assert actual.dtype == torch.bfloat16 and relative_norm_error(actual, expected) < max(
        1.05 * relative_norm_error(torch_result, expected), limits[0]
    )
    expected_grads = gradients(expected, inputs)
    for a, b, c in zip(gradients(actual, inputs), gradients(torch_result, inputs), expected_grads, strict=True):
        assert a.dtype == torch.bfloat16 and relative_norm_error(a, c) < max(
            1.05 * relative_norm_error(b, c), limits[1]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_attention_sinks(name: str, dtype: torch.dtype) -> None:
    """Sinks are not capped."""
    inputs, sinks, bounds = make_inputs(dtype, 6, 2, 16, 16), make_sinks(6), BOUNDS["many"]
    expected = packed_attention_definition(inputs, RULES[name], bounds, sinks)
    y = attention(*inputs, RULES[name], SequenceLayout(torch.tensor(bounds)), sinks)
    limit = 5e-6 if dtype == torch.float32 else 4e-2
    assert relative_error(y.double(), expected) < limit
    leaves = [*inputs, sinks]
    for grad, expected_grad in zip(gradients(y, leaves), gradients(expected, leaves), strict=True):
        assert relative_error(grad.double(), expected_grad.double()) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_inputs_equal_contiguous_ones(dtype: torch.dtype) -> None:
    """Heads before tokens, strided channels, every other token: the results equal those of contiguous copies."""
    torch.manual_seed(0)
    q = torch.randn(2, 6, 50, 16).to(dtype).transpose(1, 2)
    k = torch.randn(2, 50, 2, 32).to(dtype)[..., ::2]
    v = torch.randn(2, 100, 2, 24).to(dtype)[:, ::2, :, 3:20]
    strided, contiguous = (
        [x.requires_grad_() for x in tensors] for tensors in ([q, k, v], [x.contiguous() for x in (q, k, v)])
    )
    y, expected = (
        attention(*inputs, AttentionParams(0.3), SequenceLayout(torch.tensor([0, 30, 77, 100])))
        for inputs in (strided, contiguous)
    )
    assert torch.equal(y, expected)
    assert all(map(torch.equal, gradients(y, strided), gradients(expected, contiguous)))


def test_strided_gradients_equal_contiguous_ones() -> None:
    inputs = make_inputs(torch.float32, 4, 2, 16, 16, 100)
    y = attention(*inputs, AttentionParams(0.3))
    grad = torch.randn(2, 4, 50, 16).transpose(1, 2)
    grads = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    assert all(map(torch.equal, grads, torch.autograd.grad(y, inputs, grad.contiguous())))


def test_empty_inputs_give_empty_outputs() -> None:
    inputs = [torch.randn(1, 0, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    y = attention(*inputs, AttentionParams(0.3))
    assert y.shape == (1, 0, 4, 8)
    assert all(grad.shape == x.shape for grad, x in zip(torch.autograd.grad(y.sum(), inputs), inputs, strict=True))


def test_huge_scores_stay_finite() -> None:
    """All keys except one have probability zero."""
    inputs = [100 * x.detach() for x in make_inputs(torch.float32, 2, 1, 16, 16, 200)]
    inputs = [x.requires_grad_() for x in inputs]
    expected, y = (
        packed_attention_definition(inputs, AttentionParams(1.0), [0, 200]),
        attention(*inputs, AttentionParams(1.0), SequenceLayout(torch.tensor([0, 200]))),
    )
    assert relative_error(y.double(), expected) < 1e-5
    assert all(grad.isfinite().all() for grad in gradients(y, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [[0, 1500], [0, 200, 512, 1400, 1500]])
def test_number_of_threads_does_not_change_bits(dtype: torch.dtype, bounds: list[int]) -> None:
    inputs, before = make_inputs(dtype, 6, 2, 32, 32, 1500), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = attention(*inputs, AttentionParams(0.2), SequenceLayout(torch.tensor(bounds)))
            results.append([y, *gradients(y, inputs)])
    finally:
        torch.set_num_threads(before)
    for first, second in itertools.pairwise(results):
        assert all(map(torch.equal, first, second))


def test_checkpointed_gradients_are_the_same() -> None:
    inputs, layout = make_inputs(torch.bfloat16, 6, 2, 16, 16), SequenceLayout(torch.tensor(BOUNDS["many"]))
    expected = gradients(attention(*inputs, RULES["window"], layout), inputs)
    recomputed = checkpoint(attention, *inputs, RULES["window"], layout, use_reentrant=False)
    assert all(map(torch.equal, gradients(recomputed, inputs), expected))


def test_compiled_once_for_all_documents() -> None:
    """No graph break. Other bounds do not recompile, and another number of documents recompiles once."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    inputs, rule, counts = make_inputs(torch.float32, 6, 2, 16, 16, 60), AttentionParams(0.3, window=9), []
    for bounds in ([0, 20, 60], [0, 33, 60], [0, 10, 20, 60], [0, 1, 2, 3, 60], [0, 5, 30, 40, 50, 60]):
        layout = SequenceLayout(torch.tensor(bounds, dtype=torch.int32))
        assert torch.equal(compiled(*inputs, rule, layout), attention(*inputs, rule, layout))
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 2, 2]


def test_operator_is_registered_consistently() -> None:
    """Fake tensors, gradients and schema are consistent, with and without sinks."""
    inputs = make_inputs(torch.float32, 4, 2, 8, 8, 20)
    for sinks in (None, make_sinks(4)):
        args = *inputs, *[torch.tensor([0, 7, 20])] * 2, sinks, AttentionParams(0.3).to_list()
        torch.library.opcheck(attention_cpu.attention.op, args)


MEMORY_SCRIPT = """
import re, torch
from pathlib import Path
from tunekit.kernels.attention import AttentionParams, attention
def peak_kib(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
def step(length):
    q, k, v = (torch.randn(1, length, 2, 16, requires_grad=True) for _ in range(3))
    attention(q, k, v, AttentionParams(0.3)).sum().backward()
step(256)
before = peak_kib()
step(4096)
print(peak_kib() - before)
"""


def test_long_rows_need_no_memory_for_all_pairs() -> None:
    """4,096 tokens: all pairs would take 64 MiB per head."""
    result = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 32 * 1024
