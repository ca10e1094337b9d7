"""Full training of some modules, with learning rates by module, on two ranks matches one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.compare_layouts import compare, make_checkpoint_dir
from tests.helpers.training_steps import Case
from tunekit.adapters.config import NoAdapter
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import SGDConfig


@pytest.mark.multi
def test_frozen_modules_on_two_ranks_match_one_process(tmp_path: Path) -> None:
    optimizer = SGDConfig(lr=1.0, lr_pattern={"embed_tokens": 0.1, "router": 0.5, "norms": 2.0})
    adapter = NoAdapter(frozen_modules=("[qk]_proj", r"layers\.1\.mlp\.experts"))
    case = Case(make_checkpoint_dir(tmp_path, "sparse"), adapter, optimizer=optimizer, steps=2)
    mixed = PrecisionConfig("fp32", "fp32", "bf16")  # frozen weights have another dtype
    compare(
        2,
        {
            "fsdp": case,
            "fsdp, bf16 frozen weights": replace(case, precision=mixed),
            "tp": replace(case, parallel=ParallelConfig(tp=2)),
        },
    )
