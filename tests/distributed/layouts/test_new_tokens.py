"""Rows of new tokens on two ranks match one process, with unquantized and 4-bit bases."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.compare_layouts import PROPORTIONAL, compare, make_checkpoint_dir
from tests.helpers.training_steps import Case
from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.quantization.config import NF4Config


@pytest.mark.multi
def test_token_rows_on_two_ranks_match_one_process(tmp_path: Path) -> None:
    adapter = LoRAConfig(4, trainable_token_indices=(3, 40, 41, 60, 95))
    tied = Case(make_checkpoint_dir(tmp_path, "dense"), adapter, optimizer=PROPORTIONAL, steps=2, micro_batch=2)
    untied = replace(tied, folder=make_checkpoint_dir(tmp_path, "sparse"))
    compare(
        2,
        {
            "tied": tied,
            "untied": untied,
            "untied, one row": replace(untied, adapter=replace(adapter, trainable_token_indices=(3,))),
            "tied, nf4": replace(tied, weights=NF4Config()),
            "tied, tp": replace(tied, parallel=ParallelConfig(tp=2)),
            "untied, tp": replace(untied, parallel=ParallelConfig(tp=2)),
        },
    )
