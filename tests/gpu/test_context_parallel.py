"""Context parallel attention by kernels for packed documents: as all queries on all keys, with their gradients."""

import pytest
import torch
from torch import Tensor

from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.context_parallel import ContextParallelSharding
from tunekit.kernels import attention_gpu
from tunekit.kernels.attention import AttentionParams, attention_per_document
from tunekit.kernels.attention_ranges import attention_sharded
from tunekit.kernels.sequence_layout import SequenceLayout

RULES = [
    AttentionParams(0.3),
    AttentionParams(0.3, window=4),
    AttentionParams(0.3, chunk=5),
    AttentionParams(0.3, softcap=2.0),
    AttentionParams(0.3, 6, 8),
]
BOUNDS = {"packed": [0, 7, 16, 23, 23 + 11, 46], "rows": [0, 23, 46], "short": [0, 1, 2, 3, 22, 23, 24, 46]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Dispatch of a GPU, with the reference instead of FlashAttention: queries and keys of each call."""
    sizes = []

    def fused(
        q: Tensor, k: Tensor, v: Tensor, rule: list[float], layout: SequenceLayout, sinks: Tensor | None
    ) -> Tensor:
        at, key_at = layout.cu_seqlens, layout.key_cu_seqlens
        sizes.append((q.shape[0] * q.shape[1], k.shape[1]))
        assert at[-1] == q.shape[0] * q.shape[1] and key_at[-1] == k.shape[1]
        assert (key_at.diff() >= at.diff()).all() and (at.diff() > 0).all()
        scale, window, chunk, softcap = rule
        parsed = AttentionParams(scale, int(window) or None, int(chunk) or None, softcap or None)
        return attention_per_document(q, k, v, parsed, at, sinks, key_at)

    monkeypatch.setattr(attention_gpu, "is_supported", lambda q, capped: True)
    monkeypatch.setattr(attention_gpu, "attention_gpu", fused)
    return sizes


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ranges_of_queries_equal_all_queries(
    rule: AttentionParams, bounds: str, sunk: bool, calls: list[tuple[int, int]]
) -> None:
    if sunk and rule.softcap is not None:
        return
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 23, heads, 8, generator=draw, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    )
    sinks = torch.randn(4, generator=draw, dtype=torch.float64).requires_grad_() if sunk else None
    inputs = [q, k, v, *([] if sinks is None else [sinks])]
    offsets = torch.tensor(BOUNDS[bounds], dtype=torch.int32)
    expected = attention_per_document(q, k, v, rule, offsets, sinks)
    ranks = [ContextParallelSharding(MeshDim(None, 3, index)) for index in range(3)]  # type: ignore[arg-type]
    layout = None if bounds == "rows" else SequenceLayout(offsets)
    outputs = [attention_sharded(r.local_tokens(q), k, v, rule, r.local_ranges(23), layout, sinks) for r in ranks]
    assert len(calls) == len(ranks), "one call for each rank"
    real = torch.ones(2, 23, 1, 1)
    for y, rank in zip(outputs, ranks, strict=True):
        torch.testing.assert_close(y * rank.local_tokens(real), rank.local_tokens(expected), atol=1e-6, rtol=1e-6)
    weight = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    total = torch.stack([(y * r.local_tokens(weight)).sum() for y, r in zip(outputs, ranks, strict=True)]).sum()
    for a, b in zip(torch.autograd.grad(total, inputs), theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_keys_outside_of_the_window_are_not_gathered(calls: list[tuple[int, int]]) -> None:
    q, k = torch.randn(1, 64, 2, 8), torch.randn(1, 256, 2, 8)
    attention_sharded(q, k, k, AttentionParams(0.3, window=8), (range(0, 32), range(224, 256)))
    attention_sharded(q, k, k, AttentionParams(0.3), (range(0, 32), range(224, 256)))
    assert calls == [(64, 32 + 32 + 7), (64, 32 + 256)]
