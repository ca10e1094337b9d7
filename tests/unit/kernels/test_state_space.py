"""The state space scan equals its float64 recurrence, and the scan of transformers."""

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels.gated_delta_rule import CHUNK
from tunekit.kernels.sequence_cases import run_documents, state_space_definition
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.state_space import state_space_scan

LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
# Documents of three rows of 50 tokens: full rows, short ones, across the ends of rows and chunks, single tokens.
BOUNDS = [[0, 50, 100, 150], [0, 150], [0, 1, 2, 50, 57, 100, 149, 150], [0, 30, 64, 65, 129, 150], [*range(151)]]


def make_inputs(rows: int, length: int, heads: tuple[int, int] = (2, 6)) -> list[Tensor]:
    """Queries, keys, values and decays."""
    torch.manual_seed(length)
    q, k = torch.randn(2, rows, length, heads[0], 8)
    v, decay = torch.randn(rows, length, heads[1], 10), -2 * torch.rand(rows, length, heads[1])
    return [x.requires_grad_() for x in (q, k, v, decay)]


def assert_same(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Assert that values and gradients agree. The first token decays no state: there a gradient may be zero."""
    weight = torch.randn_like(expected)
    grads, expected_grads = (torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True, allow_unused=True)
                             for y in (actual, expected))  # fmt: skip
    assert relative_error(actual.double(), expected) < 1e-5
    for a, b in zip(grads, expected_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.isfinite().all()
            assert relative_error(a.double(), b.double()) < 1e-5 or max(a.abs().max(), b.abs().max()) < 1e-6


@pytest.mark.parametrize("heads", [(2, 6), (3, 3), (1, 4)])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_equal_recurrence(length: int, heads: tuple[int, int]) -> None:
    inputs = make_inputs(2, length, heads)
    actual, expected = state_space_scan(*inputs), run_documents(state_space_definition, inputs, [0, length, 2 * length])
    assert_same(actual[0], expected[0], inputs)
    assert_same(actual[1], expected[1], inputs[1:])


@pytest.mark.parametrize("bounds", BOUNDS)
def test_documents_start_from_a_zero_state(bounds: list[int]) -> None:
    inputs = make_inputs(3, 50)
    actual, state = state_space_scan(*inputs, layout=SequenceLayout(torch.tensor(bounds, dtype=torch.int32)))
    expected, states = run_documents(state_space_definition, inputs, bounds)
    assert_same(actual, expected, inputs)
    assert relative_error(state[0].double(), states[-1]) < 1e-5


@pytest.mark.parametrize("length", LENGTHS)
def test_state_is_continued(length: int) -> None:
    """Starting from a state, in one pass or two. The gradient reaches the state."""
    inputs, state = make_inputs(2, length), torch.randn(2, 6, 8, 10, requires_grad=True)
    expected, last = run_documents(state_space_definition, inputs, [0, length, 2 * length], state)
    outputs, end = state_space_scan(*inputs, state=state)
    assert_same(outputs, expected, [*inputs, state])
    assert relative_error(end.double(), last) < 1e-5
    half = (length + 1) // 2
    first, state = state_space_scan(*(x[:, :half] for x in inputs), state=state)
    if half < length:
        second, state = state_space_scan(*(x[:, half:] for x in inputs), state=state)
        assert relative_error(torch.cat([first, second], dim=1).double(), expected) < 1e-5
    assert relative_error(state.double(), last) < 1e-5


@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0])
def test_scan_matches_transformers(scale: float) -> None:
    """Also with decays that underflow."""
    q, k, v, _ = make_inputs(2, 100)
    rates, dt = -scale * torch.rand(6), torch.rand(2, 100, 6)
    expected = mamba2_chunk_scan(v, dt, rates, k, q, chunk_size=32)
    assert relative_error(state_space_scan(q, k, v * dt[..., None], rates * dt)[0], expected) < 1e-5
