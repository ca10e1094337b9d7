"""Floats of eight bits in blocks: what is lost, and products with them, forward and back."""

import pytest
import torch

from tunekit.kernels import float8
from tunekit.kernels.nf4 import BLOCK

ROUNDING = 2**-4  # three bits of mantissa, rounded to the nearest


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight of blocks that differ in size, its bytes and its scales."""
    weight = torch.randn(shape) * torch.logspace(-12, 6, shape[-2])[:, None]
    codes, scales = float8.quantize(weight)
    return weight, codes.view(shape), scales.view(torch.uint8).view(*shape[:-1], -1)


@pytest.mark.parametrize("shape", [(80, 128), (3, 64, 192)])
def test_numbers_lose_less_than_their_rounding(shape: tuple[int, ...]) -> None:
    weight, codes, scales = packed(*shape)
    found = float8.dequantize(codes, scales)
    blocks = weight.view(-1, BLOCK)
    finest = blocks.abs().amax(1, keepdim=True) / float8.LARGEST * 2**-10  # half of the smallest float of eight bits
    apart = (found.view(-1, BLOCK) - blocks).abs()
    assert (apart <= torch.maximum(blocks.abs() * ROUNDING, finest) * 1.001).all()
    largest = blocks.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.view(-1, BLOCK).gather(1, largest), blocks.gather(1, largest), rtol=1e-6, atol=0)
    assert apart.norm() > 0.01 * blocks.norm()  # it is no copy


def test_what_was_packed_comes_out_as_it_was() -> None:
    _, codes, scales = packed(80, 128)
    again, same = float8.quantize(float8.dequantize(codes, scales))
    assert torch.equal(again.view(codes.shape), codes)
    torch.testing.assert_close(same, scales.view(torch.float32).flatten(), rtol=1e-6, atol=0)


def test_a_block_of_zeros_stays_one() -> None:
    codes, scales = float8.quantize(torch.zeros(2, 64))
    found = float8.dequantize(codes.view(2, 64), scales.view(torch.uint8).view(2, -1))
    assert torch.equal(found, torch.zeros(2, 64))


def test_large_weights_are_decoded_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, codes, scales = packed(80, 128)
    whole = float8.dequantize(codes, scales)
    monkeypatch.setattr(float8, "TILE", {"cpu": 7 * 128})
    assert torch.equal(float8.dequantize(codes, scales), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_the_decoded_weight(dtype: torch.dtype) -> None:
    _, codes, scales = packed(80, 128)
    dense = float8.dequantize(codes, scales).to(dtype)
    x, grad = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True), torch.randn(2, 5, 80, dtype=dtype)
    bias = torch.randn(80, dtype=dtype)
    y = float8.product(x, codes, scales, None, "float8", bias)
    assert torch.equal(y, torch.nn.functional.linear(x, dense) + bias)
    (back,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(back, grad @ dense)
    torch.testing.assert_close(float8.product_back(grad, codes, scales, None, "float8"), grad @ dense)


def test_products_of_experts() -> None:
    _, codes, scales = packed(3, 64, 128)
    dense, sizes = float8.dequantize(codes, scales), torch.tensor([4, 0, 5])
    x = torch.randn(9, 128, requires_grad=True)
    y = float8.grouped(x, codes, scales, None, sizes, "float8")
    wanted = torch.cat([part @ w.T for part, w in zip(x.split(sizes.tolist()), dense, strict=True)])
    torch.testing.assert_close(y, wanted)
    grad = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(wanted, x, grad))
