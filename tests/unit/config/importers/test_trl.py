"""Configs and command lines of TRL: every key of its argument classes has an effect or is reported."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from trl import DPOConfig, GRPOConfig, KTOConfig, ModelConfig, RewardConfig, RLOOConfig, ScriptArguments, SFTConfig
from trl.experimental.gkd import GKDConfig
from trl.scripts.utils import DatasetMixtureConfig

from tests.helpers.imported_keys import silent_keys, unknown_keys
from tests.unit.config.importers.conftest import values
from tunekit.cli import recipe_loader
from tunekit.config.load import load_config
from tunekit.errors import UserError
from tunekit.importers import imported
from tunekit.importers.imported import Imported
from tunekit.importers.trl.convert import import_trl

BASE = {"model_name_or_path": "owner/model", "dataset_name": "owner/rows"}


def import_command(command: str) -> Imported:
    result = imported.import_command(command.split(), None, recipe_loader.keys_of_recipe)
    load_config(recipe_loader.load_recipe(result.draft.recipe).CONFIG, result.text)
    return result


def test_sft_command() -> None:
    result = import_command(
        "accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-0.6B"
        " --model_revision v1 --dataset_name trl-lib/Capybara --dataset_config small --learning_rate 2e-4 --packing"
        " --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --warmup_ratio 0.1 --use_peft --lora_r 8"
        " --load_in_4bit --lr_scheduler_type cosine --eval_strategy steps --eval_steps 50 --no_gradient_checkpointing"
    )
    assert values(result, "model", "data.source") == ["Qwen/Qwen3-0.6B@v1", "trl-lib/Capybara:small"]
    assert values(result, "global_batch_size", "micro_batch_size", "epochs") == [16, 4, 3]
    assert values(result, "optimizer.lr", "optimizer.betas", "data.max_length") == [2e-4, [0.9, 0.999], 1024]
    assert values(result, "lr_scheduler.kind", "lr_scheduler.warmup_steps") == ["cosine", 0.1]
    assert values(result, "adapter.rank", "adapter.alpha", "adapter.dropout") == [8, 32.0, 0.05]
    assert values(result, "quantization", "eval_every", "eval_data.split", "memory") == ["nf4", 50, "test", None]
    assert values(result, "data.packing", "seed", "log_every") == [True, 42, 10]


@pytest.mark.parametrize(
    ("command", "recipe", "expected"),
    [
        ("trl dpo --beta 0.2 --loss_type ipo", "preference", {"loss": {"kind": "ipo", "beta": 0.2}}),
        ("python -m trl.scripts.kto", "preference", {"loss.kind": "kto", "data.kind": "unpaired_preference"}),
        ("python examples/scripts/orpo.py", "preference", {"loss.kind": "orpo"}),
        (
            "python cpo.py --loss_type simpo --cpo_alpha 0",
            "preference",
            {"loss.kind": "simpo", "loss.simpo_gamma": 0.5},
        ),
        ("trl reward", "reward", {"loss": "bradley_terry", "optimizer.lr": 1e-4}),
        ("trl grpo --reward_funcs accuracy_reward", "grpo", {"rewards": [{"kind": "accuracy"}], "num_generations": 8}),
        ("trl rloo --reward_funcs my.fn", "grpo", {"loss": {"kind": "rloo", "beta": 0.05}}),
        ("python gkd.py --teacher_model_name_or_path owner/large", "distill", {"teacher.model": "owner/large"}),
    ],
)
def test_trainers_become_recipes(command: str, recipe: str, expected: dict[str, Any]) -> None:
    result = import_command(f"{command} --model_name_or_path owner/model --dataset_name owner/rows")
    assert result.draft.recipe == recipe
    assert {key: result.draft.get(key) for key in expected} == expected


def test_config_file_is_overridden_by_arguments(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nlearning_rate: 5e-7\nbeta: 0.3\nbf16: true\n")
    result = import_command(f"trl dpo --config {path} --learning_rate 1e-5")
    assert values(result, "optimizer.lr", "loss.beta", "precision.compute_dtype") == [1e-5, 0.3, "bf16"]
    by_file = imported.import_file(path, (), None, None, recipe_loader.keys_of_recipe)
    assert (by_file.trainer, by_file.draft.recipe) == ("trl", "preference")
    assert any("not named" in finding.note for finding in by_file.draft.findings)


def test_rows_of_a_local_file_decide_the_targets(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": " b"}\n')
    result = import_command(f"trl sft --model_name_or_path m --dataset_name {tmp_path}/pairs.jsonl")
    assert values(result, "data.kind", "data.train_on") == ["completion", None]
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    result = import_command(f"trl sft --model_name_or_path m --dataset_name {tmp_path}/texts.jsonl")
    assert values(result, "data.kind", "data.excess_length_strategy") == ["text", "truncate"]


def test_unknown_programs_and_trainers_are_errors() -> None:
    for command in ("ls -l", "trl xpo --model_name_or_path m", "python sft_vlm.py --model_name_or_path m", "trl sft"):
        with pytest.raises(UserError):
            import_command(command)


@pytest.mark.parametrize(
    ("task", "config"),
    [("sft", SFTConfig), ("dpo", DPOConfig), ("kto", KTOConfig), ("reward", RewardConfig), ("grpo", GRPOConfig),
     ("rloo", RLOOConfig), ("gkd", GKDConfig)],
)  # fmt: skip
def test_no_key_is_dropped_silently(task: str, config: type) -> None:
    def import_values(items: dict[str, Any]) -> Imported:
        draft, keys = import_trl(dict(items), task)
        return imported.finish(draft, keys, "trl", "test", recipe_loader.keys_of_recipe)

    base = BASE | ({"reward_funcs": ["a.b"]} if task in ("grpo", "rloo") else {})
    names = {
        field.name
        for cls in (config, ModelConfig, ScriptArguments, DatasetMixtureConfig)
        for field in dataclasses.fields(cls)
    }
    assert silent_keys(import_values, base, sorted(names)) == []
    assert unknown_keys(import_values, base, sorted(names)) == []


def test_gkd_has_the_defaults_of_its_config() -> None:
    command = "python gkd.py --teacher_model_name_or_path o/large --model_name_or_path o/m --dataset_name o/r"
    result = import_command(command)
    config = GKDConfig(output_dir="unused", use_cpu=True, bf16=False)
    expected = [config.beta, config.lmbda, config.temperature, config.max_new_tokens, config.learning_rate]
    keys = ("loss.beta", "on_policy.lmbda", "on_policy.temperature", "on_policy.max_new_tokens", "optimizer.lr")
    assert values(result, *keys) == expected
    assert values(result, "data.kind", "data.train_on", "data.packing") == ["chat", "last", None]
    result = import_command(f"{command} --packing --assistant_only_loss")
    assert {"packing", "assistant_only_loss"} <= {finding.key for finding in result.draft.findings}


def test_keys_of_gkd_name_the_trainer() -> None:
    draft, _ = import_trl({**BASE, "teacher_model_name_or_path": "o/large", "lmbda": 1.0})
    assert draft.get("on_policy.temperature") == 0.9
    draft, _ = import_trl({**BASE, "teacher_model_name_or_path": "o/large"})
    assert draft.get("on_policy.temperature") == 1.0


MIXTURE = {"model_name_or_path": "o/m", "datasets": [{"path": "o/a", "split": "part"}, {"path": "o/b"}]}


def splits(draft: Any, key: str) -> list[str]:
    return [part["dataset"].get("split", "train") for part in draft.get(f"{key}.datasets")]


def test_test_split_size_holds_rows_of_a_mixture_out() -> None:
    draft, _ = import_trl({**MIXTURE, "test_split_size": 0.1, "eval_strategy": "epoch"}, "sft")
    assert (splits(draft, "data"), splits(draft, "eval_data")) == (["part[:90%]", "train[:90%]"],
                                                                   ["part[90%:]", "train[90%:]"])  # fmt: skip
    draft, _ = import_trl({**MIXTURE, "test_split_size": 0.1}, "sft")
    assert splits(draft, "data") == ["part[:90%]", "train[:90%]"] and draft.get("eval_data") is None


def test_test_split_size_has_no_effect_on_one_dataset() -> None:
    keys = {**BASE, "dataset_train_split": "train_sft", "test_split_size": 0.1, "eval_strategy": "epoch"}
    draft, _ = import_trl(keys, "sft")
    assert (draft.get("data.split"), draft.get("eval_data.split")) == ("train_sft", "test")
    assert "test_split_size" in {finding.key for finding in draft.findings}


def test_fractions_are_weights_of_a_mixture() -> None:
    datasets = [{"path": "o/a", "fraction": 0.75}, {"path": "o/b", "fraction": 0.25}]
    draft, _ = import_trl({**MIXTURE, "datasets": datasets}, "sft")
    assert [part["weight"] for part in draft.get("data.datasets")] == [0.75, 0.25]


@pytest.mark.parametrize(
    ("functions", "weights", "expected"),
    [
        (["think_format_reward", "my.first"], [0.2, 0.8], [("function", 0.8)]),
        (["my.first"], 0.5, [("function", 0.5)]),
        (["my.first", "accuracy_reward"], [0.2, 0.8], [("function", 0.2), ("accuracy", 0.8)]),
    ],
)
def test_weights_belong_to_their_rewards(functions: list[str], weights: Any, expected: list[Any]) -> None:
    draft, _ = import_trl({**BASE, "reward_funcs": functions, "reward_weights": weights}, "grpo")
    assert [(reward["kind"], reward["weight"]) for reward in draft.get("rewards")] == expected


def test_rows_without_a_limit_have_a_comment() -> None:
    draft, _ = import_trl({**BASE, "max_length": None}, "sft")
    assert "data.max_length" in draft.comments


def test_losses_without_a_counterpart_are_reported() -> None:
    for name in ("kto_pair", "simpo"):
        draft, _ = import_trl({**BASE, "loss_type": name}, "dpo")
        assert draft.get("loss.kind") == "sigmoid" and "loss_type" in {finding.key for finding in draft.findings}


def test_variables_of_a_command_name_the_project() -> None:
    command = "trl sft --model_name_or_path o/m --dataset_name o/r --report_to wandb"
    result = import_command(f"CUDA_VISIBLE_DEVICES=0 env WANDB_PROJECT=p WANDB_API_KEY=secret {command}")
    assert result.draft.get("report_to") == [{"kind": "wandb", "project": "p"}]
    reported = {finding.key: finding.value for finding in result.draft.findings}
    assert {"CUDA_VISIBLE_DEVICES": "", "WANDB_API_KEY": ""}.items() <= reported.items()
    assert "secret" not in result.text
    result = import_command(f"WANDB_PROJECT=p {command.removesuffix(' --report_to wandb')}")
    assert result.draft.get("report_to") is None
    assert "WANDB_PROJECT" in {finding.key for finding in result.draft.findings}
