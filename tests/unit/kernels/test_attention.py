"""Attention equals a plain float64 softmax over all pairs, in every variant."""

import pytest
import torch
from torch import Tensor

from tests.helpers.largest_tensor import LargestTensor
from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels import attention, attention_cpu, attention_decode
from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.attention_decode import CachePositions, attend_decode
from tunekit.kernels.sequence_cases import attention_definition, packed_attention_definition, visible_mask
from tunekit.kernels.sequence_layout import SequenceLayout

WINDOWS = [None, 1, 2, 5, 16, 17, 40]
RULES = {
    **{f"window {window}": AttentionParams(0.3, window) for window in WINDOWS},
    **{f"chunk {chunk}": AttentionParams(0.3, chunk=chunk) for chunk in (1, 4, 17, 30)},
    "window and chunk": AttentionParams(0.3, window=3, chunk=7),
    "softcap": AttentionParams(0.3, softcap=2.0),
    "softcap and window": AttentionParams(0.3, window=5, softcap=2.0),
    "softcap and chunk": AttentionParams(0.3, chunk=6, softcap=2.0),
}
WITH_SINKS = ["window None", "window 1", "window 5", "window 40", "chunk 4"]  # no model has both a softcap and sinks
BOUNDS = [
    [0, 51], [0, 17, 34, 51], [0, 1, 2, 17, 20, 34, 51], [0, 5, 17, 30, 34, 45, 51], list(range(52)), [0, 30, 51],
]  # fmt: skip


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with the C++ kernel and with the torch fallback."""
    if request.param == "torch":
        monkeypatch.setattr(attention_cpu, "is_available", lambda: False)
        monkeypatch.setattr(attention_decode, "is_supported", lambda *tensors: False)
    elif not attention_cpu.is_available():
        pytest.skip("no compiler, or a CPU without bf16 matmul")
    return request.param


def make_inputs(
    length: int, heads: int = 6, kv_heads: int = 2, dim: int = 12, rows: int = 3, v: int = 12
) -> list[Tensor]:
    torch.manual_seed(length)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, v)
    return [2 * torch.randn(rows, length, *shape, requires_grad=True) for shape in shapes]


def make_sinks(heads: int) -> Tensor:
    return torch.linspace(-3, 4, heads, requires_grad=True)


def assert_same(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Assert that values and gradients agree."""
    weight = torch.randn_like(expected)
    grads, expected_grads = (torch.autograd.grad((y * weight).sum(), inputs) for y in (actual.double(), expected))
    assert relative_error(actual.double(), expected) < 3e-6
    for a, b in zip(grads, expected_grads, strict=True):
        # A query with a single key has a zero gradient up to rounding.
        assert relative_error(a, b) < 1e-5 or max(a.abs().max(), b.abs().max()) < 1e-5


@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (5, 5), (4, 2)])
@pytest.mark.parametrize("name", RULES)
def test_causal_attention_and_its_variants(name: str, heads: tuple[int, int]) -> None:
    inputs = make_inputs(17, *heads)
    seen = visible_mask(torch.arange(17).expand(3, 17), torch.arange(17), RULES[name])
    assert_same(attention.attention(*inputs, RULES[name]), attention_definition(*inputs, RULES[name], seen), inputs)


@pytest.mark.parametrize("heads", [(6, 2), (5, 5)])
@pytest.mark.parametrize("name", WITH_SINKS)
def test_attention_sinks(name: str, heads: tuple[int, int]) -> None:
    inputs, sinks = make_inputs(17, *heads), make_sinks(heads[0])
    seen = visible_mask(torch.arange(17).expand(3, 17), torch.arange(17), RULES[name])
    assert_same(
        attention.attention(*inputs, RULES[name], sinks=sinks),
        attention_definition(*inputs, RULES[name], seen, sinks),
        [*inputs, sinks],
    )


@pytest.mark.parametrize("name", ["window None", "softcap", "window 5"])
def test_values_narrower_than_keys(name: str) -> None:
    inputs = make_inputs(17, v=8)
    seen = visible_mask(torch.arange(17).expand(3, 17), torch.arange(17), RULES[name])
    assert_same(attention.attention(*inputs, RULES[name]), attention_definition(*inputs, RULES[name], seen), inputs)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", RULES)
