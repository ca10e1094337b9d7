"""Attention on a GPU: its masks and scores on any machine, and all of it where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.checkpoints import error
from tests.kernels.test_attention import sinks_of, visible
from tests.kernels.test_attention_native import BOUNDS, RULES, gradients, made, truth
from tunekit.devices import CDNA
from tunekit.kernels import attention_gpu
from tunekit.kernels.attention import AttentionParams, attention
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout

CPU = torch.device("cpu")


def seen(rule: AttentionParams, bounds: list[int]) -> Tensor:
    """All pairs (T, T)."""
    lengths = torch.tensor(bounds).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = torch.cat([torch.arange(int(n)) for n in lengths])
    return visible(place[None], place, rule)[0] & (document[:, None] == document)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", RULES)
def test_blocks_are_those_that_anybody_sees(name: str, bounds: str) -> None:
    """And the whole ones are seen whole."""
    rule, size = RULES[name], attention_gpu.BLOCK
    offsets = torch.tensor(BOUNDS[bounds])
    mask = attention_gpu.blocks(*attention_gpu.cut(offsets, offsets, rule.chunk or 0), rule.window or 0, CPU)
    pairs = seen(rule, BOUNDS[bounds])
    count = -(-len(pairs) // size)
    tiles = torch.nn.functional.pad(pairs, (0, count * size - len(pairs)) * 2).view(count, size, count, size)
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(3).any(1))
    for row in range(count):
        whole = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]]
        assert all(pairs[row * size : (row + 1) * size, column * size : (column + 1) * size].all() for column in whole)
    index = torch.arange(len(pairs))
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index), pairs)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_flex(name: str, sunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has a forward pass on the CPU too."""
    monkeypatch.setattr(attention_gpu, "compiled", lambda: flex_attention)
    rule, bounds, sinks = RULES[name], BOUNDS["many"], sinks_of(6).detach() if sunk else None
    inputs = [x.detach() for x in made(torch.float32, 6, 2, 24, 24)]
    y = attention_gpu.attention_gpu(*inputs, rule.numbers(), SequenceLayout(torch.tensor(bounds)), sinks)
    assert error(y.double(), truth(inputs, rule, bounds, sinks)) < 1e-6


def scores(q: Tensor, k: Tensor, bounds: attention_gpu.Bounds, rule: list[float]) -> Tensor:
    """(H, T, K) of flat queries and keys. Where documents have more keys, the queries are those of the last ones."""
    at, longest, key_at, most = bounds
    assert (longest, most) == (int(at.diff().max()), int(key_at.diff().max()))
    lengths = at.diff()
    own = torch.arange(len(q)) + (key_at[1:] - at[1:]).repeat_interleave(lengths)
    pairs = seen(AttentionParams(rule[0], int(rule[1]) or None), key_at.tolist())[own]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (torch.einsum("qhd,khd->hqk", q, k) * rule[0]).masked_fill(~pairs, float("-inf"))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: attention_gpu.Bounds, rule: list[float]
) -> tuple[Tensor, ...]:
    """What the kernel of torch gives, in float64."""
    found = scores(q.double(), k.double(), bounds, rule)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", found.softmax(-1), v).type_as(q), found.logsumexp(-1).float()


def flash_backward(grad: Tensor, saved: list[Tensor], bounds: attention_gpu.Bounds, rule: list[float]) -> list[Tensor]:
    """What the kernel of torch gives: its shares are those that the log-sum-exp tells."""
    q, k, v, y, lse = (x.double() for x in saved)
    group, shape = q.shape[1] // k.shape[1], k.shape
    shares = (scores(q, k, bounds, rule) - lse[..., None]).exp()
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    grad = grad.double()
    delta = (grad * y).sum(-1).T[..., None]
    change = shares * (torch.einsum("qhd,khd->hqk", grad, v) - delta) * rule[0]
    dk, dv = (
        torch.einsum("hqk,qhd->khd", a, b).view(len(k), -1, group, shape[2]).sum(2)
        for a, b in ((change, q), (shares, grad))
    )
    return [x.type_as(saved[0]).contiguous() for x in (torch.einsum("hqk,khd->qhd", change, k), dk, dv)]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention as it is written down, on the CPU."""
    monkeypatch.setattr(attention_gpu, "forward", flash_forward)
    monkeypatch.setattr(attention_gpu, "backward", flash_backward)
    monkeypatch.setattr(attention_gpu, "HALF_DTYPES", (torch.float32,))
    yield


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dims", [(24, 24), (21, 12), (8, 8), (12, 20)])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("name", [name for name in RULES if "softcap" not in name])
def test_what_is_done_around_flash_attention(name: str, sunk: bool, dims: tuple[int, int]) -> None:
    """Documents, chunks, widths, sinks and their gradients, with the kernel as it is written down."""
    rule, bounds, sinks = RULES[name], BOUNDS["many"], sinks_of(6) if sunk else None
    inputs = made(torch.float32, 6, 2, *dims)
    wanted = truth(inputs, rule, bounds, sinks)
    y = attention_gpu.attention_gpu(*inputs, rule.numbers(), SequenceLayout(torch.tensor(bounds)), sinks)
    assert error(y.double(), wanted) < 1e-6
    everything = [*inputs, *([] if sinks is None else [sinks])]
    for mine, right in zip(gradients(y, everything), gradients(wanted, everything), strict=True):
        assert error(mine, right) < 2e-6


@pytest.mark.usefixtures("kernel")
def test_sinks_need_the_log_sum_exp_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its layout is another one, as on ROCm, FlexAttention computes them."""
    monkeypatch.setattr(attention_gpu, "get_capabilities", lambda device: CDNA)
    monkeypatch.setattr(attention_gpu, "compiled", lambda: flex_attention)
    monkeypatch.setattr(attention_gpu, "forward", None)
    rule, bounds, sinks = AttentionParams(0.2), BOUNDS["many"], sinks_of(6).detach()
    inputs = [x.detach() for x in made(torch.float32, 6, 2, 24, 24)]
    y = attention_gpu.attention_gpu(*inputs, rule.numbers(), SequenceLayout(torch.tensor(bounds)), sinks)
    assert error(y.double(), truth(inputs, rule, bounds, sinks)) < 1e-6


