"""Functions of tests run in several ranks, and what goes wrong in one of them is shown."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import on

pytestmark = pytest.mark.multi


def added(number: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor(float(number * (dist.get_rank() + 1)))
    dist.all_reduce(total)
    return int(os.environ["LOCAL_RANK"]), total


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise KeyError("rank one has lost it")
    dist.barrier()


def test_ranks_return_what_the_function_does() -> None:
    assert on(2, added, 5, group=True) == [(0, torch.tensor(15.0)), (1, torch.tensor(15.0))]


def test_the_traceback_of_a_rank_is_shown() -> None:
    with pytest.raises(AssertionError, match="(?s)--- rank 1 .*one_fails.*rank one has lost it"):
        on(2, one_fails, group=True)
