"""The limit on the drift between sampling and training: when it is read, and for which losses it applies."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.losses.policy_gradient import DAPO
from tunekit.policy.engine_config import EngineChoice, NativeEngineConfig, ServerEngineConfig
from tunekit.policy.logprob_drift import METRIC, DriftLimit
from tunekit.recipes.grpo import GRPOConfig
from tunekit.rewards.answer_rewards import Length

NATIVE, SERVER = NativeEngineConfig(), ServerEngineConfig("http://x", sync="none")
IDLE, PENDING = SimpleNamespace(pending=[]), SimpleNamespace(pending=["a metric line"])


def make_limit(
    limit: float | None = None, correction: bool = False, device: str = "cpu", engine: EngineChoice = NATIVE
) -> DriftLimit:
    cfg: Any = GRPOConfig(
        model="m",
        output_dir="o",
        data=PromptDataset("rows.jsonl"),
        rewards=(Length(),),
        loss=DAPO(importance_sampling_correction=correction),
        max_logprob_drift=limit,
        engine=engine,
    )
    dist = DistributedContext(0, "cpu")
    dist.device = torch.device(device)
    return DriftLimit(cfg, dist)


def add(limit: DriftLimit, drift: float, logger: Any = IDLE) -> None:
    limit.add({METRIC: torch.tensor(drift, device=limit.largest.device)}, logger)


@pytest.mark.parametrize(
    ("limit", "correction", "drift", "stops"),
    [
        (None, False, 0.19, False),
        (None, False, 0.21, True),
        (None, True, 5.0, False),
        (0.5, True, 5.0, True),
        (0.5, True, 0.3, False),
        (None, False, float("nan"), False),
    ],
)
def test_limit_applies(limit: float | None, correction: bool, drift: float, stops: bool) -> None:
    with pytest.raises(UserError, match="max_logprob_drift") if stops else nullcontext():
        add(make_limit(limit, correction), drift)


@pytest.mark.parametrize(("limit", "drift", "stops"), [(None, 0.1, False), (None, 0.21, True), (5.0, 1.0, False)])
def test_limit_of_a_server_applies_with_the_correction_too(limit: float | None, drift: float, stops: bool) -> None:
    with pytest.raises(UserError, match="max_logprob_drift") if stops else nullcontext():
        add(make_limit(limit, correction=True, engine=SERVER), drift)


def test_device_is_not_read_in_each_step() -> None:
    limit = make_limit(device="meta")  # reading a tensor without data raises
    for _ in range(3):
        add(limit, 0.5)
    with pytest.raises(NotImplementedError):
        limit.check()


def test_steps_are_read_with_metric_lines() -> None:
    limit = make_limit()
    limit.reads_now = False  # as on a GPU
    add(limit, 0.5)
    add(limit, 0.1)  # the largest one counts
    with pytest.raises(UserError, match=r"0\.5"):
        add(limit, 0.1, PENDING)
    late = make_limit()
    late.reads_now = False
    add(late, 0.5, PENDING)  # the device may not have finished this step
    with pytest.raises(UserError):
        late.check()
