"""Functions that run on several ranks, and errors in one of them."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multi


def sum_over_ranks(number: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor(float(number * (dist.get_rank() + 1)))
    dist.all_reduce(total)
    return int(os.environ["LOCAL_RANK"]), total


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("broken on rank 1")
    dist.barrier()


def test_results_are_returned_in_rank_order() -> None:
    assert run_ranks(2, sum_over_ranks, 5, group=True) == [(0, torch.tensor(15.0)), (1, torch.tensor(15.0))]


def test_traceback_of_a_rank_is_shown() -> None:
    with pytest.raises(AssertionError, match="(?s)--- rank 1 .*fail_on_rank_1.*broken on rank 1"):
        run_ranks(2, fail_on_rank_1, group=True)
