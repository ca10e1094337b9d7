"""Combinations of parallelism on four ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.compare_layouts import PROPORTIONAL, compare, make_checkpoint_dir
from tests.helpers.training_steps import Case
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.quantization.config import NF4Config


@pytest.mark.multi
@pytest.mark.slow
def test_four_ranks_match_one_process(tmp_path: Path) -> None:
    dense, sparse = make_checkpoint_dir(tmp_path, "dense"), make_checkpoint_dir(tmp_path, "sparse")
    tensor, context, expert = (ParallelConfig(**{name: 2}) for name in ("tp", "cp", "ep"))
    case = Case(dense, optimizer=PROPORTIONAL, steps=2, micro_batch=4)
    experts = LoRAConfig(4, 8.0, target_modules=("attn", "experts"))
    tp_and_cp = replace(case, parallel=ParallelConfig(tp=2, cp=2), packed=True, micro_batch=2)
    short = replace(case, folder=sparse, parallel=ParallelConfig(ep=4), length=2)
    cases = {
        "tensor 4, more than heads of keys": replace(
            case, parallel=ParallelConfig(tp=4), packed=True, adapter=DoRAConfig(4)
        ),
        "tensor 2 x fsdp 2": replace(case, parallel=tensor, steps=3, micro_batch=1),
        "tensor 2 x fsdp 2, qdora": replace(case, parallel=tensor, adapter=DoRAConfig(4), weights=NF4Config()),
        "tensor 2 x context 2": tp_and_cp,
        "tensor 2 x context 2, lora": replace(tp_and_cp, folder=sparse, adapter=LoRAConfig(4, 8.0)),
        "tensor 2 x expert 2": replace(case, parallel=ParallelConfig(tp=2, ep=2), folder=sparse),
        "context 4": replace(case, parallel=ParallelConfig(cp=4), packed=True, micro_batch=2, length=21),
        "context 4, less than two tokens each": replace(case, parallel=ParallelConfig(cp=4), length=6),
        "context 2 x fsdp 2": replace(case, parallel=context, packed=True, micro_batch=1),
        "context 2 x 2 copies, dora": replace(
            case, parallel=ParallelConfig(cp=2, dp_replicate=2), adapter=DoRAConfig(4)
        ),
        "expert 4, fewer tokens than experts": short,
        "expert 2 x fsdp 2, qlora": replace(case, parallel=expert, folder=sparse, adapter=experts, weights=NF4Config()),
        "expert 2 x 2 copies": replace(case, parallel=ParallelConfig(dp_replicate=2, ep=2), folder=sparse),
    }
    compare(4, cases)
