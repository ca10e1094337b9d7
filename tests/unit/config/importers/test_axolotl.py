"""Configs of axolotl: dataset types, adapters, preference methods, intervals, and keys without a counterpart."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.imported_keys import silent_keys, unknown_keys
from tests.helpers.imported_runs import train
from tests.unit.config.importers.conftest import Import, values
from tests.unit.config.test_foreign_keys import AXOLOTL_KEYS
from tunekit.cli import recipe_loader
from tunekit.data.column_templates import compile_column_template
from tunekit.errors import UserError
from tunekit.importers import imported
from tunekit.importers.axolotl.convert import import_axolotl
from tunekit.importers.imported import Imported

QLORA = """
base_model: NousResearch/Llama-3.2-1B
model_type: AutoModelForCausalLM
load_in_4bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/qlora
adapter: qlora
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project: mine
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
"""


def test_qlora_config(import_text: Import) -> None:
    result = import_text(QLORA)
    assert (result.trainer, result.draft.recipe) == ("axolotl", "sft")
    assert result.draft.get("quantization") == {"kind": "nf4", "double_quant": True}
    assert values(result, "adapter.rank", "adapter.alpha", "adapter.target_modules") == [32, 16.0, "all-linear"]
    assert values(result, "data.split", "eval_data.split", "data.packing") == ["train[:90%]", "train[90%:]", True]
    assert values(result, "eval_every", "save_every", "epochs") == [0.0625, "epoch", 4]
    assert values(result, "global_batch_size", "optimizer.kind", "lr_scheduler.warmup_steps") == [8, "adamw8bit", 0.1]
    assert result.draft.get("report_to") == [{"kind": "wandb", "project": "mine"}]
    assert not [finding for finding in result.draft.findings if finding.effect == "not mapped"]


def dataset(**options: Any) -> str:
    return yaml.safe_dump({"base_model": "o/m", "datasets": [{"path": "o/rows", **options}]})


def render(result: Imported, row: dict[str, Any], name: str = "prompt") -> str:
    (transform,) = result.draft.get("data.transforms")
    return compile_column_template(transform["columns"][name]).render(row)


ROW = {"instruction": "Add.", "input": "2 and 2", "question": "Why?", "system": "Be kind.", "article": "A b c."}
INPUT_PROMPT = "### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:\n"
CUSTOM = {"format": "[Q] {instruction} ({input})\n[A] ", "no_input_format": "[Q] {instruction}\n[A] "}


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("alpaca:chatml", "<|im_start|>user\nAdd.\n2 and 2<|im_end|>\n<|im_start|>assistant\n"),
        ("alpaca", INPUT_PROMPT),
        ("alpaca_chat.load_qa", "USER: Why?\nASSISTANT:"),
        ("alpaca_w_system.load_instruct", f"### System:\nBe kind.\n\n{INPUT_PROMPT}"),
        ("summarizetldr", "USER: Summarize the following article as a TL;DR.\nA b c.\nASSISTANT:"),
        ("context_qa.load", "USER: A b c.\n===\nWhy?\nASSISTANT:"),
        (CUSTOM, "[Q] Add. (2 and 2)\n[A] "),
        ({**CUSTOM, "field_instruction": "question", "system_prompt": "Short."}, "[Q] Why? (2 and 2)\n[A] "),
    ],
)  # fmt: skip
def test_prompt_types_write_their_texts(kind: Any, prompt: str, import_text: Import) -> None:
    result = import_text(dataset(type=kind))
    assert render(result, ROW).endswith(prompt)
    assert values(result, "data.kind", "data.train_on") == ["completion", None]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"type": "chat_template"}, {"kind": "chat"}),
        ({"type": "chat_template", "chat_template": "chatml", "roles_to_train": ["assistant", "tool"]},
         {"chat_template": "chatml", "train_on": ["assistant", "tool"]}),
        ({"type": "chat_template", "field_messages": "conversations",
          "message_property_mappings": {"role": "from", "content": "value"}}, {"kind": "sharegpt"}),
        ({"type": "sharegpt", "conversation": "chatml"}, {"kind": "sharegpt", "chat_template": "chatml"}),
        ({"type": "completion", "field": "body"}, {"kind": "text"}),
        ({"type": "input_output"}, {"kind": "segments"}),
        ({"path": "json", "data_files": "rows.jsonl", "type": "chat_template"}, {"source": "rows.jsonl"}),
        ({"path": "rows.jsonl", "ds_type": "json", "type": "alpaca", "split": "train[:10%]"}, {"source": "rows.jsonl"}),
        ({"path": "o/rows", "name": "small", "type": "chat_template"}, {"source": "o/rows:small"}),
    ],
)  # fmt: skip
def test_dataset_types(options: dict[str, Any], expected: dict[str, Any], import_text: Import) -> None:
    data = import_text(dataset(**options)).draft.get("data")
    assert {key: data.get(key) for key in expected} == expected


def test_messages_with_other_keys_are_rewritten(import_text: Import) -> None:
    mappings = {"role": "speaker", "content": "words"}
    roles = {"assistant": ["bot"], "user": ["person"]}
    text = dataset(type="chat_template", field_messages="talk", message_property_mappings=mappings, roles=roles)
    row = {"talk": [{"speaker": "person", "words": 'Say "hi"'}, {"speaker": "bot", "words": "hi"}]}
    expected = [{"role": "user", "content": 'Say "hi"'}, {"role": "assistant", "content": "hi"}]
    assert yaml.safe_load(render(import_text(text), row, "talk")) == expected


@pytest.mark.parametrize(
    ("options", "recipe", "loss"),
    [
        ("rl: dpo\nrl_beta: 0.2", "preference", {"kind": "sigmoid", "beta": 0.2}),
        ("rl: ipo", "preference", {"kind": "ipo", "beta": 0.1}),
        ("rl: orpo\norpo_alpha: 0.3", "preference", {"kind": "orpo", "beta": 0.3}),
        ("rl: simpo\nsimpo_gamma: 1.0", "preference", {"kind": "simpo", "beta": 0.1, "simpo_gamma": 1.0}),
        ("reward_model: true", "reward", "bradley_terry"),
        ("rl: grpo\ntrl: {num_generations: 4, reward_funcs: [r.f]}", "grpo", {"kind": "dapo", "beta": 0.0}),
    ],
)  # fmt: skip
def test_methods(options: str, recipe: str, loss: Any, import_text: Import) -> None:
    result = import_text(f"base_model: o/m\ndatasets: [{{path: o/r, type: chat_template.default}}]\n{options}\n")
    assert result.draft.recipe == recipe and result.draft.get("loss") == loss


def test_pairs_of_texts_become_messages(import_text: Import) -> None:
    text = "base_model: o/m\nrl: dpo\ndatasets: [{path: o/r, split: train, type: chatml.intel}]\n"
    result = import_text(text)
    assert yaml.safe_load(render(result, ROW, "question")) == [{"role": "user", "content": "Why?"}]
    assert result.draft.get("data.chat_template") == "chatml"
    kto = import_text("base_model: o/m\nrl: kto\ndatasets: [{path: o/r, type: llama3.ultra}]\n")
    assert values(kto, "data.kind", "data.chat_template") == ["unpaired_preference", "llama3"]


def test_what_is_missing_is_named(import_text: Import) -> None:
    result = import_text(QLORA + "relora: true\nqat: {weight_dtype: int8}\nmy_key: 1\n")
    dropped = {finding.key for finding in result.draft.findings if finding.effect == "not mapped"}
    assert dropped == {"relora", "qat.weight_dtype", "my_key"}
    for wrong in ("rl: ebft", "processor_type: AutoProcessor\nskip_prepare_dataset: true"):
        with pytest.raises(UserError):
            import_text(f"{QLORA}{wrong}\n")
    with pytest.raises(UserError, match="unexpected type"):
        import_text(
            "base_model: o/m\ndatasets: [{path: o/r, type: alpaca}]\nspecial_tokens: 3\nlr_scheduler_kwargs: 3\n"
        )


def test_older_spellings(import_text: Import) -> None:
    text = QLORA.replace("bf16: auto", "bf16: false\nfp16: false\nfloat16: true\nadam_eps: 0.00001")
    result = import_text(text + "tokens: {bos_token: <s>}\ngptq_groupsize:\n")
    assert values(result, "precision.compute_dtype", "optimizer.eps", "new_tokens") == ["fp16", 1e-5, None]
    stream = "base_model: o/m\nmax_steps: 200\npretraining_dataset: [{path: o/r, name: en}]\nsaves_per_epoch: 1\n"
    assert values(import_text(stream), "save_every", "data.source", "data.streaming") == [500, "o/r:en", True]


def test_no_key_is_dropped_silently() -> None:
    def import_values(items: dict[str, Any]) -> Imported:
        draft, keys = import_axolotl(dict(items))
        return imported.finish(draft, keys, "axolotl", "test", recipe_loader.keys_of_recipe)

    base = {"base_model": "o/m", "datasets": [{"path": "o/r", "type": "alpaca"}], "adapter": "lora"}
    names = [name for name in AXOLOTL_KEYS.split() if "._" not in name and name not in base]
    assert silent_keys(import_values, base, names) == []
    assert unknown_keys(import_values, base, names) == []


@pytest.mark.parametrize("kind", ["alpaca", "chat_template"])
def test_imported_config_trains(kind: str, import_text: Import, tiny_model: Path, tmp_path: Path) -> None:
    text = QLORA.replace("type: alpaca", f"type: {kind}")
    assert len(train(import_text(text).draft, tiny_model, tmp_path)) == 2
