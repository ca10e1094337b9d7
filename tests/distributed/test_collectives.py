"""Collective operations and their gradients, compared with explicit sums over ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tunekit.distributed.collectives import (
    MeshDim,
    ReplicatedRegion,
    SequenceParallelRegion,
    VocabShard,
    all_gather,
    all_to_all,
    reduce_scatter,
)

RANKS = 3
SEND_COUNTS = [[2, 0, 1], [0, 3, 1], [4, 1, 0]]  # number of rows from each rank (rows) to each rank (columns)


def random_tensor(name: int, *shape: int) -> Tensor:
    """Random tensor with seed `name`, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(name), dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def backward(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad((y * weight).sum(), x)[0]


def check_all_gather(mesh_dim: MeshDim) -> None:
    """All-gather: shards are concatenated. The gradient of a shard is the sum over ranks."""
    shards, weights = (
        [random_tensor(i, 2, 3, 4) for i in range(RANKS)],
        [random_tensor(10 + i, 2, 9, 4) for i in range(RANKS)],
    )
    x = shards[mesh_dim.index].requires_grad_()
    y = all_gather(x, 1, mesh_dim)
    assert_close(y.detach(), torch.cat([shard.detach() for shard in shards], dim=1))
    assert_close(backward(y, x, weights[mesh_dim.index]), sum(weights)[:, 3 * mesh_dim.index : 3 * mesh_dim.index + 3])  # type: ignore[index]


def check_reduce_scatter(mesh_dim: MeshDim) -> None:
    """Reduce-scatter: inputs are summed and split. The gradient is that of the full sum."""
    inputs, weights = (
        [random_tensor(i, 2, 9, 4) for i in range(RANKS)],
        [random_tensor(10 + i, 2, 3, 4) for i in range(RANKS)],
    )
    x = inputs[mesh_dim.index].requires_grad_()
    y = reduce_scatter(x, 1, mesh_dim)
    assert_close(
        y.detach(),
        torch.stack([x_of_rank.detach() for x_of_rank in inputs]).sum(0)[
            :, 3 * mesh_dim.index : 3 * mesh_dim.index + 3
        ],
    )
    assert_close(backward(y, x, weights[mesh_dim.index]), torch.cat(weights, dim=1))


def check_column_gather(mesh_dim: MeshDim) -> None:
    """Gather of columns of uneven sizes."""
    vocab_shard = VocabShard(mesh_dim, mesh_dim.split_sizes(7))
    assert vocab_shard.sizes == (3, 2, 2) and vocab_shard.total == 7 and vocab_shard.start == [0, 3, 5][mesh_dim.index]
    full_tensor, weight = random_tensor(1, 5, 7), random_tensor(2, 5, 7)
    local_slice = slice(vocab_shard.start, vocab_shard.start + vocab_shard.sizes[mesh_dim.index])
    x = full_tensor[:, local_slice].clone().requires_grad_()
    y = vocab_shard.all_gather(x)
    assert_close(y.detach(), full_tensor)
    assert_close(backward(y, x, weight), weight[:, local_slice])


def check_all_to_all(mesh_dim: MeshDim) -> None:
    """All-to-all: rows arrive in rank order, and gradients return to their senders."""
    send_counts, receive_counts = SEND_COUNTS[mesh_dim.index], [row[mesh_dim.index] for row in SEND_COUNTS]
    inputs = [random_tensor(i, sum(SEND_COUNTS[i]), 2) for i in range(RANKS)]
    x = inputs[mesh_dim.index].requires_grad_()
    y = all_to_all(x, send_counts, receive_counts, mesh_dim, 0.5)
    received = [x_of_rank.detach().split(SEND_COUNTS[i])[mesh_dim.index] for i, x_of_rank in enumerate(inputs)]
    assert_close(y.detach(), torch.cat(received))
    grad = torch.autograd.grad((y * (mesh_dim.index + 1)).sum(), x)[0]
    assert_close(
        grad,
        0.5 * torch.arange(1.0, RANKS + 1).double().repeat_interleave(torch.tensor(send_counts))[:, None].expand_as(x),
    )


def check_sequence_parallel(mesh_dim: MeshDim) -> None:
    """Eleven tokens on three ranks: four each, padded, and all of them inside a layer."""
    tokens = random_tensor(1, 1, 11, 4)
    for region in (SequenceParallelRegion(mesh_dim), ReplicatedRegion(mesh_dim)):
        local = region.local_tokens(tokens)
        assert_close(local[0], F.pad(tokens[0], (0, 0, 0, 1))[4 * mesh_dim.index : 4 * mesh_dim.index + 4])
        assert_close(region.enter(local, torch.Size((1, 11))), tokens)
        assert region.enter(local).shape == (1, 12, 4)
    assert_close(SequenceParallelRegion(mesh_dim).leave(tokens * (mesh_dim.index + 1)), region.local_tokens(tokens) * 6)
    assert_close(ReplicatedRegion(mesh_dim).leave(tokens), region.local_tokens(tokens))


def check_all() -> None:
    mesh_dim = MeshDim(dist.group.WORLD, RANKS, dist.get_rank())  # type: ignore[arg-type]
    for check in (
        check_all_gather,
        check_reduce_scatter,
        check_column_gather,
        check_all_to_all,
        check_sequence_parallel,
    ):
        check(mesh_dim)


@pytest.mark.multi
def test_collectives_and_their_gradients() -> None:
    run_ranks(RANKS, check_all, group=True)
