"""Codes that lose no more than they say, a step that is AdamW's but for that, and the same codes from every route."""

import ctypes
import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tunekit.kernels import adamw8bit
from tunekit.kernels.adamw8bit import BLOCK, AdamWHyperparams, Moments

KERNEL = adamw8bit
FP32, BF16 = torch.float32, torch.bfloat16
RULE = AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, 1)


def empty(count: int) -> Moments:
    codes = (torch.zeros(count, dtype=torch.uint8) for _ in range(2))
    return Moments(*codes, torch.zeros(2, -(-count // BLOCK)))


def copied(moments: Moments) -> Moments:
    return Moments(moments.first.clone(), moments.second.clone(), moments.scales.clone())


def spread(*shape: int) -> Tensor:
    """Numbers whose sizes differ a thousandfold."""
    return torch.randn(shape) * (torch.randn(shape) * 2).exp()


def test_every_code_stands_for_a_number_of_its_own_and_comes_back():
    codes = torch.arange(256, dtype=torch.uint8)[None]
    first, second = adamw8bit.decoded_first(codes), adamw8bit.decoded_second(codes)
    assert len(first.unique()) == 255, "zero has two signs"
    assert len(second.unique()) == 256
    assert first.abs().max() == 1.875 and second.max() == 1.9375
    assert torch.equal(adamw8bit.encoded_first(first)[0], codes)
    assert torch.equal(adamw8bit.encoded_second(second, torch.zeros(256, dtype=torch.int32))[0], codes)


def test_what_is_lost_is_bounded():
    x = spread(40, BLOCK)
    codes, scales = adamw8bit.encoded_first(x)
    found = adamw8bit.decoded_first(codes) * scales[:, None]
    lowest = scales[:, None] * 2.0**-15
    assert ((found - x).abs() <= x.abs() / 16 * 1.0001 + lowest).all()
    torch.testing.assert_close(found.abs().amax(1), x.abs().amax(1), rtol=1e-6, atol=0)  # the largest of a block
    root = x.abs()
    for number in (1, 2, 77):
        codes, scales = adamw8bit.encoded_second(root, adamw8bit.dither(number, x.device))
        found = adamw8bit.decoded_second(codes) * scales[:, None]
        seen = root > scales[:, None] * 2.0**-15 * 1.07
        assert ((found - root).abs()[seen] <= root[seen] / 16 * 1.0001).all()
        assert (found > 0).all(), "a step divides by it"


def test_roundings_even_out():
    """A number that stays the same is rounded up as often as it asks for."""
    root = spread(1, BLOCK).abs()
    mean = torch.zeros_like(root, dtype=torch.float64)
    for number in range(2000):
        codes, scales = adamw8bit.encoded_second(root, adamw8bit.dither(number, root.device))
        mean += adamw8bit.decoded_second(codes) * scales[:, None] / 2000
    seen = root > scales * 2.0**-14
    assert ((mean / root)[seen] - 1).abs().max() < 2e-3


def test_a_slow_second_moment_follows_what_is_rounded_to_the_nearest_would_not():
    weight, moments, exact = torch.zeros(BLOCK), empty(BLOCK), torch.zeros(BLOCK, dtype=torch.float64)
    grow = torch.where(torch.arange(BLOCK) % 2 == 0, 3.0, 1.0)
    for number in range(1, 3001):
        grad = torch.randn(BLOCK) * (grow if number > 1000 else 1)
        rule = AdamWHyperparams(0.0, 0.0, (0.9, 0.999), 1e-8, number)
        adamw8bit.adamw8bit_step(weight, grad, moments, rule)
        exact = 0.999 * exact + 0.001 * grad.double().square()
    found = adamw8bit.decoded_second(moments.second[None]) * moments.scales[1]
    ratio = (found.double() / exact.sqrt()).log()
    assert ratio.mean().abs() < 0.02
    assert ratio.std() < 0.15


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("count", [1, 255, 256, 4097, 70_000])
def test_the_first_step_is_that_of_torch(count: int, dtype) -> None:
    """Nothing has been encoded yet, so nothing is lost."""
    mine = torch.randn(count).to(dtype)
    theirs = torch.nn.Parameter(mine.float())
    grad = spread(count).to(dtype)
    adamw8bit.adamw8bit_step(mine, grad, empty(count), RULE)
    theirs.grad = grad.float()
    torch.optim.AdamW([theirs], RULE.rate, RULE.betas, RULE.eps, RULE.decay).step()
    torch.testing.assert_close(mine, theirs.detach().to(dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.half], ids=str)
@pytest.mark.parametrize("count", [1, 300, 70_001])
def test_every_route_makes_the_same_codes(count: int, dtype) -> None:
    start = torch.randn(count).to(dtype)
    ours, plain = start.clone(), start.clone()
    moments, reference = empty(count), empty(count)
    for number in range(1, 5):
        rule = AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, number)
        grad = spread(count).to(dtype)
        adamw8bit.adamw8bit_step(ours, grad, moments, rule)
        adamw8bit.step_reference(plain, grad, reference, rule)
        assert same(moments, reference)
        far = ~torch.isclose(ours, plain, rtol=1.3e-6 if dtype == FP32 else 1e-2, atol=1e-5)
        assert far.sum() <= max(1, count // 10_000), "a weight moves otherwise only where a code is the neighbour"
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-2)


def same(one: Moments, other: Moments) -> bool:
    """Equal but for rounding: one code in ten thousand may be the neighbour."""
    differ = [(a.int() - b.int()).abs() for a, b in ((one.first, other.first), (one.second, other.second))]
    near = all(d.max() <= 1 and d.sum() <= max(1, d.numel() // 10_000) for d in differ)
    return near and torch.allclose(one.scales, other.scales, rtol=1e-6)


def test_nothing_and_zeros() -> None:
    adamw8bit.adamw8bit_step(torch.zeros(0), torch.zeros(0), empty(0), RULE)
    weight, moments = torch.ones(300), empty(300)
    adamw8bit.adamw8bit_step(weight, torch.zeros(300), moments, RULE)
    assert torch.equal(weight, torch.ones(300) * (1 - 1e-3))
    assert not moments.first.any() and not moments.second.any()
    adamw8bit.adamw8bit_step(weight, torch.full((300,), math.inf), moments, RULE)
    assert weight.isnan().any(), "a gradient that is no number is seen"


def test_any_number_of_threads_gives_the_same_bits() -> None:
    found, threads = [], torch.get_num_threads()
    start, grad = torch.randn(100_000), spread(100_000)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        weight, moments = start.clone(), empty(100_000)
        adamw8bit.adamw8bit_step(weight, grad, moments, RULE)
        found.append((weight, moments))
    torch.set_num_threads(threads)
    for weight, moments in found[1:]:
        assert torch.equal(weight, found[0][0])
        assert torch.equal(moments.first, found[0][1].first) and torch.equal(moments.scales, found[0][1].scales)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    start, grad = torch.randn(1000), spread(1000)
    ours, plain = start.clone(), start.clone()
    adamw8bit.adamw8bit_step(ours, grad, empty(1000), RULE)
    assert isinstance(adamw8bit.compiled(), ctypes.CDLL | None)
    monkeypatch.setattr(adamw8bit, "compiled", lambda: None)
    adamw8bit.adamw8bit_step(plain, grad, empty(1000), RULE)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("count", [1, 300, 256 * 8 + 1])
def test_the_kernel_of_a_gpu(count: int, interpreted: ModuleType) -> None:
    weight, moments = torch.randn(count), empty(count)
    plain, reference = weight.clone(), copied(moments)
    for number in (1, 2, 3):
        rule, grad = AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, number), spread(count)
        interpreted.step(weight, grad, moments, rule)
        adamw8bit.step_reference(plain, grad, reference, rule)
        assert same(moments, reference)
        torch.testing.assert_close(weight, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_gpu_makes_the_same_codes(dtype) -> None:
    weight, grad, moments = torch.randn(70_001).to(dtype), spread(70_001).to(dtype), empty(70_001)
    there = weight.cuda(), grad.cuda(), Moments(moments.first.cuda(), moments.second.cuda(), moments.scales.cuda())
    adamw8bit.adamw8bit_step(*there, RULE)
    adamw8bit.adamw8bit_step(weight, grad, moments, RULE)
    assert same(Moments(there[2].first.cpu(), there[2].second.cpu(), there[2].scales.cpu()), moments)
    torch.testing.assert_close(there[0].cpu(), weight)


ROWS = [(7, 64), (5, 300), (3, 4097), (2, 512), (4, 1)]


@pytest.mark.parametrize(("rows", "row"), ROWS)
def test_a_row_is_packed_as_if_it_were_alone(rows: int, row: int, interpreted: ModuleType, monkeypatch) -> None:
    """So codes and weights are the same however rows are divided, by every route."""
    monkeypatch.setattr(adamw8bit, "PART", 4)
    count, per = rows * row, -(-row // BLOCK)
    start = torch.randn(count)
    codes = (torch.zeros(count, dtype=torch.uint8) for _ in range(2))
    moments = Moments(*codes, torch.zeros(2, rows * per), row)
    alone = [empty(row) for _ in range(rows)]
    for route in (adamw8bit.adamw8bit_step, adamw8bit.step_reference, interpreted.step):
        whole, apart = start.clone(), start.clone().view(rows, row)
        for number in (1, 2):
            rule, grad = AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, number), spread(count)
            route(whole, grad, moments, rule)
            for one, weight, part in zip(alone, apart, grad.view(rows, row), strict=True):
                route(weight, part, one, rule)
        assert torch.equal(whole, apart.flatten())
        assert torch.equal(moments.first, torch.cat([one.first for one in alone]))
        assert torch.equal(moments.second, torch.cat([one.second for one in alone]))
        assert torch.equal(moments.scales, torch.cat([one.scales for one in alone], dim=1))
