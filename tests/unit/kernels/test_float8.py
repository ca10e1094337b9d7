"""Blockwise float8: rounding errors, and matmuls with quantized weights, forward and backward."""

import pytest
import torch

from tunekit.kernels import float8
from tunekit.kernels.nf4 import BLOCK

ROUNDING = 2**-4  # three bits of mantissa, rounded to the nearest


def quantize_random(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight whose rows differ in magnitude, its codes and its scales."""
    weight = torch.randn(shape) * torch.logspace(-12, 6, shape[-2])[:, None]
    codes, scales = float8.quantize(weight)
    return weight, codes.view(shape), scales.view(torch.uint8).view(*shape[:-1], -1)


@pytest.mark.parametrize("shape", [(80, 128), (3, 64, 192)])
def test_rounding_error_is_bounded(shape: tuple[int, ...]) -> None:
    weight, codes, scales = quantize_random(*shape)
    dequantized = float8.dequantize(codes, scales)
    blocks = weight.view(-1, BLOCK)
    finest = blocks.abs().amax(1, keepdim=True) / float8.MAX_VALUE * 2**-10  # half of the smallest float8 number
    error = (dequantized.view(-1, BLOCK) - blocks).abs()
    assert (error <= torch.maximum(blocks.abs() * ROUNDING, finest) * 1.001).all()
    largest = blocks.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(
        dequantized.view(-1, BLOCK).gather(1, largest), blocks.gather(1, largest), rtol=1e-6, atol=0
    )
    assert error.norm() > 0.01 * blocks.norm()  # really quantized


def test_quantizing_again_gives_the_same_codes() -> None:
    _, codes, scales = quantize_random(80, 128)
    codes_again, scales_again = float8.quantize(float8.dequantize(codes, scales))
    assert torch.equal(codes_again.view(codes.shape), codes)
    torch.testing.assert_close(scales_again, scales.view(torch.float32).flatten(), rtol=1e-6, atol=0)


def test_zero_block_stays_zero() -> None:
    codes, scales = float8.quantize(torch.zeros(2, 64))
    dequantized = float8.dequantize(codes.view(2, 64), scales.view(torch.uint8).view(2, -1))
    assert torch.equal(dequantized, torch.zeros(2, 64))


def test_large_weights_are_dequantized_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    _, codes, scales = quantize_random(80, 128)
    expected = float8.dequantize(codes, scales)
    monkeypatch.setattr(float8, "TILE_SIZE", {"cpu": 7 * 128})
    assert torch.equal(float8.dequantize(codes, scales), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matmul_equals_that_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    _, codes, scales = quantize_random(80, 128)
    dense = float8.dequantize(codes, scales).to(dtype)
    x, grad = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True), torch.randn(2, 5, 80, dtype=dtype)
    bias = torch.randn(80, dtype=dtype)
    y = float8.matmul(x, codes, scales, None, "float8", bias)
    assert torch.equal(y, torch.nn.functional.linear(x, dense) + bias)
    (grad_x,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(grad_x, grad @ dense)
    torch.testing.assert_close(float8.matmul_backward(grad, codes, scales, None, "float8"), grad @ dense)


def test_matmuls_of_experts() -> None:
    _, codes, scales = quantize_random(3, 64, 128)
    dense, sizes = float8.dequantize(codes, scales), torch.tensor([4, 0, 5])
    x = torch.randn(9, 128, requires_grad=True)
    y = float8.grouped_matmul(x, codes, scales, None, sizes, "float8")
    expected = torch.cat([rows @ w.T for rows, w in zip(x.split(sizes.tolist()), dense, strict=True)])
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad))
