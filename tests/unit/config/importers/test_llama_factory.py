"""Configs of LLaMA-Factory: stages, dataset_info.json, templates, and keys without a counterpart."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.imported_keys import silent_keys, unknown_keys
from tests.helpers.imported_runs import train
from tests.unit.config.importers.conftest import Import, values
from tests.unit.config.test_foreign_keys import LLAMA_FACTORY_KEYS
from tunekit.cli import recipe_loader
from tunekit.config.load import load_config
from tunekit.data.column_templates import compile_column_template
from tunekit.errors import UserError
from tunekit.importers import imported
from tunekit.importers.imported import Imported
from tunekit.importers.llama_factory.convert import import_llama_factory

LORA = """
model_name_or_path: Qwen/Qwen3-4B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: first,second
dataset_dir: data
template: qwen3_nothink
cutoff_len: 1024
max_samples: 1000
preprocessing_num_workers: 4
output_dir: saves/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
deepspeed: examples/deepspeed/ds_z3_offload_config.json
"""
INFO = {
    "first": {"file_name": "first.json"},
    "second": {"hf_hub_url": "o/second", "formatting": "sharegpt",
               "columns": {"messages": "talk", "tools": "functions"}},
    "chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
              "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
    "pairs": {"file_name": "pairs.json", "ranking": True,
              "columns": {"prompt": "ask", "query": "more", "chosen": "good", "rejected": "bad"}},
    "shared_pairs": {"file_name": "p.json", "ranking": True, "formatting": "sharegpt",
                     "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    "labels": {"file_name": "l.json", "columns": {"prompt": "ask", "response": "say", "kto_tag": "ok"}},
    "texts": {"file_name": "t.jsonl", "columns": {"prompt": "body"}},
    "pictures": {"file_name": "m.json", "columns": {"messages": "messages", "images": "images"}},
}  # fmt: skip


@pytest.fixture
def import_stage(tmp_path: Path, import_text: Import) -> Any:
    """Function that imports a stage with a dataset of INFO, and other keys."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))

    def run(stage: str, dataset: str, **options: Any) -> Imported:
        keys = {"model_name_or_path": "o/m", "stage": stage, "dataset": dataset, "template": "llama3", **options}
        return import_text(yaml.safe_dump(keys))

    return run


def test_lora_config(import_text: Import, import_stage: Any) -> None:
    result = import_text(LORA)
    assert (result.trainer, result.draft.recipe) == ("llama-factory", "sft")
    assert result.draft.get("adapter") == {"kind": "lora", "rank": 8, "alpha": 16.0, "target_modules": "all-linear"}
    first, second = (part["dataset"] for part in result.draft.get("data.datasets"))
    assert (
        first["kind"] == "instruct" and first["split"] == "train[:90%]" and first["source"].endswith("data/first.json")
    )
    assert second["kind"] == "sharegpt" and second["max_samples"] == 1000
    assert second["transforms"] == [{"kind": "rename_columns", "column_mapping": {"functions": "tools"}}]
    assert values(result, "data.chat_template_kwargs", "data.max_length") == [{"enable_thinking": False}, 1024]
    assert values(result, "global_batch_size", "memory.activation_checkpointing", "eval_every") == [8, "full", 500]
    assert values(result, "parallel.cpu_offload", "precision.compute_dtype") == [True, "bf16"]
    assert not [finding for finding in result.draft.findings if finding.effect == "not mapped"]


