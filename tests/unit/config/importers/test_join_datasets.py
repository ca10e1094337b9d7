"""Mixtures: keys that all datasets share, keys of each one, and conflicts between them."""

from typing import Any

import pytest
import yaml

from tests.unit.config.importers.conftest import Import

CHATS = [
    {"path": "o/a", "type": "chat_template", "chat_template": "llama3"},
    {"path": "o/b", "type": "chat_template", "chat_template": "chatml"},
]
TORCHTUNE = """
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer}
dataset:
- {_component_: torchtune.datasets.alpaca_dataset, max_seq_len: 512}
- {_component_: torchtune.datasets.chat_dataset, source: o/r, max_seq_len: 1024}
"""


def differences(result: Any) -> dict[str, Any]:
    return {finding.key: finding.value for finding in result.draft.findings if finding.effect == "differs"}


def test_other_chat_templates_are_reported(import_text: Import) -> None:
    result = import_text(yaml.safe_dump({"base_model": "m", "datasets": CHATS}))
    assert result.draft.get("data.chat_template") == "llama3"
    assert differences(result)["data.chat_template"] == "chatml"
    unnamed = {"path": "o/b", "type": "chat_template"}
    result = import_text(yaml.safe_dump({"base_model": "m", "datasets": [CHATS[0], unnamed]}))
    assert "checkpoint" in differences(result)["data.chat_template"]


def test_other_lengths_are_reported(import_text: Import) -> None:
    result = import_text(TORCHTUNE)
    assert result.draft.get("data.max_length") == 512
    assert differences(result)["data.max_length"] == "1024"


def test_texts_have_no_chat_template(import_text: Import) -> None:
    datasets = [CHATS[0], {"path": "o/t", "type": "completion"}]
    result = import_text(yaml.safe_dump({"base_model": "m", "datasets": datasets, "dataset_num_proc": 2}))
    assert not differences(result)
    assert [part["dataset"]["num_proc"] for part in result.draft.get("data.datasets")] == [2, 2]


@pytest.mark.parametrize("size", [0.1, 20])
def test_weights_are_kept_when_rows_are_held_out(size: float, import_text: Import) -> None:
    keys = {"model_name_or_path": "m", "dataset": "o/a,o/b", "stage": "sft", "template": "llama3", "val_size": size}
    keys |= {"interleave_probs": "0.7,0.3", "eval_strategy": "epoch"}
    draft = import_text(yaml.safe_dump(keys)).draft
    assert [part["weight"] for part in draft.get("data.datasets")] == [0.7, 0.3]
    assert [part["dataset"]["split"] for part in draft.get("eval_data.datasets")] == (
        ["train[90%:]"] * 2 if size < 1 else ["train[-10:]"] * 2
    )
