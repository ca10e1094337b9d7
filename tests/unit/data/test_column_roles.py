"""The columns of a dataset by their role: defaults, overrides, unknown roles, and kinds of the user."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from tunekit.config.choices import kind_name
from tunekit.config.dump import dump_yaml
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.config.schema import json_schema
from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.data.datasets import PreferenceDataset, UnpairedPreferenceDataset
from tunekit.data.embedding_datasets import RerankingDataset, RerankingPairsDataset, RetrievalDataset, SimilarityDataset
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.data.sft_datasets import SFTDataset, SFTFormat

KINDS = (
    *get_args(SFTFormat), PromptDataset, PreferenceDataset, UnpairedPreferenceDataset, LabeledDataset, StepwiseDataset,
    RetrievalDataset, SimilarityDataset, RerankingDataset, RerankingPairsDataset,
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    data: SFTDataset


FORUM = """
from dataclasses import dataclass
from typing import ClassVar
from tunekit.data.column_roles import Columns, column_roles
from tunekit.data.datasets import ConversationDataset

@dataclass(frozen=True)
class Forum(ConversationDataset):
    kind: ClassVar[str] = "forum"
    columns: Columns = column_roles(post="post", reply="reply")
"""


def load(data: str, *overrides: str, imports: tuple[Path, ...] = ()) -> SFTDataset:
    return load_config(Recipe, f"data: {{source: rows.jsonl, {data}}}", overrides, imports).data


@pytest.mark.parametrize("cls", KINDS, ids=kind_name)
def test_each_role_can_be_named(cls: type) -> None:
    roles = cls("x").columns
    assert roles
    for role in roles:
        assert cls("x", columns={role: "other"}).columns == {**roles, role: "other"}
        assert cls("x", columns={role: "other"}).fingerprint_keys() != cls("x").fingerprint_keys()


def test_columns_of_config_and_override_are_merged_with_the_defaults() -> None:
    data = load("kind: instruct, columns: {prompt: question, input: null}", "data.columns.completion=answer")
    assert data.columns == {"prompt": "question", "input": None, "completion": "answer"}
    assert load_config(Recipe, dump_yaml(Recipe(data))).data == data


def test_another_kind_keeps_the_columns_of_the_roles_that_it_has() -> None:
    config = "kind: instruct, columns: {prompt: question, input: context}"
    assert load(config, "data.kind=completion").columns == {"prompt": "question", "completion": "completion"}
    assert load(config, "data.kind=auto").columns == {}
    with pytest.raises(ConfigError, match="data.columns.input"):
        load(config, "data.columns.input=more", "data.kind=completion")


@pytest.mark.parametrize(
    ("data", "key", "parts"),
    [
        (
            "kind: instruct, columns: {promt: q}",
            "columns.promt",
            ["did you mean 'prompt'", "prompt, input, completion"],
        ),
        ("kind: instruct, columns: {output: q}", "columns.output", ["did you mean 'completion'"]),
        ("kind: text, columns: {xyz: q}", "columns.xyz", ["unknown role", "text"]),
        ("columns: {prompt: q}", "columns.prompt", ["`kind`"]),
        ("kind: completion, columns: {prompt: ''}", "columns.prompt", ["''"]),
        ("kind: completion, columns: {prompt: null}", "columns.prompt", ["null"]),
        ("kind: completion, prompt_column: q", "prompt_column", ["data.columns.prompt"]),
        ("kind: instruct, field_output: q", "field_output", ["data.columns.completion"]),
        ("kind: text, dataset_text_field: q", "dataset_text_field", ["data.columns.text"]),
    ],
)
def test_invalid_role_is_an_error_with_its_key_and_a_suggestion(data: str, key: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(data)
    (line,) = error.value.lines
    assert f"data.{key}: " in line and all(part in line for part in parts)


def test_schema_has_the_roles_of_each_kind() -> None:
    columns = json_schema(Recipe)["$defs"]["InstructDataset"]["properties"]["columns"]
    (mapping,) = (option for option in columns["anyOf"] if option["type"] == "object")
    assert list(mapping["properties"]) == ["prompt", "input", "completion"] and not mapping["additionalProperties"]


def test_kind_of_the_user_has_roles_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "forum.py"
    path.write_text(FORUM)
    data = load("kind: forum", "data.columns.post=question", imports=(path,))
    assert data.columns == {"post": "question", "reply": "reply"}
    with pytest.raises(ConfigError, match="data.columns.pots"):
        load("kind: forum, columns: {pots: question}", imports=(path,))
