"""Text of imported configs: keys and comments of other trainers stay what they are."""

from typing import Any

import pytest
import yaml

from tests.unit.config.importers.conftest import Import
from tunekit.importers.draft import Draft, to_flow
from tunekit.importers.report import format_findings

BREAKS = ("\n", "\r", "\x85", "\u2028")


@pytest.mark.parametrize("line_break", BREAKS)
def test_comments_and_reports_are_single_lines(line_break: str) -> None:
    text = f"/tmp/m{line_break}seed: 666 \x1b[2J"
    draft = Draft()
    draft.set("model", "m", text)
    draft.set("data", {"kind": "chat", "columns": {"messages": "x" * 90}})
    draft.comments["data.columns"] = text
    draft.drop(text, 1, text)
    draft.differs(text, text, text)
    formatted = draft.format(text)
    assert yaml.safe_load(formatted) == {"recipe": "sft", **draft.tree}
    assert sum("seed: 666" in line and not line.lstrip().startswith("#") for line in formatted.splitlines()) == 0
    assert len(format_findings(draft.findings).splitlines()) == 4 and "\x1b" not in formatted


def test_line_breaks_of_a_checkpoint_directory_add_no_key(import_text: Import) -> None:
    text = """
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: "/tmp/m\\nseed: 666"}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
"""
    assert "seed" not in yaml.safe_load(import_text(text).text)


@pytest.mark.parametrize(
    "value",
    [
        {"[qk]_proj": 8, "a: b": 1, "${x}": 2, "#": 3, "null": 4, 5: "yes", "": 6, "x\n": 7},
        {"quotes": 'a "b" \\ c', "breaks": "a\u2028b\x85c\nd", "control": "a\x7fb", "emoji": "a \U0001f600"},
        {"rank_pattern": {r"layers\.(1|2)\..+": 8}, "nested": [1, {"a": [{}, {"b c": 2}]}], "empty": [{}]},
    ],
)
def test_values_and_keys_are_read_as_they_were_written(value: Any) -> None:
    assert yaml.safe_load(to_flow(value)) == value
    draft = Draft(tree={"section": {**value, "long": "x" * 100}})
    assert yaml.safe_load(draft.format("test"))["section"] == {**value, "long": "x" * 100}


def test_patterns_are_keys(import_text: Import) -> None:
    text = (
        "base_model: o/m\ndatasets: [{path: o/r, type: alpaca}]\nadapter: lora\nlora_rank_pattern: {'[qk]_proj': 8}\n"
    )
    assert yaml.safe_load(import_text(text).text)["adapter"]["rank_pattern"] == {"[qk]_proj": 8}
