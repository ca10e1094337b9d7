"""Attention against a plain softmax over all pairs in float64, in every form it takes."""

import pytest
import torch
from torch import Tensor

from tests.checkpoints import error
from tunekit.kernels.attention import Rule, attend, attend_cached

WINDOWS = [None, 1, 2, 5, 16, 17, 40]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Scores of all pairs, then those that are not seen taken out. `seen`: (B, S, K)."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which of the `keys` (K,) the `queries` (B, S) see, by their positions: (B, S, K)."""
    age = queries[..., None] - keys
    return (age >= 0) & (age < (10**9 if window is None else window))


def made(length: int, heads: int = 6, kv_heads: int = 2, dim: int = 12, rows: int = 3) -> list[Tensor]:
    torch.manual_seed(length)
    return [2 * torch.randn(rows, length, h, dim, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def same(mine: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    """Values and gradients agree."""
    weight = torch.randn_like(wanted)
    found, truth = (torch.autograd.grad((y * weight).sum(), inputs) for y in (mine.double(), wanted))
    assert error(mine.double(), wanted) < 1e-6
    for a, b in zip(found, truth, strict=True):
        # A query with one key only has no choice: its gradient is zero up to rounding.
        assert error(a, b) < 1e-5 or max(a.abs().max(), b.abs().max()) < 1e-5


@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (5, 5), (4, 2)])
@pytest.mark.parametrize("window", WINDOWS)
def test_causal_and_windows(window: int | None, heads: tuple[int, int]) -> None:
    inputs = made(17, *heads)
    seen = visible(torch.arange(17).expand(3, 17), torch.arange(17), window)
    same(attend(*inputs, Rule(0.3, window)), plain(*inputs, 0.3, seen), inputs)


@pytest.mark.parametrize("bounds", [
    [0, 51], [0, 17, 34, 51], [0, 1, 2, 17, 20, 34, 51], [0, 5, 17, 30, 34, 45, 51], list(range(52)), [0, 30, 51],
])  # fmt: skip
@pytest.mark.parametrize("window", WINDOWS)
def test_documents_do_not_see_each_other(window: int | None, bounds: list[int]) -> None:
    """Whether they end with a row or go over its end."""
    inputs = made(17)
    document = torch.repeat_interleave(torch.arange(len(bounds) - 1), torch.tensor(bounds).diff())
    place = torch.arange(51)
    seen = visible(place[None], place, window) & (document[:, None] == document)
    flat = [x.flatten(0, 1)[None] for x in inputs]
    wanted = plain(*flat, 0.3, seen).view(3, 17, 6, 12)
    same(attend(*inputs, Rule(0.3, window), torch.tensor(bounds, dtype=torch.int32)), wanted, inputs)


@pytest.mark.parametrize("window", WINDOWS)
def test_cached_keys(window: int | None) -> None:
    """Each row is at a place of its own; slots behind it hold what must not be seen."""
    _, k, v = made(17)
    for start in ([0, 9, 14], [16, 16, 16], [3, 0, 12]):
        positions = torch.tensor(start)[:, None] + torch.arange(3).clamp(max=16 - max(start))
        q = torch.randn(3, 3, 6, 12)
        wanted = plain(q, k, v, 0.3, visible(positions, torch.arange(17), window))
        assert error(attend_cached(q, k, v, positions, Rule(0.3, window)).double(), wanted) < 1e-6


def test_a_window_needs_no_memory_for_all_pairs() -> None:
    """The longest mask that is made has 2 * window columns."""
    q, k, v = (torch.randn(1, 3000, 1, 4) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(q, k, v, Rule(0.5, 8))
    assert max(event.cpu_memory_usage for event in profile.events()) < 3000 * 3000 / 8
