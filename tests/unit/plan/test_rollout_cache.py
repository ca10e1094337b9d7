"""The planned cache of sampled answers has the bytes of the real one."""

import re

import pytest
import torch

from tests.helpers.random_checkpoints import load_model, make_checkpoint
from tunekit.adapters.config import NoAdapter
from tunekit.build import resolve_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import recipe_loader
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.plan import report
from tunekit.plan.estimate import Estimate, estimate
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.memory_tracker import MemoryTracker
from tunekit.plan.rollout_cache import RolloutShape, rollout_cache_bytes
from tunekit.plan.workload import make_workload


@pytest.mark.parametrize("name", ["llama3.2", "gemma2"])
def test_planned_bytes_are_those_of_the_engine(tmp_path, name: str) -> None:
    folder, shape = make_checkpoint(tmp_path / "model", name), RolloutShape(5, 48)
    model = load_model(folder, NoAdapter())
    with MemoryTracker() as tracker:
        cache = model.make_cache(*shape)
        expected = tracker.bytes
        del cache
    assert model.compute_dtype in (None, torch.float32) and expected > 0
    assert rollout_cache_bytes(HFCheckpoint.open(folder), shape, "fp32", ParallelDims(), "cpu") == expected
    assert rollout_cache_bytes(HFCheckpoint.open(folder), RolloutShape(), "fp32", ParallelDims(), "cpu") == 0


def plan_bundled(recipe: str, config: str, *overrides: str) -> Estimate:
    """Plan of a bundled config on the CPU."""
    cfg = recipe_loader.load_recipe_config(recipe_loader.load_recipe(recipe), config, overrides, [])
    return estimate(make_workload(cfg, ClusterSpec()), ClusterSpec())


def test_report_has_a_row_for_the_kv_cache_of_rollouts() -> None:
    """Its cache has `max_num_seqs` rows of `data.max_length` tokens. Other recipes have no such row."""
    sampled = {}
    for size in (64, 128):
        plan = plan_bundled("grpo", "nano/grpo", f"max_num_seqs={size}")
        sampled[size] = report.report_json(plan, [])["phases"]["rollout"]["kv_cache"]
    source, _, _ = resolve_model("tunekit/nano")
    expected = rollout_cache_bytes(source, RolloutShape(64, 64), "fp32", ParallelDims(), "cpu")
    assert (sampled[64], sampled[128]) == (expected, 2 * expected)
    text = report.format_report(plan_bundled("ppo", "nano/ppo"), [])
    assert re.search(r"^KV cache  .*\d", text, re.MULTILINE)
    assert "KV cache" not in report.format_report(plan_bundled("sft", "nano/tools_lora"), [])
