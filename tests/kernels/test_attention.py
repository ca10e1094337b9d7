"""Attention against a plain softmax over all pairs in float64, in every form it takes."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints import error
from tunekit.kernels import attention, attention_cpu
from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.attention_decode import CachePositions, attend_decode
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
SUNK = ["window None", "window 1", "window 5", "window 40", "chunk 4"]  # no family caps scores beside sinks
BOUNDS = [
    [0, 51], [0, 17, 34, 51], [0, 1, 2, 17, 20, 34, 51], [0, 5, 17, 30, 34, 45, 51], list(range(52)), [0, 30, 51],
]  # fmt: skip


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds for the C++ of this processor, and for torch where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(attention_cpu, "able", lambda: False)
    elif not attention_cpu.able():
        pytest.skip("no compiler, or a processor that does not multiply bf16")
    return request.param


def plain(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Scores of all pairs, then those that are not seen taken out. `seen`: (B, S, K)."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(len(q), -1, q.shape[1], 1)
        return torch.einsum("bhqk,bkhd->bqhd", torch.cat([scores, column], -1).softmax(-1)[..., :-1], v)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def visible(queries: Tensor, keys: Tensor, rule: AttentionParams) -> Tensor:
    """Which of the `keys` (K,) the `queries` (B, S) see, by their positions: (B, S, K)."""
    queries = queries[..., None]
    seen = queries >= keys
    if rule.window is not None:
        seen = seen & (queries - keys < rule.window)
    return seen if rule.chunk is None else seen & (queries // rule.chunk == keys // rule.chunk)


def made(length: int, heads: int = 6, kv_heads: int = 2, dim: int = 12, rows: int = 3, v: int = 12) -> list[Tensor]:
    torch.manual_seed(length)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, v)
    return [2 * torch.randn(rows, length, *shape, requires_grad=True) for shape in shapes]


def sinks_of(heads: int) -> Tensor:
    return torch.linspace(-3, 4, heads, requires_grad=True)


def same(mine: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    """Values and gradients agree."""
    weight = torch.randn_like(wanted)
    found, truth = (torch.autograd.grad((y * weight).sum(), inputs) for y in (mine.double(), wanted))
    assert error(mine.double(), wanted) < 1e-6
    for a, b in zip(found, truth, strict=True):
        # A query with one key only has no choice: its gradient is zero up to rounding.
        assert error(a, b) < 1e-5 or max(a.abs().max(), b.abs().max()) < 1e-5


@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (5, 5), (4, 2)])
@pytest.mark.parametrize("name", RULES)
def test_causal_and_what_families_make_of_it(name: str, heads: tuple[int, int]) -> None:
    inputs = made(17, *heads)
    seen = visible(torch.arange(17).expand(3, 17), torch.arange(17), RULES[name])
    same(attention.attention(*inputs, RULES[name]), plain(*inputs, RULES[name], seen), inputs)


@pytest.mark.parametrize("heads", [(6, 2), (5, 5)])
@pytest.mark.parametrize("name", SUNK)
def test_sinks(name: str, heads: tuple[int, int]) -> None:
    inputs, sinks = made(17, *heads), sinks_of(heads[0])
    seen = visible(torch.arange(17).expand(3, 17), torch.arange(17), RULES[name])
    same(
        attention.attention(*inputs, RULES[name], sinks=sinks),
        plain(*inputs, RULES[name], seen, sinks),
        [*inputs, sinks],
    )


@pytest.mark.parametrize("name", ["window None", "softcap", "window 5"])
def test_values_may_be_narrower_than_keys(name: str) -> None:
    inputs = made(17, v=8)
    seen = visible(torch.arange(17).expand(3, 17), torch.arange(17), RULES[name])
    same(attention.attention(*inputs, RULES[name]), plain(*inputs, RULES[name], seen), inputs)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", RULES)
def test_documents_do_not_see_each_other(name: str, bounds: list[int]) -> None:
    """Whether they end with a row or go over its end. Windows and chunks count from where a document begins."""
    inputs, rule = made(17), RULES[name]
    lengths = torch.tensor(bounds).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = torch.cat([torch.arange(int(length)) for length in lengths])
    seen = visible(place[None], place, rule) & (document[:, None] == document)
    flat = [x.flatten(0, 1)[None] for x in inputs]
    found = attention.attention(*inputs, rule, SequenceLayout(torch.tensor(bounds, dtype=torch.int32)))
    same(found, plain(*flat, rule, seen).view(3, 17, 6, 12), inputs)
    if name in SUNK:
        found = attention.attention(*inputs, rule, SequenceLayout(torch.tensor(bounds, dtype=torch.int32)), sinks_of(6))
        same(found, plain(*flat, rule, seen, sinks_of(6)).view(3, 17, 6, 12), inputs)


@pytest.mark.parametrize("name", RULES)
def test_cached_keys(name: str) -> None:
    """Each row is at a place of its own; slots behind it hold what must not be seen."""
    _, k, v = made(17)
    rule = RULES[name]
    for start in ([0, 9, 14], [16, 16, 16], [3, 0, 12], [1, 10, 15]):
        positions = torch.tensor(start)[:, None]
        at = CachePositions(positions, 17, max(start) + 1)
        q = torch.randn(3, 1, 6, 12)
        seen = visible(positions, torch.arange(17), rule)
        assert error(attend_decode(q, k, v, at, rule).double(), plain(q, k, v, rule, seen)) < 1e-6
        if name in SUNK:
            found = attend_decode(q, k, v, at, rule, sinks_of(6))
            assert error(found.double(), plain(q, k, v, rule, seen, sinks_of(6))) < 1e-6


@pytest.mark.parametrize(
    "rule",
    [AttentionParams(0.5, 300), AttentionParams(0.5, softcap=2.0), AttentionParams(0.5, 300, softcap=2.0)],
    ids=str,
)
def test_long_rows_come_in_blocks(rule: AttentionParams) -> None:
    """More than two blocks, of which the last is not whole."""
    inputs = made(4 * attention.BLOCK + 100, heads=2, kv_heads=1, dim=4, rows=1)
    place = torch.arange(inputs[0].shape[1])
    same(attention.attention(*inputs, rule), plain(*inputs, rule, visible(place[None], place, rule)), inputs)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation makes, in the backward pass too."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]
        # A view has the numbers of another tensor.
        self.numbers = max(self.numbers, *(t.untyped_storage().nbytes() // t.itemsize for t in tensors), 0)
        return result


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(
    "rule",
    [AttentionParams(0.5), AttentionParams(0.5, 64), AttentionParams(0.5, chunk=64), AttentionParams(0.5, softcap=2.0)],
    ids=str,
)
def test_long_rows_need_no_memory_for_all_pairs(rule: AttentionParams, sunk: bool) -> None:
    """Forward and backward, the largest thing that is made holds a block of queries and not all of them."""
    if rule.softcap is not None and sunk:
        return
    length = 4000
    q, k, v = (torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        attention.attention(q, k, v, rule, sinks=sinks_of(1) if sunk else None).sum().backward()
    assert largest.numbers <= attention.BLOCK * length < length * length / 8


@pytest.mark.parametrize("name", ["window None", "window 5", "softcap and window"])
def test_compiled(name: str) -> None:
    """One kernel for all lengths gives what the plain call gives."""
    compiled = torch.compile(attention.attention, dynamic=True, backend="aot_eager")
    for length in (17, 23):
        inputs = made(length)
        wanted = attention.attention(*inputs, RULES[name])
        same(compiled(*inputs, RULES[name]), wanted.double(), inputs)
