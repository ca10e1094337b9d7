"""The gated delta rule and the state space scan equal their float64 recurrences in every variant, and transformers."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as theirs

from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels import gated_delta_rule as delta
from tunekit.kernels.gated_delta_rule import (
    CHUNK,
    batched,
    chunked,
    gated_delta_rule,
    normalize,
    recurrent,
    short_convolution,
)
from tunekit.kernels.sequence_cases import delta_rule_definition, layout_of, run_documents, state_space_definition
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.state_space import state_space_scan

LENGTHS = [1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
# Documents of three rows of 50 tokens: full rows, short ones, across the ends of rows and chunks, single tokens.
BOUNDS = [[0, 50, 100, 150], [0, 150], [0, 1, 2, 50, 57, 100, 149, 150], [0, 30, 64, 65, 129, 150], [*range(151)]]


def make_inputs(rows: int, length: int, heads: tuple[int, int] = (2, 6)) -> list[Tensor]:
    """Queries, keys, values, decays and betas."""
    torch.manual_seed(length)
    q, k = torch.randn(2, rows, length, heads[0], 8)
    v, decay = torch.randn(rows, length, heads[1], 10), -2 * torch.rand(rows, length, heads[1])
    return [x.requires_grad_() for x in (q, k, v, decay, torch.rand(rows, length, heads[1]))]


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


class Layer(NamedTuple):
    """A recurrent layer, its definition, and the number of its inputs: the state space model has no beta."""

    run: Callable[..., tuple[Tensor, Tensor]]
    definition: Callable[..., tuple[Tensor, Tensor]]
    num_inputs: int


LAYERS = {
    "gated delta rule": Layer(gated_delta_rule, delta_rule_definition, 5),
    "state space": Layer(state_space_scan, state_space_definition, 4),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@each_layer
@pytest.mark.parametrize("heads", [(2, 6), (3, 3), (1, 4)])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_equal_recurrence(length: int, heads: tuple[int, int], layer: Layer) -> None:
    inputs = make_inputs(2, length, heads)[: layer.num_inputs]
    actual, expected = layer.run(*inputs), run_documents(layer.definition, inputs, [0, length, 2 * length])
    assert_same(actual[0], expected[0], inputs)
    assert_same(actual[1], expected[1], inputs[1:])


@each_layer
@pytest.mark.parametrize("bounds", BOUNDS)
def test_documents_start_from_a_zero_state(bounds: list[int], layer: Layer) -> None:
    inputs = make_inputs(3, 50)[: layer.num_inputs]
    actual, state = layer.run(*inputs, layout=layout_of(bounds))
    expected, states = run_documents(layer.definition, inputs, bounds)
    assert_same(actual, expected, inputs)
    assert relative_error(state[0].double(), states[-1]) < 1e-5


@each_layer
@pytest.mark.parametrize("length", LENGTHS)
def test_state_is_continued(length: int, layer: Layer) -> None:
    """Starting from a state, in one pass or two. The gradient reaches the state."""
    inputs = make_inputs(2, length)[: layer.num_inputs]
    state = torch.randn(2, 6, 8, 10, requires_grad=True)
    expected, last = run_documents(layer.definition, inputs, [0, length, 2 * length], state)
    answers, end = layer.run(*inputs, state=state)
    assert_same(answers, expected, [*inputs, state])
    half, answers = length // 2, []
    for tokens in (slice(half), slice(half, None)):
        if inputs[0][:, tokens].numel():
            y, state = layer.run(*(x[:, tokens] for x in inputs), state=state)
            answers.append(y)
    assert relative_error(torch.cat(answers, dim=1).double(), expected) < 1e-5
    assert relative_error(end.double(), last) < 1e-5
    assert relative_error(state.double(), last) < 1e-5


@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0])
def test_scan_matches_transformers(scale: float) -> None:
    """Also with decays that underflow."""
    q, k, v, *_ = make_inputs(2, 100)
    rates, dt = -scale * torch.rand(6), torch.rand(2, 100, 6)
    expected = mamba2_chunk_scan(v, dt, rates, k, q, chunk_size=32)
    assert relative_error(state_space_scan(q, k, v * dt[..., None], rates * dt)[0], expected) < 1e-5


@pytest.mark.parametrize("decay", [0.0, -1e-6, -30.0, -100.0, -1e4, -1e30])
def test_extreme_decays(decay: float) -> None:
    """Sometimes everything decays and later tokens are as exact as before, or nothing decays and everything adds up."""
    inputs = make_inputs(1, 100)
    with torch.no_grad():
        inputs[3][:, ::7] = decay
        inputs[3][..., 0] = decay
        inputs[4][..., 1] = 1
        inputs[4][..., 2] = 0
    assert_same(gated_delta_rule(*inputs)[0], run_documents(delta_rule_definition, inputs, [0, 100])[0], inputs)


def test_repeated_keys() -> None:
    """The worst-conditioned system: all keys are equal, and each value replaces the previous one."""
    inputs = make_inputs(1, CHUNK)
    with torch.no_grad():
        inputs[1][:] = inputs[1][:, :1].clone()
        inputs[3].zero_(), inputs[4].fill_(1)
    assert (
        relative_error(
            gated_delta_rule(*inputs)[0].double(), run_documents(delta_rule_definition, inputs, [0, CHUNK])[0]
        )
        < 1e-5
    )


@pytest.mark.parametrize("rule", [chunked, batched])
@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK + 9])
def test_chunked_rules_equal_recurrence(rule: Callable, length: int) -> None:
    """Values, states and gradients of both implementations, in float64."""
    q, k, v, decay, beta = (x.detach().double() for x in make_inputs(2, length))
    decay[:, ::50] = float("-inf")  # the start of a document
    state = torch.randn(2, 2, 3, 8, 10, dtype=torch.float64)
    inputs = normalize(q).double(), normalize(k).double(), *(x.unflatten(2, (2, 3)) for x in (v, decay, beta)), state
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    actual, expected = rule(*inputs), recurrent(*inputs)
    weights = [torch.randn_like(x) for x in expected]
    grads = [torch.autograd.grad(outputs, inputs, weights) for outputs in (actual, expected)]
    for a, b in zip((*actual, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("decay", [0.0, -30.0, -1e4, -1e30])
def test_batched_chunks_survive_extreme_decays(decay: float) -> None:
    q, k, v, decays, beta = make_inputs(1, 200)
    with torch.no_grad():
        decays[:, ::7] = decay
        decays[..., 0] = decay
        k[:, 70:90] = k[:, 70:71].clone()
    inputs = (
        normalize(q),
        normalize(k),
        *(x.unflatten(2, (2, 3)) for x in (v, decays, beta)),
        torch.randn(1, 2, 3, 8, 10),
    )
    inputs = [x.detach().requires_grad_() for x in inputs]
    actual, expected = batched(*inputs), recurrent(*(x.double() for x in inputs))
    grads = [torch.autograd.grad(outputs[0].sum(), inputs) for outputs in (actual, expected)]
    for a, b in zip((*actual, *grads[0]), (*expected, *grads[1]), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def fla_contract(q, k, v, g, beta, **options) -> tuple[Tensor, Tensor]:  # noqa: ANN001
    """Documented contract of flash-linear-attention: as many heads as values have, and a state per document."""
    assert q.shape[2] == k.shape[2] == v.shape[2] and options["use_qk_l2norm_in_kernel"]
    bounds = options["cu_seqlens"]
    if bounds is None:
        return gated_delta_rule(q, k, v, g, beta, state=options["initial_state"])
    spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    pairs = [gated_delta_rule(*(x[:, i:j] for x in (q, k, v, g, beta))) for i, j in spans]
    return torch.cat([y for y, _ in pairs], dim=1), torch.cat([state for _, state in pairs])


@pytest.mark.parametrize("bounds", [None, [0, 30, 64, 65, 129, 150]])
def test_flash_linear_attention_is_called_with_its_contract(bounds: list[int] | None) -> None:
    inputs = make_inputs(3, 50)
    layout = layout_of(bounds)
    state = torch.randn(3, 6, 8, 10) if bounds is None else None
    expected, last = gated_delta_rule(*inputs, layout=layout, state=state)
    actual, end = delta.run_fla(fla_contract, tuple(inputs), layout, state)
    assert relative_error(end, last) < 1e-5
    assert_same(actual, expected.double(), inputs)


@pytest.mark.parametrize("has_triton", [True, False])
def test_flash_linear_attention_needs_triton(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used if our Triton kernels are, for half precision and more than one token."""
    monkeypatch.setattr(delta, "uses_triton", lambda x: has_triton)
    values = torch.ones(1, 2, 1, 4)
    assert delta.is_supported_by_fla(values.bfloat16()) == has_triton
    assert not delta.is_supported_by_fla(values) and not delta.is_supported_by_fla(values[:, :1].bfloat16())


