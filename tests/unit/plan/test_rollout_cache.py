"""The planned cache of sampled answers has the bytes of the real one."""

import pytest
import torch

from tests.helpers.random_checkpoints import load_model, make_checkpoint
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.plan.memory_tracker import MemoryTracker
from tunekit.plan.rollout_cache import RolloutShape, rollout_cache_bytes


@pytest.mark.parametrize("name", ["llama3.2", "gemma2"])
def test_planned_bytes_are_those_of_the_engine(tmp_path, name: str) -> None:
    folder, shape = make_checkpoint(tmp_path / "model", name), RolloutShape(5, 48)
    model = load_model(folder, NoAdapter())
    with MemoryTracker() as live:
        cache = model.make_cache(*shape)
        expected = live.bytes
        del cache
    assert model.compute_dtype in (None, torch.float32) and expected > 0
    assert rollout_cache_bytes(HFCheckpoint.open(folder), shape, "fp32", ParallelDims(), "cpu") == expected
    assert rollout_cache_bytes(HFCheckpoint.open(folder), RolloutShape(), "fp32", ParallelDims(), "cpu") == 0
