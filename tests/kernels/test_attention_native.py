"""Attention in C++: what only it promises, beside what test_attention.py asks of every form."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from tests.checkpoints import error
from tests.kernels.test_attention import plain, sinks_of, visible
from tunekit.kernels import attention_cpu
from tunekit.kernels.attention import AttentionParams, attention, packed
from tunekit.kernels.sequence_layout import SequenceLayout

pytestmark = pytest.mark.skipif(not attention_cpu.able(), reason="no compiler, or a processor without bf16 products")

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


def made(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int, tokens: int = 600) -> list[Tensor]:
    torch.manual_seed(tokens)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim)
    return [(1.5 * torch.randn(2, tokens // 2, *shape)).to(dtype).requires_grad_() for shape in shapes]


def truth(inputs: list[Tensor], rule: AttentionParams, bounds: list[int], sinks: Tensor | None = None) -> Tensor:
    lengths = torch.tensor(bounds).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = torch.cat([torch.arange(int(n)) for n in lengths])
    seen = visible(place[None], place, rule) & (document[:, None] == document)
    y = plain(*(x.flatten(0, 1)[None] for x in inputs), rule, seen, sinks)
    return y.unflatten(1, inputs[0].shape[:2])[0]


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Those of a weighted sum, whose weights are exact in bf16."""
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return list(torch.autograd.grad(y, inputs, weight.type_as(y)))


def spread(found: Tensor, wanted: Tensor) -> float:
    """The difference of all numbers together: that of the largest one is the luck of one rounding."""
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", RULES)
def test_fp32_is_exact(name: str, bounds: str, heads: tuple[int, int]) -> None:
    """Documents of several blocks and of one token, and empty ones."""
    inputs, rule = made(torch.float32, *heads, 24, 24), RULES[name]
    wanted = truth(inputs, rule, BOUNDS[bounds])
    y = attention(*inputs, rule, SequenceLayout(torch.tensor(BOUNDS[bounds], dtype=torch.int32)))
    assert error(y.double(), wanted) < 1e-6
    for mine, right in zip(gradients(y, inputs), gradients(wanted, inputs), strict=True):
        assert error(mine, right) < 2e-6


@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (128, 128), (96, 32), (7, 5), (200, 200), (200, 256)])
@pytest.mark.parametrize("name", RULES)
def test_bf16_is_as_near_to_the_truth_as_torch(name: str, dims: tuple[int, int]) -> None:
    inputs, rule, bounds = made(torch.bfloat16, 4, 2, *dims), RULES[name], BOUNDS["many"]
    wanted, offsets = truth(inputs, rule, bounds), torch.tensor(bounds, dtype=torch.int32)
    mine, other = attention(*inputs, rule, SequenceLayout(offsets)), packed(*inputs, rule, offsets, None)
    # Where values are wider than keys torch has no kernel, and works in fp32 throughout.
    limits = (3e-3, 6e-3) if dims[1] > dims[0] else (0.0, 0.0)
    assert mine.dtype == torch.bfloat16 and spread(mine, wanted) < max(1.05 * spread(other, wanted), limits[0])
    right = gradients(wanted, inputs)
    for a, b, c in zip(gradients(mine, inputs), gradients(other, inputs), right, strict=True):
        assert a.dtype == torch.bfloat16 and spread(a, c) < max(1.05 * spread(b, c), limits[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_sinks(name: str, dtype: torch.dtype) -> None:
    """They are not capped themselves."""
    inputs, sinks, bounds = made(dtype, 6, 2, 16, 16), sinks_of(6), BOUNDS["many"]
    wanted = truth(inputs, RULES[name], bounds, sinks)
    y = attention(*inputs, RULES[name], SequenceLayout(torch.tensor(bounds)), sinks)
    limit = 5e-6 if dtype == torch.float32 else 2e-2
    assert error(y.double(), wanted) < limit
    everything = [*inputs, sinks]
    for mine, right in zip(gradients(y, everything), gradients(wanted, everything), strict=True):
        assert error(mine.double(), right.double()) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_may_lie_apart(dtype: torch.dtype) -> None:
    """Heads before tokens, channels apart, every other token: all give what copies of them give."""
    torch.manual_seed(0)
    q = torch.randn(2, 6, 50, 16).to(dtype).transpose(1, 2)
    k = torch.randn(2, 50, 2, 32).to(dtype)[..., ::2]
    v = torch.randn(2, 100, 2, 24).to(dtype)[:, ::2, :, 3:20]
    apart, whole = ([x.requires_grad_() for x in form] for form in ([q, k, v], [x.contiguous() for x in (q, k, v)]))
    y, other = (
        attention(*inputs, AttentionParams(0.3), SequenceLayout(torch.tensor([0, 30, 77, 100])))
        for inputs in (apart, whole)
    )
    assert torch.equal(y, other)
    assert all(map(torch.equal, gradients(y, apart), gradients(other, whole)))


def test_gradients_may_lie_apart() -> None:
    inputs = made(torch.float32, 4, 2, 16, 16, 100)
    y = attention(*inputs, AttentionParams(0.3))
    grad = torch.randn(2, 4, 50, 16).transpose(1, 2)
    found = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(y, inputs, grad.contiguous())))


