"""RoPE equals plain torch bit for bit."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels import rope
from tunekit.kernels.elementwise_cases import rotate_complex
from tunekit.kernels.rope import RopeTables, apply_rope, reference

KERNEL = rope
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = [(False, True), (True, True), (True, False)]  # interleaved, interleaved_output
PAIRS = 12


def make_tables(
    batch: int,
    length: int,
    interleaved: bool = False,
    interleaved_output: bool = True,
    rotate_last: bool = False,
    pairs: int = PAIRS,
) -> RopeTables:
    angle = torch.linspace(-9, 9, batch * length * pairs).view(batch, length, 1, pairs)
    return RopeTables(angle.cos(), angle.sin(), interleaved, interleaved_output, rotate_last)


def head_gradients(heads: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = [torch.arange(y.numel(), device=y.device).cos().view_as(y).to(y.dtype) for y in outputs]
    return torch.autograd.grad(outputs, heads, weights)


@pytest.fixture(autouse=True)
def needs_compiler() -> None:
    if rope.compiled() is None:
        pytest.skip("no compiler")


@pairwise(dtype=[FP32, BF16], layout=LAYOUTS, pairs=[8, 12, 16, 32, 60], extra=[0, 7, 40], rotate_last=[False, True])
def test_rotation_and_gradient_equal_reference(
    dtype, layout: tuple[bool, bool], pairs: int, extra: int, rotate_last: bool
) -> None:
    """`extra` channels are not rotated."""
    r = make_tables(2, 50, *layout, rotate_last, pairs)
    q, k = (torch.randn(2, 50, heads, 2 * pairs + extra).to(dtype).requires_grad_() for heads in (6, 2))
    actual, expected = apply_rope(q, k, r), (reference(q, r), reference(k, r))
    assert all(map(torch.equal, actual, expected))
    for result, target in zip(head_gradients((q, k), actual), head_gradients((q, k), expected), strict=True):
        assert result.dtype == dtype and torch.equal(result, target)


@pytest.mark.parametrize("view", [
    lambda x: x[:, ::2], lambda x: x[..., 1::2], lambda x: x[:, :, 1:3], lambda x: x.transpose(1, 2),
    lambda x: x[:1].expand(3, -1, -1, -1), lambda x: x[:0], lambda x: x[:, :0], lambda x: x[:, :, :0],
    lambda x: x.chunk(2, -1)[0],
])  # fmt: skip
def test_strided_tensors(view) -> None:
    x = view(torch.randn(2, 8, 4, 50)).requires_grad_()
    r = make_tables(*x.shape[:2])
    actual, _ = apply_rope(x, x[:, :, :0], r)
    assert actual.shape == x.shape and torch.equal(actual, reference(x, r))
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (actual, reference(x, r))))


def test_one_table_for_all_rows() -> None:
    x, r = torch.randn(3, 5, 2, 24), make_tables(1, 5)
    assert torch.equal(apply_rope(x, x, r)[1], reference(x, r))


def test_only_tables_are_saved() -> None:
    saved: list[Tensor] = []
    x, r = torch.randn(2, 7, 3, 24, requires_grad=True), make_tables(2, 7)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rope(x, x, r)
    assert {t.data_ptr() for t in saved} == {r.cos.data_ptr(), r.sin.data_ptr()}


def test_gradients_of_queries_only() -> None:
    q, k, r = torch.randn(1, 4, 2, 24, requires_grad=True), torch.randn(1, 4, 1, 24), make_tables(1, 4)
    actual, _ = apply_rope(q, k, r)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), q)[0] for y in (actual, reference(q, r))))


def test_compiled_and_traced() -> None:
    q, k, r = torch.randn(2, 6, 3, 30, requires_grad=True), torch.randn(2, 6, 1, 30), make_tables(2, 6)
    compiled = torch.compile(lambda: apply_rope(q, k, r), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(), apply_rope(q, k, r), strict=True))
    args = q, k, r.cos, r.sin, False, False, False, False
    torch.library.opcheck(
        rope.rope_op.op, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_unsupported_dtypes_use_torch() -> None:
    x, r = torch.randn(1, 4, 2, 24).to(FP16), make_tables(1, 4)
    assert relative_error(apply_rope(x, x, r)[0].double(), rotate_complex(x, r)) < 1e-3


@pytest.mark.parametrize("rotate_last", [False, True])
@pytest.mark.parametrize("layouts", [(a, b) for a in (False, True) for b in (False, True)])
@pytest.mark.parametrize("heads", [1, 3])
def test_interpreted_kernel_equals_compiled(
    heads: int, layouts: tuple[bool, bool], rotate_last: bool, interpreted: ModuleType
) -> None:
    x, r = torch.randn(1, 5, 2 * heads, 40)[:, :, ::2], make_tables(1, 5)
    for is_backward in (False, True):
        expected, _ = rope.rotate_forward(x, x[:, :, :0], r.cos, r.sin, *layouts, rotate_last, is_backward)
        y, start = torch.empty(5, heads, 40), 40 - 2 * PAIRS if rotate_last else 0
        tables = r.cos.view(5, PAIRS), r.sin.view(5, PAIRS)
        interpreted.rotate(x[0], y, *tables, start, -1.0 if is_backward else 1.0, *layouts)
        assert relative_error(y, expected[0]) < 1e-6


@pytest.mark.parametrize("changed", [{"cos": (1, 4, 1, 9)}, {"k": (1, 5, 2, 16)}, {"k": (1, 4, 2, 14)}], ids=str)
def test_tables_that_do_not_fit_are_rejected(changed: dict[str, tuple[int, ...]]) -> None:
    """Tables of more pairs than half of the channels would write beyond the heads."""
    shapes = {"q": (1, 4, 2, 16), "k": (1, 4, 1, 16), "cos": (1, 4, 1, 8)} | changed
    q, k, table = (torch.zeros(shape) for shape in shapes.values())
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), pytest.raises(ValueError, match="rope: "):
            apply_rope(q, k, RopeTables(table, table))
