"""The planned cache of sampled answers has the bytes of the real one."""

import json
import re

import pytest
import torch

from tests.helpers.random_checkpoints import load_model, make_checkpoint
from tunekit.adapters.config import NoAdapter
from tunekit.build import resolve_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import main as cli
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


def test_report_has_a_row_for_the_sampling_of_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cache has `max_num_seqs` rows of `data.max_length` tokens. Other recipes have no such row."""
    phases = {}
    for size in (64, 128):
        assert cli.main(["plan", "nano/grpo", f"max_num_seqs={size}", "--json"]) == 0
        phases[size] = json.loads(capsys.readouterr().out)["phases"]["sample"]
    source, _, _ = resolve_model("tunekit/nano")
    expected = rollout_cache_bytes(source, RolloutShape(64, 64), "fp32", ParallelDims(), "cpu")
    assert (phases[64]["kv_cache"], phases[128]["kv_cache"]) == (expected, 2 * expected)
    assert cli.main(["plan", "nano/ppo"]) == 0
    assert re.search(r"^sampling of answers  .*\d", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["plan", "nano/tools_lora"]) == 0
    assert "sampling" not in capsys.readouterr().out