def test_nothing_gives_nothing() -> None:
    inputs = [torch.randn(1, 0, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    y = attention(*inputs, AttentionParams(0.3))
    assert y.shape == (1, 0, 4, 8)
    assert all(grad.shape == x.shape for grad, x in zip(torch.autograd.grad(y.sum(), inputs), inputs, strict=True))


def test_scores_may_be_huge() -> None:
    """As when every key but one has a share of zero."""
    inputs = [100 * x.detach() for x in made(torch.float32, 2, 1, 16, 16, 200)]
    inputs = [x.requires_grad_() for x in inputs]
    wanted, y = (
        truth(inputs, AttentionParams(1.0), [0, 200]),
        attention(*inputs, AttentionParams(1.0), SequenceLayout(torch.tensor([0, 200]))),
    )
    assert error(y.double(), wanted) < 1e-5
    assert all(grad.isfinite().all() for grad in gradients(y, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [[0, 1500], [0, 200, 512, 1400, 1500]])
def test_bits_do_not_depend_on_the_threads(dtype: torch.dtype, bounds: list[int]) -> None:
    inputs, before = made(dtype, 6, 2, 32, 32, 1500), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = attention(*inputs, AttentionParams(0.2), SequenceLayout(torch.tensor(bounds)))
            results.append([y, *gradients(y, inputs)])
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.pairwise(results):
        assert all(map(torch.equal, one, other))


def test_run_again_for_the_gradients() -> None:
    inputs, layout = made(torch.bfloat16, 6, 2, 16, 16), SequenceLayout(torch.tensor(BOUNDS["many"]))
    wanted = gradients(attention(*inputs, RULES["window"], layout), inputs)
    again = checkpoint(attention, *inputs, RULES["window"], layout, use_reentrant=False)
    assert all(map(torch.equal, gradients(again, inputs), wanted))


def test_compiled_once_for_all_documents() -> None:
    """No break in the graph; other bounds compile nothing, and another number of them once."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    inputs, rule, counts = made(torch.float32, 6, 2, 16, 16, 60), AttentionParams(0.3, window=9), []
    for bounds in ([0, 20, 60], [0, 33, 60], [0, 10, 20, 60], [0, 1, 2, 3, 60], [0, 5, 30, 40, 50, 60]):
        layout = SequenceLayout(torch.tensor(bounds, dtype=torch.int32))
        assert torch.equal(compiled(*inputs, rule, layout), attention(*inputs, rule, layout))
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 2, 2]


def test_the_operator_is_what_it_says() -> None:
    """Its fake, its gradients and its schema agree, with and without sinks."""
    inputs = made(torch.float32, 4, 2, 8, 8, 20)
    for sinks in (None, sinks_of(4)):
        args = *inputs, torch.tensor([0, 7, 20]), sinks, AttentionParams(0.3).numbers()
        torch.library.opcheck(attention_cpu.attention, args)


PROGRAM = """
import re, torch
from pathlib import Path
from tunekit.kernels.attention import AttentionParams, attention
def most(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
def step(length):
    q, k, v = (torch.randn(1, length, 2, 16, requires_grad=True) for _ in range(3))
    attention(q, k, v, AttentionParams(0.3)).sum().backward()
step(256)
before = most()
step(8192)
print(most() - before)
"""


def test_long_rows_need_no_memory_for_all_pairs() -> None:
    """A row of 8,192: all pairs would be 256 MiB a head."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 1024
