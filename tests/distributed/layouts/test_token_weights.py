"""Weights of target tokens: two ranks match one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.compare_layouts import PROPORTIONAL, compare, make_checkpoint_dir
from tests.helpers.training_steps import Case
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.cross_entropy import CrossEntropy


@pytest.mark.multi
def test_weights_on_two_ranks_match_one_process(tmp_path: Path) -> None:
    """Ranks have different sums of weights. Router losses are added to each unit of weight."""
    case = Case(make_checkpoint_dir(tmp_path, "dense"), optimizer=PROPORTIONAL, steps=2, weighted=True, micro_batch=2)
    routed = replace(  # router losses are computed per micro-batch: with several rows, they depend on the layout
        case,
        micro_batch=1,
        folder=make_checkpoint_dir(tmp_path, "sparse"),
        loss=CrossEntropy(router_aux_loss_coef=0.1, router_z_loss_coef=0.01),
    )
    cp, tp = ParallelConfig(cp=2), ParallelConfig(tp=2)
    compare(
        2,
        {
            "fsdp": replace(case, micro_batch=1),
            "fsdp, packed": replace(case, packed=True),
            "cp": replace(case, parallel=cp),
            "tp": replace(case, parallel=tp),
            "routers": routed,
            "routers, cp": replace(routed, parallel=cp),
        },
    )