def test_documents_do_not_attend_to_each_other(name: str, bounds: list[int]) -> None:
    """Documents may end inside a row or cross its end. Windows and chunks count from the start of a document."""
    inputs, rule = make_inputs(17), RULES[name]
    layout = SequenceLayout(torch.tensor(bounds, dtype=torch.int32))
    for sinks in (None, make_sinks(6)) if name in WITH_SINKS else (None,):
        actual = attention.attention(*inputs, rule, layout, sinks)
        assert_same(actual, packed_attention_definition(inputs, rule, bounds, sinks), inputs)


@torch.no_grad()
@pytest.mark.parametrize("name", RULES)
def test_decoding_with_cached_keys(name: str) -> None:
    """Rows are at different positions. Cache slots after them must be ignored."""
    _, k, v = make_inputs(17)
    rule = RULES[name]
    for start in ([0, 9, 14], [16, 16, 16], [3, 0, 12], [1, 10, 15]):
        positions = torch.tensor(start)[:, None]
        cache_positions = CachePositions(positions, 17, max(start) + 1)
        q = torch.randn(3, 1, 6, 12)
        seen = visible_mask(positions, torch.arange(17), rule)
        for sinks in (None, make_sinks(6)) if name in WITH_SINKS else (None,):
            actual = attend_decode(q, k, v, cache_positions, rule, sinks)
            assert relative_error(actual.double(), attention_definition(q, k, v, rule, seen, sinks)) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim"), [(5, 1, 64, 64), (9, 3, 64, 80), (8, 8, 33, 17), (12, 2, 256, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_of_long_rows(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int) -> None:
    """Caches are strided, and the slots that a row does not see are NaN."""
    rows, slots, rule = 5, 700, AttentionParams(dim**-0.5)
    q = torch.randn(rows, 1, heads, 2 * dim)[..., :dim].to(dtype)
    k, v = (torch.randn(rows, slots, kv_heads, size + 3)[..., :size].to(dtype) for size in (dim, v_dim))
    positions = torch.tensor([[699], [0], [15], [16], [333]])
    seen = visible_mask(positions, torch.arange(slots), rule)
    expected = attention_definition(q, k, v, rule, seen)
    hidden = ~seen[:, 0, :, None, None]
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    actual = attend_decode(q, k, v, CachePositions(positions, slots, slots), rule)
    assert relative_error(actual.double(), expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize(
    "rule",
    [AttentionParams(0.5, 300), AttentionParams(0.5, softcap=2.0), AttentionParams(0.5, 300, softcap=2.0)],
    ids=str,
)
def test_long_rows_are_computed_in_blocks(rule: AttentionParams) -> None:
    """More than two blocks, the last of them partial."""
    inputs = make_inputs(4 * attention.BLOCK + 100, heads=2, kv_heads=1, dim=4, rows=1)
    position = torch.arange(inputs[0].shape[1])
    assert_same(
        attention.attention(*inputs, rule),
        attention_definition(*inputs, rule, visible_mask(position[None], position, rule)),
        inputs,
    )


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    "rule",
    [AttentionParams(0.5), AttentionParams(0.5, 64), AttentionParams(0.5, chunk=64), AttentionParams(0.5, softcap=2.0)],
    ids=str,
)
def test_long_rows_need_no_memory_for_all_pairs(rule: AttentionParams, with_sinks: bool) -> None:
    """The largest tensor of forward and backward has a block of queries, not all of them."""
    if rule.softcap is not None and with_sinks:
        return
    length = 4000
    q, k, v = (torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3))
    with LargestTensor() as largest:
        attention.attention(q, k, v, rule, sinks=make_sinks(1) if with_sinks else None).sum().backward()
    assert largest.numel <= attention.BLOCK * length < length * length / 8


@pytest.mark.parametrize("name", ["window None", "window 5", "softcap and window"])
def test_compiled_attention_equals_eager(name: str) -> None:
    """One compiled graph for all lengths gives the results of the plain call."""
    compiled = torch.compile(attention.attention, dynamic=True, backend="aot_eager")
    for length in (17, 23):
        inputs = make_inputs(length)
        expected = attention.attention(*inputs, RULES[name])
        assert_same(compiled(*inputs, RULES[name]), expected.double(), inputs)
