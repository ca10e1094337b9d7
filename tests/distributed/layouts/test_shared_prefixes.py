"""Preference pairs with shared prefixes give the results of repeated prefixes on one process, on any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.layouts.test_layouts import relative_differences
from tests.helpers.compare_layouts import PROPORTIONAL, make_checkpoint_dir
from tests.helpers.ranks import run_ranks
from tests.helpers.training_steps import Case, train_cases
from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.memory.config import MemoryConfig
from tunekit.quantization.config import NF4Config


@pytest.mark.multi
@pytest.mark.slow
def test_shared_prefixes_on_two_ranks_match_one_process(tmp_path: Path) -> None:
    dense, windows = make_checkpoint_dir(tmp_path, "dense", vocab_size=96), make_checkpoint_dir(tmp_path, "gemma2")
    case = Case(dense, optimizer=PROPORTIONAL, steps=2, pairs="shared", micro_batch=2)
    cases = {
        "fsdp": replace(case, micro_batch=1),
        "copies, qlora": replace(
            case, parallel=ParallelConfig(dp_replicate=2), adapter=LoRAConfig(4), weights=NF4Config()
        ),
        "fsdp, run again": replace(case, memory=MemoryConfig(activation_checkpointing="full")),
        "tensor": replace(case, parallel=ParallelConfig(tp=2)),
        "context": replace(case, parallel=ParallelConfig(cp=2)),
        "context, windows and caps": replace(case, folder=windows, parallel=ParallelConfig(cp=2)),
    }
    torch.set_num_threads(1)
    results = run_ranks(2, train_cases, list(cases.values()), limit=300)
    for number, (name, variant) in enumerate(cases.items()):
        expected = train_cases([replace(variant, parallel=ParallelConfig(), pairs="whole")])[0]
        for rank in results:
            assert max(relative_differences(rank[number], expected)) < 1e-5, name
