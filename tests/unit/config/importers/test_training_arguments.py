"""Keys of TrainingArguments, whose defaults differ between TRL, axolotl and LLaMA-Factory."""

from typing import Any

import pytest
import yaml

from tests.unit.config.importers.conftest import Import

BASES: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "o/m", "dataset_name": "o/r", "packing": True},
    "axolotl": {"base_model": "o/m", "datasets": [{"path": "o/r", "type": "alpaca"}]},
    "llama-factory": {"model_name_or_path": "o/m", "dataset": "o/r", "stage": "sft", "template": "llama3"},
}


@pytest.fixture
def import_keys(import_text: Import) -> Any:
    """Function that imports the smallest config of a trainer with other keys."""
    return lambda trainer, **keys: import_text(yaml.safe_dump({**BASES[trainer], **keys}), trainer=trainer)


@pytest.mark.parametrize(
    ("trainer", "keys", "expected"),
    [
        ("trl", {"hub_model_id": "o/r"}, None),
        ("llama-factory", {"hub_model_id": "o/r"}, None),
        ("axolotl", {"hub_model_id": "o/r"}, {"repo_id": "o/r", "private": True}),
        ("trl", {"hub_model_id": "o/r", "push_to_hub": True}, {"repo_id": "o/r", "private": False}),
        ("trl", {"hub_model_id": "o/r", "push_to_hub": "true", "hub_private_repo": True},
         {"repo_id": "o/r", "private": True}),
        ("axolotl", {"hub_model_id": "o/r", "push_to_hub": False}, None),
        ("trl", {"push_to_hub": True}, None),
    ],
)  # fmt: skip
def test_results_are_pushed_where_the_original_pushes(trainer: str, keys: Any, expected: Any, import_keys: Any) -> None:
    result = import_keys(trainer, **keys)
    assert result.draft.get("push_to_hub") == expected
    reported = {finding.key: finding.value for finding in result.draft.findings}
    assert expected is not None or reported.items() & keys.items()


HELD_OUT = {"axolotl": {"val_set_size": 0.1}, "llama-factory": {"val_size": 0.1}, "trl": {}}


@pytest.mark.parametrize(
    ("trainer", "keys", "expected"),
    [
        ("trl", {"eval_strategy": "steps"}, 10),
        ("trl", {"eval_strategy": "steps", "logging_steps": 20}, 20),
        ("trl", {"eval_strategy": "steps", "eval_steps": 0.25, "save_steps": 70}, 0.25),
        ("trl", {"eval_strategy": "epoch", "eval_steps": 5}, "epoch"),
        ("trl", {"eval_steps": 5}, None),
        ("axolotl", {}, "epoch"),
        ("axolotl", {"save_steps": 70}, "epoch"),
        ("axolotl", {"eval_steps": 5}, 5),
        ("axolotl", {"eval_strategy": "no"}, None),
        ("axolotl", {"eval_strategy": False}, None),
        ("llama-factory", {}, None),
        ("llama-factory", {"eval_strategy": "steps"}, 500),
        ("llama-factory", {"eval_strategy": "steps", "eval_steps": 5}, 5),
        ("llama-factory", {"do_eval": True}, "epoch"),
    ],
)
def test_models_are_evaluated_as_often_as_in_the_original(
    trainer: str, keys: dict[str, Any], expected: Any, import_keys: Any
) -> None:
    draft = import_keys(trainer, **HELD_OUT[trainer], **keys).draft
    assert draft.get("eval_every") == expected
    assert (draft.get("eval_data") is None) == (expected is None)
    assert trainer == "trl" or draft.get("data.split") == "train[:90%]"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"parallelism_config": {"tp_size": 2, "cp_size": 4, "dp_shard_size": 8}}, {"tp": 2, "cp": 4, "dp_shard": 8}),
        ({"parallelism_config": {"dp_replicate_size": 2, "tp_size": 1}}, {"dp_replicate": 2}),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, {"reshard_after_forward": False}),
        ({"fsdp_config": {"fsdp_sharding_strategy": 2}}, {"reshard_after_forward": False}),
        ({"fsdp": "shard_grad_op auto_wrap"}, {"reshard_after_forward": False}),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"reshard_after_forward": True}}, None),
        ({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"dp_replicate": None, "dp_shard": 1}),
    ],
)  # fmt: skip
def test_degrees_and_sharding(keys: dict[str, Any], expected: Any, import_keys: Any) -> None:
    assert import_keys("trl", **keys).draft.get("parallel") == expected


def test_trackers_are_written_once(import_keys: Any) -> None:
    draft = import_keys("trl", report_to="comet_ml", comet_project_name="p").draft
    assert draft.get("report_to") == [{"kind": "comet", "project": "p"}]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "bf16"), ({"bf16": "auto"}, "bf16"), ({"adapter": "lora"}, None), ({"bf16": False}, None),
        ({"fp16": True}, None), ({"deepspeed": "zero2.json"}, None), ({"fsdp_config": {"fsdp_version": 2}}, None),
    ],
)  # fmt: skip
def test_weights_are_bf16_in_full_fine_tuning_of_axolotl(keys: Any, expected: str | None, import_keys: Any) -> None:
    assert import_keys("axolotl", **keys).draft.get("precision.master_dtype") == expected
