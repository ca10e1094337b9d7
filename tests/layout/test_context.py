"""Rows that several ranks share: all that a query may see, seen from another rank."""

import pytest
import torch

from tests.checkpoints import relative_error
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.context_parallel import ContextParallelSharding
from tunekit.kernels import attention
from tunekit.kernels.attention import AttentionParams, attention_sharded
from tunekit.kernels.sequence_layout import SequenceLayout

RULES = [
    AttentionParams(0.3),
    AttentionParams(0.3, window=4),
    AttentionParams(0.3, chunk=5),
    AttentionParams(0.3, softcap=2.0),
    AttentionParams(0.3, 6, 8),
]


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_stretches_of_queries(rule: AttentionParams, sunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On keys of whole rows they are what they are beside the other queries, with their gradients."""
    if sunk and rule.softcap is not None:
        return
    monkeypatch.setattr(attention, "BLOCK", 3)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 23, heads, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=draw).requires_grad_() if sunk else None
    learnt = [q, k, v, *([] if sinks is None else [sinks])]
    offsets = torch.tensor([0, 7, 16, 23, 23 + 11, 46])
    positions = torch.cat([torch.arange(n) for n in offsets.diff()]).view(2, 23)
    wanted = attention.attention(q, k, v, rule, SequenceLayout(offsets), sinks)
    ranks = [ContextParallelSharding(MeshDim(None, 2, index)) for index in range(2)]  # type: ignore[arg-type] (nothing is sent)
    found = [
        attention_sharded(r.local_tokens(q), k, v, rule, r.local_tokens(positions), r.local_ranges(23), sinks)
        for r in ranks
    ]
    real = torch.ones(2, 23, 1, 1)
    for one, rank in zip(found, ranks, strict=True):
        assert relative_error(one * rank.keep(real), rank.keep(wanted)) < 1e-6
    weight = torch.randn(wanted.shape, generator=draw)
    theirs = torch.autograd.grad((wanted * weight).sum(), learnt)
    ours = torch.autograd.grad(
        sum((y * r.local_tokens(weight)).sum() for y, r in zip(found, ranks, strict=True)), learnt
    )
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-5
