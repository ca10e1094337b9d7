"""Rotation of heads: against complex numbers in float64, and against plain torch to the bit."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.checkpoints import error
from tunekit.kernels import rope
from tunekit.kernels.rope import RopeTables, apply_rope, reference

KERNEL = rope
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WAYS = [(False, True), (True, True), (True, False)]  # paired, keep_paired
PAIRS = 12


def rotation(batch: int, length: int, paired: bool = False, keep: bool = True, last: bool = False) -> RopeTables:
    angle = torch.linspace(-9, 9, batch * length * PAIRS).view(batch, length, 1, PAIRS)
    return RopeTables(angle.cos(), angle.sin(), paired, keep, last)


def exact(x: Tensor, r: RopeTables) -> Tensor:
    """Complex numbers in float64."""
    start = x.shape[-1] - 2 * PAIRS if r.last else 0
    part = x.double()[..., start : start + 2 * PAIRS]
    real, imaginary = (part[..., ::2], part[..., 1::2]) if r.paired else part.chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.complex(r.cos.double(), r.sin.double())
    y = x.double().clone()
    joined = torch.view_as_real(turned).flatten(-2) if r.paired and r.keep_paired else None
    y[..., start : start + 2 * PAIRS] = torch.cat([turned.real, turned.imag], -1) if joined is None else joined
    return y


def gradients(heads: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = [torch.arange(y.numel(), device=y.device).cos().view_as(y).to(y.dtype) for y in found]
    return torch.autograd.grad(found, heads, weights)


@pytest.fixture(autouse=True)
def fast() -> None:
    if rope.compiled() is None:
        pytest.skip("no compiler")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dim", [24, 31, 64])
@pytest.mark.parametrize(("paired", "keep"), WAYS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_heads_are_turned_and_turned_back(dtype, paired: bool, keep: bool, dim: int, last: bool) -> None:
    r = rotation(2, 50, paired, keep, last)
    q, k = (torch.randn(2, 50, heads, dim).to(dtype).requires_grad_() for heads in (6, 2))
    found, plain = apply_rope(q, k, r), (reference(q, r), reference(k, r))
    for mine, same, x in zip(found, plain, (q, k), strict=True):
        assert torch.equal(mine, same)
        assert error(mine.double(), exact(x, r)) < (1e-6 if dtype == FP32 else 1e-2)
    for mine, same in zip(gradients((q, k), found), gradients((q, k), plain), strict=True):
        assert mine.dtype == dtype and torch.equal(mine, same)


@pytest.mark.parametrize("of", [
    lambda x: x[:, ::2], lambda x: x[..., 1::2], lambda x: x[:, :, 1:3], lambda x: x.transpose(1, 2),
    lambda x: x[:1].expand(3, -1, -1, -1), lambda x: x[:0], lambda x: x[:, :0], lambda x: x[:, :, :0],
    lambda x: x.chunk(2, -1)[0],
])  # fmt: skip
def test_parts_and_strides(of) -> None:
    x = of(torch.randn(2, 8, 4, 50)).requires_grad_()
    r = rotation(*x.shape[:2])
    found, _ = apply_rope(x, x[:, :, :0], r)
    assert found.shape == x.shape and torch.equal(found, reference(x, r))
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, reference(x, r))))


def test_one_table_for_all_rows() -> None:
    x, r = torch.randn(3, 5, 2, 24), rotation(1, 5)
    assert torch.equal(apply_rope(x, x, r)[1], reference(x, r))


def test_only_tables_are_kept() -> None:
    kept: list[Tensor] = []
    x, r = torch.randn(2, 7, 3, 24, requires_grad=True), rotation(2, 7)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        apply_rope(x, x, r)
    assert {t.data_ptr() for t in kept} == {r.cos.data_ptr(), r.sin.data_ptr()}


def test_queries_alone_get_gradients() -> None:
    q, k, r = torch.randn(1, 4, 2, 24, requires_grad=True), torch.randn(1, 4, 1, 24), rotation(1, 4)
    found, _ = apply_rope(q, k, r)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), q)[0] for y in (found, reference(q, r))))


def test_compiled_and_traced() -> None:
    q, k, r = torch.randn(2, 6, 3, 30, requires_grad=True), torch.randn(2, 6, 1, 30), rotation(2, 6)
    whole = torch.compile(lambda: apply_rope(q, k, r), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(whole(), apply_rope(q, k, r), strict=True))
    args = q, k, r.cos, r.sin, False, False, False, False
    torch.library.opcheck(
        rope.turned, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_dtypes_of_which_the_loops_know_nothing() -> None:
    x, r = torch.randn(1, 4, 2, 24).to(FP16), rotation(1, 4)
    assert error(apply_rope(x, x, r)[0].double(), exact(x, r)) < 1e-3


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("paired_in", "paired_out"), [(a, b) for a in (False, True) for b in (False, True)])
@pytest.mark.parametrize("heads", [1, 3])
def test_on_a_gpu_that_is_interpreted(heads, paired_in, paired_out, last, interpreted: ModuleType) -> None:
    x, r = torch.randn(1, 5, 2 * heads, 40)[:, :, ::2], rotation(1, 5)
    for back in (False, True):
        wanted, _ = rope.turn(x, x[:, :, :0], r.cos, r.sin, paired_in, paired_out, last, back)
        y, start = torch.empty(5, heads, 40), 40 - 2 * PAIRS if last else 0
        tables = r.cos.view(5, PAIRS), r.sin.view(5, PAIRS)
        interpreted.rotate(x[0], y, *tables, start, -1.0 if back else 1.0, paired_in, paired_out)
        assert error(y, wanted[0]) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("paired", "keep"), WAYS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_on_a_gpu(dtype, paired: bool, keep: bool) -> None:
    r = rotation(2, 300, paired, keep)
    q, k = (torch.randn(2, 300, heads, 64).to(dtype).cuda().requires_grad_() for heads in (32, 8))
    r = r._replace(cos=r.cos.cuda(), sin=r.sin.cuda())
    found, plain = apply_rope(q, k, r), (reference(q, r), reference(k, r))
    for mine, same in zip((*found, *gradients((q, k), found)), (*plain, *gradients((q, k), plain)), strict=True):
        assert torch.equal(mine, same)