@pytest.mark.usefixtures("kernel")
def test_rows_are_documents_if_nobody_says() -> None:
    inputs = made(torch.float32, 6, 2, 16, 16)
    y = attention_gpu.attention_gpu(*inputs, AttentionParams(0.2).numbers(), None, None)
    assert error(y.double(), truth(inputs, AttentionParams(0.2), [0, 300, 600])) < 1e-6


@pytest.mark.parametrize("window", [0, 70])
def test_the_kernels_of_torch_take_what_they_are_given(window: int) -> None:
    """On tensors without numbers, for which torch checks arguments and tells shapes."""
    q, k, v = (torch.empty(100, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (6, 2, 2))
    at, rule = torch.empty(4, dtype=torch.int32, device="meta"), [0.2, float(window), 0.0, 0.0]
    bounds = at, 60, at, 60
    y, lse = attention_gpu.forward(q, k, v, bounds, rule)
    assert y.shape == q.shape and lse.shape == (6, 100)
    found = attention_gpu.backward(y, [q, k, v, y, lse], bounds, rule)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


def test_bounds_go_to_the_device_once_a_pass() -> None:
    layout = SequenceLayout(torch.tensor([0, 3, 10]))
    first = attention_gpu.varlen_bounds(layout, 4, CPU)
    assert first[0].tolist() == first[2].tolist() == [0, 3, 7, 10] and first[1] == first[3] == 4
    assert attention_gpu.varlen_bounds(layout, 4, CPU) is first
    assert attention_gpu.varlen_bounds(layout, 0, CPU)[0].tolist() == [0, 3, 10]


def test_each_device_has_bounds_of_its_own() -> None:
    """Layouts of rows are cached in a process, where one model may be on each of several devices."""
    layout, meta = rows_layout(3, 7), torch.device("meta")
    for device in (CPU, meta, CPU):
        queries, _, keys, _ = attention_gpu.varlen_bounds(layout, 4, device)
        assert queries.device == keys.device == device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (20, 12)])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("bounds", ["many", "empty ones"])
@pytest.mark.parametrize("name", RULES)
def test_on_a_gpu(name: str, bounds: str, sunk: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    rule, at = RULES[name], BOUNDS[bounds]
    inputs = made(dtype, 6, 2, *dims)
    sinks = sinks_of(6) if sunk else None
    everything = [*inputs, *([] if sinks is None else [sinks])]
    wanted = truth(inputs, rule, at, sinks)
    there = [x.detach().cuda().requires_grad_() for x in everything]
    y = attention(*there[:3], rule, SequenceLayout(torch.tensor(at, dtype=torch.int32)), there[3] if sunk else None)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert error(y.double().cpu(), wanted) < limit
    for mine, right in zip(gradients(y.cpu(), there), gradients(wanted, everything), strict=True):
        assert error(mine.double().cpu(), right.double()) < limit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_long_rows_on_a_gpu_need_no_memory_for_all_pairs() -> None:
    for rule in (AttentionParams(0.2), AttentionParams(0.2, softcap=9.0)):
        q, k, v = (
            torch.randn(1, 2**15, 1, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, rule, SequenceLayout(torch.tensor([0, 20000, 2**15]))).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 2**28  # all pairs in bf16: 2 GiB
