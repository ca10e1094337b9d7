"""Pairs that share what they begin with train what whole pairs in one process do, wherever the model and rows lie."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.layout.compared import PROPORTIONAL, folder
from tests.layout.steps import Case, several
from tests.layout.test_layouts import differences
from tests.parallel.ranks import on
from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.memory.config import MemoryConfig
from tunekit.quantization.config import NF4Config


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    dense, windows = folder(tmp_path, "dense", vocab_size=96), folder(tmp_path, "gemma2")
    case = Case(dense, optimizer=PROPORTIONAL, steps=2, pairs="shared")
    cases = {
        "fsdp": case,
        "copies, qlora": replace(
            case, parallel=ParallelConfig(dp_replicate=2), adapter=LoRAConfig(4), weights=NF4Config()
        ),
        "fsdp, run again": replace(case, memory=MemoryConfig(activation_checkpointing="full"), micro_batch=2),
        "tensor": replace(case, parallel=ParallelConfig(tp=2)),
        "context": replace(case, parallel=ParallelConfig(cp=2)),
        "context, windows and caps": replace(case, folder=windows, parallel=ParallelConfig(cp=2), micro_batch=2),
    }
    torch.set_num_threads(1)
    found = on(2, several, list(cases.values()), limit=300)
    for number, (name, one) in enumerate(cases.items()):
        wanted = several([replace(one, parallel=ParallelConfig(), pairs="whole")])[0]
        for rank in found:
            assert max(differences(rank[number], wanted)) < 1e-5, name
