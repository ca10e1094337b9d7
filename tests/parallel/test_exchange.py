"""What ranks send each other, and the gradients that come back: against sums over all of them, written down."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.ranks import on
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
SENT = [[2, 0, 1], [0, 3, 1], [4, 1, 0]]  # rows from each rank (down) to each


def drawn(name: int, *shape: int) -> Tensor:
    """The numbers of one rank, which all know here."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(name), dtype=torch.float64)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def backward(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad((y * weight).sum(), x)[0]


def gathers(team: MeshDim) -> None:
    """All parts side by side; what each makes of a part comes back to whose it is."""
    every, weights = [drawn(i, 2, 3, 4) for i in range(RANKS)], [drawn(10 + i, 2, 9, 4) for i in range(RANKS)]
    x = every[team.index].requires_grad_()
    y = all_gather(x, 1, team)
    close(y.detach(), torch.cat([one.detach() for one in every], dim=1))
    close(backward(y, x, weights[team.index]), sum(weights)[:, 3 * team.index : 3 * team.index + 3])  # type: ignore[index]


def adds(team: MeshDim) -> None:
    """Parts of a sum; each gets the gradient of all of it."""
    every, weights = [drawn(i, 2, 9, 4) for i in range(RANKS)], [drawn(10 + i, 2, 3, 4) for i in range(RANKS)]
    x = every[team.index].requires_grad_()
    y = reduce_scatter(x, 1, team)
    close(y.detach(), torch.stack([one.detach() for one in every]).sum(0)[:, 3 * team.index : 3 * team.index + 3])
    close(backward(y, x, weights[team.index]), torch.cat(weights, dim=1))


def joins(team: MeshDim) -> None:
    """Columns of parts that differ in size; all ranks make the same of them."""
    share = VocabShard(team, team.even(7))
    assert share.sizes == (3, 2, 2) and share.total == 7 and share.start == [0, 3, 5][team.index]
    whole, weight = drawn(1, 5, 7), drawn(2, 5, 7)
    here = slice(share.start, share.start + share.sizes[team.index])
    x = whole[:, here].clone().requires_grad_()
    y = share.all_gather(x)
    close(y.detach(), whole)
    close(backward(y, x, weight), weight[:, here])


def sends(team: MeshDim) -> None:
    """Rows go where they should, in the order of the ranks that send them, and their gradients back."""
    there, here = SENT[team.index], [row[team.index] for row in SENT]
    every = [drawn(i, sum(SENT[i]), 2) for i in range(RANKS)]
    x = every[team.index].requires_grad_()
    y = all_to_all(x, there, here, team, 0.5)
    parts = [one.detach().split(SENT[i])[team.index] for i, one in enumerate(every)]
    close(y.detach(), torch.cat(parts))
    back = torch.autograd.grad((y * (team.index + 1)).sum(), x)[0]
    close(
        back, 0.5 * torch.arange(1.0, RANKS + 1).double().repeat_interleave(torch.tensor(there))[:, None].expand_as(x)
    )


def shares(team: MeshDim) -> None:
    """Eleven tokens on three ranks: each keeps four, the last of which is padding, and has all inside a layer."""
    tokens = drawn(1, 1, 11, 4)
    for way in (SequenceParallelRegion(team), ReplicatedRegion(team)):
        kept = way.keep(tokens)
        close(kept[0], F.pad(tokens[0], (0, 0, 0, 1))[4 * team.index : 4 * team.index + 4])
        close(way.enter(kept, torch.Size((1, 11))), tokens)
        assert way.enter(kept).shape == (1, 12, 4)
    close(SequenceParallelRegion(team).leave(tokens * (team.index + 1)), way.keep(tokens) * 6)
    close(ReplicatedRegion(team).leave(tokens), way.keep(tokens))


def all_of_it() -> None:
    team = MeshDim(dist.group.WORLD, RANKS, dist.get_rank())  # type: ignore[arg-type]
    for check in (gathers, adds, joins, sends, shares):
        check(team)


@pytest.mark.multi
def test_what_goes_around_and_what_comes_back() -> None:
    on(RANKS, all_of_it, group=True)
