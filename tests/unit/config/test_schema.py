import json
import re

import pytest

from tunekit.config.dump import to_plain_config
from tunekit.config.errors import ConfigError
from tunekit.config.field_comments import field_comments
from tunekit.config.load import mapping
from tunekit.config.schema import json_schema, key_markdown, options_markdown, overview_markdown
from tunekit.errors import UserError


def test_field_comments_are_read(tree):
    assert field_comments(tree.Rows) == {"source": "path or Hub name", "length": "tokens in a row | at most"}
    assert field_comments(tree.DoRA) == {"rank": "width of the update", "targets": "which layers: a word, or names"}


def test_class_without_source_has_no_comments():
    namespace: dict = {}
    exec("from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n    x: int = 1  # one", namespace)
    assert field_comments(namespace["A"]) == {}
    assert "`x`" in options_markdown(namespace["A"])


CASES = [
    "",
    "recipe: sft\nadapter: lora\nclip: null\nname: ${out}/x\nbatch: ${data.length}",
    "adapter: {kind: dora, magnitude: false, targets: [a, b]}\noptimizer: {betas: [0.5, 1]}",
    "log: {to: [wandb, {kind: wandb, project: x}]}\nvalidation: {source: v}\nrates: {a: {lr: 1}}",
    "optimizer: {kind: sgd, momentum: 2e-1}\nsize: 4\nother: {kind: lora}",
    "batch: x",
    "batch: 1.5",
    "lenght: 3",
    "adapter: {rank: 3}",
    "adapter: {kind: full, rank: 3}",
    "adapter: lorra",
    "other: {rank: 3}",
    "optimizer: {betas: [1]}",
    "optimizer: {kind: sgd, betas: [1, 2]}",
    "log: {to: wandb}",
    "validation: {length: 3}",
    "validation: rows",
    "dtype: bf61",
    "name: 3",
    "words: {a: 1}",
]


@pytest.mark.parametrize("text", CASES)
def test_schema_and_loader_accept_the_same_configs(sft, tree, text):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema(tree.SFT)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    base = mapping("model: m\ndata: {source: s}\nout: o\n")
    config = {**base, **(mapping(text.replace("${", r"\${")) if text else {})}
    try:
        value = sft(text)
    except ConfigError:
        assert not validator.is_valid(config)
    else:
        assert not list(validator.iter_errors(config))
        assert not list(validator.iter_errors(to_plain_config(value, "sft")))


def test_schema_contains_descriptions_and_defaults(tree):
    schema = json.loads(json.dumps(json_schema(tree.SFT)))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["model", "data", "out"]
    assert schema["properties"]["model"] == {"type": "string", "description": "directory or Hub name"}
    assert schema["properties"]["batch"]["default"] == 64
    assert schema["properties"]["recipe"]["type"] == "string"
    lora = schema["$defs"]["LoRA"]
    assert list(lora["properties"]) == ["kind", "rank", "alpha", "targets"]
    assert lora["properties"]["kind"] == {"const": "lora"}
    assert lora["additionalProperties"] is schema["additionalProperties"] is False
    assert lora["description"] == "Low-rank update of a weight."


def test_reference_contains_all_options(tree):
    text = options_markdown(tree.SFT)
    assert text.startswith("# SFT\n\nAll options of this recipe.\n\n| key | type | default | ")
    assert "| `model` | text | **required** | directory or Hub name |" in text
    assert "| `optimizer` | `adamw` or `sgd` | `adamw` with `lr=0.0003` |  |" in text
    assert "| `2048` | tokens in a row &#124; at most |" in text
    assert "\n## `data`, `validation`\n" in text
    assert "\n## `adapter: lora`, `other: lora`, `loss.parts`, `loss.terms: lora`\n" in text
    assert "\n## `log.to: wandb`\n" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"\|", row)) for row in rows} == {5}


def test_overview_contains_each_key_and_the_default_kinds(tree):
    text = overview_markdown(tree.SFT)
    assert text.startswith("# SFT\n")
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert "## `data`" in titles and "## `optimizer: adamw`" in titles and "## `optimizer: sgd`" not in titles


def test_key_reference_contains_all_kinds_of_this_key(tree):
    text = key_markdown(tree.SFT, "optimizer")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## `optimizer: adamw`",
        "## `optimizer: sgd`",
    ]
    assert "`model`: text, default **required**. directory or Hub name" in key_markdown(tree.SFT, "model")
    assert key_markdown(tree.SFT, "optimizer.lr") == key_markdown(tree.SFT, "optimizer")
    with pytest.raises(UserError, match="^optimizr: .*'optimizer'"):
        key_markdown(tree.SFT, "optimizr")
