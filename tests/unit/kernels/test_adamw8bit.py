"""8-bit AdamW: rounding errors are bounded, a step equals AdamW up to rounding, and all implementations agree."""

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


def empty_moments(count: int) -> Moments:
    codes = (torch.zeros(count, dtype=torch.uint8) for _ in range(2))
    return Moments(*codes, torch.zeros(2, -(-count // BLOCK)))


def clone_moments(moments: Moments) -> Moments:
    return Moments(moments.first.clone(), moments.second.clone(), moments.scales.clone())


def random_magnitudes(*shape: int) -> Tensor:
    """Random numbers whose magnitudes differ by a factor of a thousand."""
    return torch.randn(shape) * (torch.randn(shape) * 2).exp()


def test_codes_round_trip_and_are_unique():
    codes = torch.arange(256, dtype=torch.uint8)[None]
    first, second = adamw8bit.decode_first(codes), adamw8bit.decode_second(codes)
    assert len(first.unique()) == 255, "zero has two signs"
    assert len(second.unique()) == 256
    assert first.abs().max() == 1.875 and second.max() == 1.9375
    assert torch.equal(adamw8bit.encode_first(first)[0], codes)
    assert torch.equal(adamw8bit.encode_second(second, torch.zeros(256, dtype=torch.int32))[0], codes)


def test_rounding_error_is_bounded():
    x = random_magnitudes(40, BLOCK)
    codes, scales = adamw8bit.encode_first(x)
    decoded = adamw8bit.decode_first(codes) * scales[:, None]
    lowest = scales[:, None] * 2.0**-15
    assert ((decoded - x).abs() <= x.abs() / 16 * 1.0001 + lowest).all()
    torch.testing.assert_close(decoded.abs().amax(1), x.abs().amax(1), rtol=1e-6, atol=0)  # the maximum of a block
    root = x.abs()
    for number in (1, 2, 77):
        codes, scales = adamw8bit.encode_second(root, adamw8bit.dither(number, x.device))
        decoded = adamw8bit.decode_second(codes) * scales[:, None]
        is_large = root > scales[:, None] * 2.0**-15 * 1.07
        assert ((decoded - root).abs()[is_large] <= root[is_large] / 16 * 1.0001).all()
        assert (decoded > 0).all(), "an optimizer step divides by it"


def test_stochastic_rounding_is_unbiased():
    """Stochastic rounding has no bias."""
    root = random_magnitudes(1, BLOCK).abs()
    mean = torch.zeros_like(root, dtype=torch.float64)
    for number in range(2000):
        codes, scales = adamw8bit.encode_second(root, adamw8bit.dither(number, root.device))
        mean += adamw8bit.decode_second(codes) * scales[:, None] / 2000
    is_large = root > scales * 2.0**-14
    assert ((mean / root)[is_large] - 1).abs().max() < 2e-3


def test_slow_second_moment_needs_stochastic_rounding():
    weight, moments, exact = torch.zeros(BLOCK), empty_moments(BLOCK), torch.zeros(BLOCK, dtype=torch.float64)
    scale = torch.where(torch.arange(BLOCK) % 2 == 0, 3.0, 1.0)
    for number in range(1, 3001):
        grad = torch.randn(BLOCK) * (scale if number > 1000 else 1)
        rule = AdamWHyperparams(0.0, 0.0, (0.9, 0.999), 1e-8, number)
        adamw8bit.adamw8bit_step(weight, grad, moments, rule)
        exact = 0.999 * exact + 0.001 * grad.double().square()
    decoded = adamw8bit.decode_second(moments.second[None]) * moments.scales[1]
    ratio = (decoded.double() / exact.sqrt()).log()
    assert ratio.mean().abs() < 0.02
    assert ratio.std() < 0.15


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("count", [1, 255, 256, 4097, 70_000])
def test_first_step_equals_torch(count: int, dtype) -> None:
    """Without an encoded state there is no rounding error."""
    weight = torch.randn(count).to(dtype)
    expected = torch.nn.Parameter(weight.float())
    grad = random_magnitudes(count).to(dtype)
    adamw8bit.adamw8bit_step(weight, grad, empty_moments(count), RULE)
    expected.grad = grad.float()
    torch.optim.AdamW([expected], RULE.lr, RULE.betas, RULE.eps, RULE.weight_decay).step()
    torch.testing.assert_close(weight, expected.detach().to(dtype))


def is_same(actual: Moments, expected: Moments) -> bool:
    """Equal up to rounding: one code in ten thousand may differ by one."""
    differ = [(a.int() - b.int()).abs() for a, b in ((actual.first, expected.first), (actual.second, expected.second))]
    near = all(d.max() <= 1 and d.sum() <= max(1, d.numel() // 10_000) for d in differ)
    return near and torch.allclose(actual.scales, expected.scales, rtol=1e-6)


def test_empty_and_zero_inputs() -> None:
    adamw8bit.adamw8bit_step(torch.zeros(0), torch.zeros(0), empty_moments(0), RULE)
    weight, moments = torch.ones(300), empty_moments(300)
    adamw8bit.adamw8bit_step(weight, torch.zeros(300), moments, RULE)
    assert torch.equal(weight, torch.ones(300) * (1 - 1e-3))
    assert not moments.first.any() and not moments.second.any()
    adamw8bit.adamw8bit_step(weight, torch.full((300,), math.inf), moments, RULE)
    assert weight.isnan().any(), "a non-finite gradient is visible"


def test_number_of_threads_does_not_change_bits() -> None:
    results, threads = [], torch.get_num_threads()
    start, grad = torch.randn(100_000), random_magnitudes(100_000)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        weight, moments = start.clone(), empty_moments(100_000)
        adamw8bit.adamw8bit_step(weight, grad, moments, RULE)
        results.append((weight, moments))
    torch.set_num_threads(threads)
    for weight, moments in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(moments.first, results[0][1].first) and torch.equal(moments.scales, results[0][1].scales)


@pytest.mark.parametrize("count", [1, 300, 256 * 8 + 1])
def test_interpreted_triton_kernel_equals_reference(count: int, interpreted: ModuleType) -> None:
    weight, moments = torch.randn(count), empty_moments(count)
    expected, reference = weight.clone(), clone_moments(moments)
    for number in (1, 2, 3):
        rule, grad = AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, number), random_magnitudes(count)
        interpreted.step(weight, grad, moments, rule)
        adamw8bit.step_reference(expected, grad, reference, rule)
        assert is_same(moments, reference)
        torch.testing.assert_close(weight, expected)


ROWS = [(3, 64), (2, 300), (2, 2049), (2, 512), (3, 1)]


@pytest.mark.parametrize(("rows", "row"), ROWS)
def test_rows_are_quantized_independently(rows: int, row: int, interpreted: ModuleType, monkeypatch) -> None:
    """Codes and weights do not depend on how rows are sharded, in any implementation."""
    monkeypatch.setattr(adamw8bit, "REFERENCE_BLOCKS", 4)
    count, blocks_per_row = rows * row, -(-row // BLOCK)
    start = torch.randn(count)
    codes = (torch.zeros(count, dtype=torch.uint8) for _ in range(2))
    moments = Moments(*codes, torch.zeros(2, rows * blocks_per_row), row)
    row_moments = [empty_moments(row) for _ in range(rows)]
    for route in (adamw8bit.adamw8bit_step, adamw8bit.step_reference, interpreted.step):
        together, separate = start.clone(), start.clone().view(rows, row)
        for number in (1, 2):
            rule, grad = AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, number), random_magnitudes(count)
            route(together, grad, moments, rule)
            for row_moment, weight, row_grad in zip(row_moments, separate, grad.view(rows, row), strict=True):
                route(weight, row_grad, row_moment, rule)
        assert torch.equal(together, separate.flatten())
        assert torch.equal(moments.first, torch.cat([row_moment.first for row_moment in row_moments]))
        assert torch.equal(moments.second, torch.cat([row_moment.second for row_moment in row_moments]))
        assert torch.equal(moments.scales, torch.cat([row_moment.scales for row_moment in row_moments], dim=1))