@pytest.mark.parametrize(
    ("stage", "dataset", "options", "expected"),
    [
        ("sft", "chats", {"mask_history": True}, {"data.kind": "chat", "data.train_on": "last"}),
        ("sft", "chats", {"quantization_bit": 4}, {"quantization": {"kind": "nf4", "double_quant": True}}),
        ("sft", "first", {"finetuning_type": "full", "pure_bf16": True}, {"precision.master_dtype": "bf16"}),
        ("sft", "o/rows", {}, {"data.source": "o/rows"}),
        ("pt", "texts", {}, {"data.kind": "text", "data.packing": True}),
        ("dpo", "pairs", {"pref_loss": "orpo"}, {"loss": {"kind": "orpo", "beta": 0.1}, "data.kind": "preference"}),
        ("dpo", "shared_pairs", {"pref_ftx": 0.2},
         {"loss": [{"kind": "sigmoid", "beta": 0.1}, {"kind": "sft", "weight": 0.2}]}),
        ("kto", "labels", {"kto_chosen_weight": 2.0}, {"loss": {"kind": "kto", "beta": 0.1, "desirable_weight": 2.0}}),
        ("rm", "pairs", {}, {"loss": "bradley_terry"}),
        ("ppo", "first", {"reward_model": "saves/rm"}, {"rewards": [{"kind": "reward_model", "model": "saves/rm"}]}),
    ],
)  # fmt: skip
def test_stages(stage: str, dataset: str, options: dict, expected: dict, import_stage: Any) -> None:
    result = import_stage(stage, dataset, **options)
    assert {key: result.draft.get(key) for key in expected} == expected


def test_instructions_and_pairs_have_the_texts_of_the_original(import_stage: Any) -> None:
    (transform,) = import_stage("sft", "first").draft.get("data.transforms")
    template = compile_column_template(transform["columns"]["instruction"])
    assert template.render({"instruction": "Add.", "input": "2 and 2"}) == "Add.\n2 and 2"
    assert template.render({"instruction": "Add.", "input": ""}) == "Add."
    (transform,) = import_stage("dpo", "shared_pairs").draft.get("data.transforms")
    row = {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Hello"}}
    texts = {name: compile_column_template(transform["columns"][name]).render(row) for name in row}
    assert json.loads(texts["conversations"]) == [{"role": "user", "content": "Hi"}]
    assert json.loads(texts["chosen"]) == [{"role": "assistant", "content": "Hello"}]


def test_other_commands_and_images_are_errors(import_text: Import, import_stage: Any) -> None:
    with pytest.raises(UserError, match="tune merge m a out"):
        import_text("model_name_or_path: m\nadapter_name_or_path: a\nexport_dir: out\n")
    with pytest.raises(UserError, match="tune chat m"):
        import_text("model_name_or_path: m\ntemplate: llama3\n")
    with pytest.raises(UserError, match="images"):
        import_stage("sft", "pictures")


def test_command_line(import_stage: Any, tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text(LORA)
    words = [
        "FORCE_TORCHRUN=1",
        "CUDA_VISIBLE_DEVICES=0,1",
        "llamafactory-cli",
        "train",
        str(path),
        "learning_rate=3e-5",
    ]
    result = imported.import_command(words, None, recipe_loader.keys_of_recipe)
    load_config(recipe_loader.load_recipe("sft").CONFIG, result.text)
    assert values(result, "global_batch_size", "optimizer.lr") == [16, 3e-5]
    assert result.draft.launch == ["--nproc-per-node", "2"]


def test_no_key_is_dropped_silently() -> None:
    def import_values(items: dict[str, Any]) -> Imported:
        draft, keys = import_llama_factory(dict(items))
        return imported.finish(draft, keys, "llama-factory", "test", recipe_loader.keys_of_recipe)

    base = {"model_name_or_path": "o/m", "dataset": "identity", "val_size": 0.1}
    names = [name for name in LLAMA_FACTORY_KEYS.split() if name not in ("model_name_or_path", "dataset", "stage")]
    assert silent_keys(import_values, base, names) == []
    assert unknown_keys(import_values, base, names) == []


@pytest.mark.parametrize(("stage", "dataset"), [("sft", "first"), ("dpo", "shared_pairs")])
def test_imported_config_trains(stage: str, dataset: str, import_stage: Any, tiny_model: Path, tmp_path: Path) -> None:
    draft = import_stage(stage, dataset).draft
    rows = [{"conversations": [{"from": "human", "value": f"Hi {i}"}], "chosen": {"from": "gpt", "value": "Hello"},
             "rejected": {"from": "gpt", "value": "What?"}} for i in range(8)]  # fmt: skip
    if stage == "dpo":
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        draft.set("data.source", str(tmp_path / "pairs.jsonl"))
    assert len(train(draft, tiny_model, tmp_path, localizes=stage != "dpo")) == 2
