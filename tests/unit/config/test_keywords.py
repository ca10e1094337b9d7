"""Values of config keys from Python change a config as overrides on the command line do, with the same messages."""

from typing import Any

import pytest

from tunekit.cli import registry
from tunekit.config.load import load_config
from tunekit.config.overrides import KeywordValues
from tunekit.errors import UserError
from tunekit.recipes.preference import PreferenceConfig
from tunekit.recipes.sft import SFTConfig

BASE = {"model": "tunekit/nano", "data": {"source": "rows.jsonl"}, "output_dir": "out"}
TOOLS, DPO = registry.find_config("nano/tools_lora"), registry.find_config("nano/dpo")
WHERE = "finetune(...)"


def load(values: dict[str, Any], cls: type = SFTConfig, source: Any = None) -> Any:
    return load_config(cls, source, keywords=KeywordValues(WHERE, values))


@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        ({"optimizer": {"lr": 1e-4}, "data": {"max_length": 99}}, ["optimizer.lr=1e-4", "data.max_length=99"]),
        ({"optimizer.lr": 1e-4, "adapter.rank": 4}, ["optimizer.lr=1e-4", "adapter.rank=4"]),
        ({"adapter": "dora"}, ["adapter=dora"]),
        ({"adapter": {"rank": 3, "kind": "dora"}}, ["adapter.kind=dora", "adapter.rank=3"]),
        ({"data": {"chat_template_kwargs": {"a": True}}}, ["data.chat_template_kwargs={a: true}"]),
        ({"max_steps": None, "seed": 3}, ["max_steps=null", "seed=3"]),
    ],
)
def test_keywords_equal_overrides(values: dict[str, Any], overrides: list[str]) -> None:
    assert load(values, source=TOOLS) == load_config(SFTConfig, TOOLS, overrides)


def test_list_takes_one_kind_a_list_or_the_index_of_an_element() -> None:
    single = load({"loss": {"kind": "dpo", "beta": 0.3}}, PreferenceConfig, DPO)
    assert single == load_config(PreferenceConfig, DPO, ["loss={kind: dpo, beta: 0.3}"])
    both = load({"loss": [{"kind": "dpo"}, "sft"]}, PreferenceConfig, DPO)
    assert both == load_config(PreferenceConfig, DPO, ["loss=[{kind: dpo}, sft]"])
    indexed = load({"loss.0.beta": 0.3}, PreferenceConfig, DPO)
    assert indexed == load_config(PreferenceConfig, DPO, ["loss.0.beta=0.3"])


def test_dots_in_the_keys_of_a_table_are_kept() -> None:
    table = {"layers.0.attn": 0.5}
    assert load(BASE | {"optimizer": {"lr_pattern": table}}).optimizer.lr_pattern == table


def test_all_errors_name_the_call_and_the_key() -> None:
    with pytest.raises(UserError) as error:
        load(
            {"data": {"source": "rows.jsonl"}, "output_dir": "out", "adapter": {"kind": "lora", "rnk": 4}, "seed": "x"}
        )
    lines = str(error.value).splitlines()
    assert {line.split(": ")[1] for line in lines} == {"adapter.rnk", "seed", "model"}
    assert all(line.startswith(f"{WHERE}: ") for line in lines)


def test_keys_must_be_text() -> None:
    for key in (3, "", "optimizer..lr"):
        with pytest.raises(UserError, match="finetune"):
            load(BASE | {key: 1})  # type: ignore[dict-item]