def test_bounds_are_copied_once_and_are_no_inference_tensors() -> None:
    layout = SequenceLayout(torch.tensor([0, 3, 5], dtype=torch.int32))
    with torch.inference_mode():
        first = delta.get_bounds(layout, 3, torch.device("cpu"))
    assert delta.get_bounds(layout, 3, torch.device("cpu")) is first
    assert not any(t.is_inference() for t in first)


def test_results_equal_transformers() -> None:
    inputs = make_inputs(2, 70)
    q, k, v, *gates = inputs
    groups = v.shape[2] // k.shape[2]
    repeated = (t.repeat_interleave(groups, dim=2) for t in (q, k))  # transformers 5.17 leaves this to its caller
    expected, last = theirs(*repeated, v, *gates, use_qk_l2norm_in_kernel=True, output_final_state=True)
    actual, state = gated_delta_rule(*inputs)
    assert_same(actual, expected.double(), inputs)
    assert relative_error(state, last) < 1e-5


def test_bf16_inputs_are_computed_in_fp32() -> None:
    inputs = [x.detach().bfloat16() for x in make_inputs(2, 70)]
    actual, state = gated_delta_rule(*inputs)
    assert (actual.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    expected, last = gated_delta_rule(*(x.float() for x in inputs))
    assert torch.equal(actual, expected.bfloat16())
    assert torch.equal(state, last)


def test_convolution_continues_from_previous_tokens() -> None:
    x, weight = torch.randn(2, 9, 5), torch.randn(5, 4)
    expected = short_convolution(x, weight)
    assert relative_error(short_convolution(x[:, 6:], weight, previous=x[:, 3:6]), expected[:, 6:]) < 1e-6
