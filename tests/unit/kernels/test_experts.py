"""Grouped matmuls of expert weights equal float64 matmuls of single rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.random_checkpoints import relative_error
from tests.helpers.triton_interpreter import requires_interpreter_loops
from tunekit.kernels import grouped_mm as experts
from tunekit.kernels.grouped_mm import copy_by_expert, grouped_mm, invert, is_supported, permute_rows, reference
from tunekit.kernels.sequence_cases import grouped_mm_definition

ROWS = {"some": [3, 1, 5, 2], "gaps": [0, 4, 0, 7], "one": [0, 0, 11, 0], "first": [11, 0, 0, 0], "last": [0, 0, 0, 11]}
FITTING, ODD = (16, 24), (7, 5)  # row widths that torch's grouped_mm supports, and others
FP32, BF16 = torch.float32, torch.bfloat16
KERNEL = experts


def make_inputs(rows: list[int], widths: tuple[int, int], x: torch.dtype, weight: torch.dtype) -> list[Tensor]:
    """Rows, weights and biases with gradients, and the group sizes."""
    inner, outer = widths
    torch.manual_seed(0)
    numbers = torch.randn(sum(rows), inner).to(x), torch.randn(len(rows), outer, inner).to(weight)
    bias = torch.randn(len(rows), outer).to(weight)
    return [*(t.requires_grad_() for t in (*numbers, bias)), torch.tensor(rows)]


def results(product, x: Tensor, weight: Tensor, bias: Tensor, sizes: Tensor) -> list[Tensor]:
    """Output, and gradients of x, weight and bias."""
    y = product(x, weight, sizes, bias)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_gradients_of_empty_experts_are_zero(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some GPU kernels leave the output of empty groups uninitialized."""
    x, weight, bias, sizes = make_inputs(rows, FITTING, FP32, FP32)
    assert is_supported(x, weight) and not is_supported(x, weight.to(BF16))
    expected = results(grouped_mm, x, weight, bias, sizes)
    torch_grouped_mm = F.grouped_mm

    def uninitialized_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        y = torch_grouped_mm(a, b, offs=offs)
        return y if y.ndim == 2 else y.masked_fill((sizes == 0)[:, None, None], float("nan"))

    monkeypatch.setattr(experts.F, "grouped_mm", uninitialized_grouped_mm)
    monkeypatch.setattr(experts, "ZERO_FILLED", set())
    for a, b in zip(results(grouped_mm, x, weight, bias, sizes), expected, strict=True):
        assert torch.equal(a, b)


def test_frozen_weights_have_no_gradient() -> None:
    x, weight, bias, sizes = make_inputs(ROWS["gaps"], FITTING, FP32, FP32)
    y = grouped_mm(x, weight.requires_grad_(False), sizes, bias.requires_grad_(False))
    assert [step is None for step, _ in y.grad_fn.next_functions] == [False, True, True, True]
    y.sum().backward()
    assert relative_error(x.grad, weight.sum(1)[torch.tensor([1] * 4 + [3] * 7)]) < 1e-6


def test_permuted_rows_and_their_gradient() -> None:
    x, grad = torch.randn(9, 4, requires_grad=True), torch.randn(9, 4)
    order = torch.randperm(9)
    y = permute_rows(x, order, order.argsort())
    assert torch.equal(y, x[order])
    y.backward(grad)
    assert torch.equal(x.grad[order], grad)


@pytest.mark.parametrize("copies", [1, 3])
def test_copied_rows_equal_repeated_and_permuted_rows(copies: int) -> None:
    """Values and gradients are equal bit for bit."""
    x, grad, order = torch.randn(7, 4).bfloat16().requires_grad_(), torch.randn(7 * copies, 4).bfloat16(), None
    order = torch.randperm(7 * copies)
    assert torch.equal(invert(order), order.argsort())
    expected = permute_rows(x.repeat_interleave(copies, dim=0), order, order.argsort())
    actual = copy_by_expert(x, order, invert(order), copies)
    assert torch.equal(actual, expected)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (actual, expected)))


@requires_interpreter_loops
@pytest.mark.parametrize("rows", [[70, 0, 1, 64, 0], [0, 0, 130], [0, 3], [1] * 9], ids=str)
@pytest.mark.parametrize("widths", [(16, 24), (136, 72)], ids=str)
def test_interpreted_kernels_equal_products(rows: list[int], widths: tuple[int, int], interpreted) -> None:
    x, weight, _, sizes = (t.detach() for t in make_inputs(rows, widths, FP32, FP32))
    ends = experts.group_ends(sizes)
    expected = grouped_mm_definition(x, weight, sizes, torch.zeros(weight.shape[:2]))
    assert relative_error(interpreted.grouped_product(x, weight.mT, ends), expected) < 1e-6
    expected_grad = torch.cat([part @ w for part, w in zip(expected.split(rows), weight, strict=True)])
    assert relative_error(interpreted.grouped_product(expected, weight, ends), expected_grad) < 1e-6
    outer = torch.stack([a.T @ b for a, b in zip(expected.split(rows), x.split(rows), strict=True)])
    assert relative_error(interpreted.grouped_outer(expected, x, ends), outer) < 3e-6


@requires_interpreter_loops
@pytest.mark.parametrize("ends", [[3, 90], [90, 90], [-8, 5], [5, -(2**31)], [4, 2]], ids=str)
def test_interpreted_kernels_stay_inside_of_the_rows(ends: list[int], interpreted) -> None:
    x, weight = torch.randn(5, 16), torch.randn(2, 16, 24)
    bounds = torch.tensor(ends, dtype=torch.int32)
    valid_bounds = bounds.clamp(0, len(x))
    first, last = valid_bounds.tolist()
    y, outer = interpreted.grouped_product(x, weight, bounds), interpreted.grouped_outer(x, x, bounds)
    for expert, span in enumerate((slice(0, first), slice(first, last))):
        torch.testing.assert_close(y[span], x[span] @ weight[expert])
        torch.testing.assert_close(outer[expert], x[span].T @ x[span])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_gpu_equals_reference_without_synchronization(rows: list[int]) -> None:
    x, weight, bias, sizes = (t.detach().cuda() for t in make_inputs(rows, FITTING, BF16, BF16))
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert is_supported(x, weight)
    torch.cuda.set_sync_debug_mode("error")
    y = grouped_mm(x, weight, sizes, bias)
    grads = torch.autograd.grad(y, inputs, torch.ones_like(y))
    torch.cuda.set_sync_debug_mode("default")
    expected = reference(*(t.detach().cpu().float().requires_grad_() for t in (x, weight)), sizes.cpu(), bias.cpu())
    assert relative_error(y.detach().cpu().float(), expected.detach()) < 1e-2
    assert relative_error(grads[2].cpu().float(), sizes.cpu()[:, None].expand(-1, FITTING[1]).float()) < 1e-2
