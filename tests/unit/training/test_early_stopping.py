"""The best step by a metric: patience, the metric's direction, and what a training state restores."""

import math
from typing import Any

import pytest

from tunekit.config.load import load_config
from tunekit.errors import UserError
from tunekit.recipes.sft import SFTConfig
from tunekit.training.early_stopping import EarlyStopping

EVAL_DATA = {"source": "tunekit/tools", "split": "test"}


def load(**keys: Any) -> SFTConfig:
    config = {"model": "m", "data": {"source": "tunekit/tools"}, "eval_data": EVAL_DATA, "output_dir": "o"} | keys
    return load_config(SFTConfig, config)


def make(**keys: Any) -> EarlyStopping:
    return EarlyStopping(load(**keys))


def test_patience_counts_evaluations_without_improvement() -> None:
    tracker = make(early_stopping_patience=2)
    losses = [(3.0, False), (2.0, False), (2.0, False), (1.9, False), (2.5, False), (1.9, True), (1.0, False)]
    for step, (loss, stops) in enumerate(losses, start=1):
        tracker.update(step, {"loss": loss})
        assert tracker.triggered == stops
    restored = make(early_stopping_patience=2)
    restored.load_state_dict(tracker.state_dict())
    assert (restored.best, restored.best_step, restored.num_worse) == (1.0, 7, 0)
    never = make(load_best_model_at_end=True)
    for step in range(9):
        never.update(step, {"loss": 1.0})
        assert not never.triggered and never.needs_save(step) == (step == 0) and never.step_to_keep == 0


@pytest.mark.parametrize(
    ("keys", "best_step"),
    [
        ({}, 2),
        ({"metric_for_best_model": "eval_loss"}, 2),
        ({"metric_for_best_model": "eval/rewards/accuracies"}, 3),
        ({"metric_for_best_model": "kl", "greater_is_better": False}, 1),
        ({"greater_is_better": True}, 1),
    ],
)
def test_metric_has_a_direction(keys: dict[str, Any], best_step: int) -> None:
    tracker = make(load_best_model_at_end=True, **keys)
    evaluations = [(5.0, 0.5, 1.0), (2.0, 0.4, 2.0), (3.0, 0.8, math.nan), (math.nan, math.nan, 3.0)]
    for step, values in enumerate(evaluations, start=1):
        metrics = dict(zip(("loss", "rewards/accuracies", "kl"), values, strict=True))
        tracker.check_metric(metrics)
        tracker.update(step, metrics)
    assert tracker.best_step == best_step


def test_best_weights_follow_the_patience_unless_set() -> None:
    assert [make(**keys).loads_best for keys in (
        {}, {"early_stopping_patience": 3}, {"early_stopping_patience": 3, "load_best_model_at_end": False},
        {"load_best_model_at_end": True},
    )] == [False, True, False, True]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"eval_data": None, "load_best_model_at_end": True}, "load_best_model_at_end: requires eval_data"),
        ({"metric_for_best_model": "accuracy"}, "requires load_best_model_at_end or early_stopping_patience"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load(**keys)


def test_unknown_metric_lists_those_of_the_evaluation() -> None:
    tracker = make(load_best_model_at_end=True, metric_for_best_model="accuracy")
    with pytest.raises(UserError, match="^metric_for_best_model: .*'accuracy'.* loss, kl"):
        tracker.check_metric({"loss": 1.0, "kl": 2.0})
