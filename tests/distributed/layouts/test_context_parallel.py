"""Attention with queries that are sharded over context parallel ranks."""

import pytest
import torch

from tests.helpers.random_checkpoints import relative_error
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.context_parallel import ContextParallelSharding
from tunekit.kernels import attention, attention_cpu
from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.attention_ranges import attention_sharded
from tunekit.kernels.sequence_layout import SequenceLayout

ATTENTION_PARAMS = [
    AttentionParams(0.3),
    AttentionParams(0.3, window=4),
    AttentionParams(0.3, chunk=5),
    AttentionParams(0.3, softcap=2.0),
    AttentionParams(0.3, 6, 8),
]


@pytest.mark.parametrize("backend", ["compiled", "torch"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("params", ATTENTION_PARAMS, ids=str)
def test_attention_of_a_context_shard_matches_full_attention(
    params: AttentionParams, with_sinks: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries of one rank with keys of full rows give the same outputs and gradients as all queries together."""
    if with_sinks and params.softcap is not None:
        return
    if backend == "torch":
        monkeypatch.setattr(attention_cpu, "is_available", lambda: False)
        monkeypatch.setattr(attention, "BLOCK", 3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 23, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator).requires_grad_() if with_sinks else None
    inputs = [q, k, v, *([] if sinks is None else [sinks])]
    layout = SequenceLayout(torch.tensor([0, 7, 16, 23, 23 + 11, 46]))
    expected = attention.attention(q, k, v, params, layout, sinks)
    ranks = [ContextParallelSharding(MeshDim(None, 2, index)) for index in range(2)]  # type: ignore[arg-type] (nothing is sent)
    outputs = [attention_sharded(r.local_tokens(q), k, v, params, r.local_ranges(23), layout, sinks) for r in ranks]
    mask = torch.ones(2, 23, 1, 1)
    for output, rank in zip(outputs, ranks, strict=True):
        assert relative_error(output * rank.local_tokens(mask), rank.local_tokens(expected)) < 1e-6
    weight = torch.randn(expected.shape, generator=generator)
    expected_grads = torch.autograd.grad((expected * weight).sum(), inputs)
    grads = torch.autograd.grad(
        sum((y * r.local_tokens(weight)).sum() for y, r in zip(outputs, ranks, strict=True)), inputs
    )
    for a, b in zip(grads, expected_grads, strict=True):
        assert relative_error(a, b) < 1e-5
