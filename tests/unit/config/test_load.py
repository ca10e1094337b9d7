import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from tunekit.config.dump import dump_yaml
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config, mapping
from tunekit.config.schema import json_schema


def test_defaults_live_in_the_dataclasses(sft, tree):
    assert sft() == tree.SFT(model="m", data=tree.Rows(source="s"), out="o")


def test_mapping_file_and_text_give_the_same_config(tmp_path, tree):
    data = {"model": "m", "data": {"source": "s"}, "out": "o", "adapter": {"kind": "lora", "rank": 2}, "recipe": "sft"}
    file = tmp_path / "c.yaml"
    text = "recipe: sft\nmodel: m\ndata: {source: s}\nout: o\nadapter: {kind: lora, rank: 2}\n"
    file.write_text("\ufeff" + text, "utf-8")
    config = [load_config(tree.SFT, source) for source in (data, file, text)]
    assert config == [tree.SFT("m", tree.Rows("s"), "o", tree.LoRA(rank=2))] * 3
    assert mapping(file) == mapping(text) == data


def test_config_from_overrides_only(tree):
    assert load_config(tree.SFT, None, ["model=m", "data.source=s", "out=o"]) == tree.SFT("m", tree.Rows("s"), "o")
    assert load_config(tree.Log, None) == load_config(tree.Log, "{}") == tree.Log()


def test_string_selects_a_kind(sft, tree):
    assert sft("adapter: dora").adapter == tree.DoRA()
    assert sft("log: {to: [wandb, {kind: wandb, project: x}, tensorboard]}").log.to == (
        tree.WandB(),
        tree.WandB("x"),
        tree.TensorBoard(),
    )


def test_mapping_without_a_kind_changes_the_default(sft, tree):
    assert sft("optimizer: {betas: [0.5, 1]}").optimizer == tree.AdamW(lr=3e-4, betas=(0.5, 1.0))
    assert sft("optimizer: {kind: adamw, betas: [0.5, 1]}").optimizer == tree.AdamW(lr=3e-4, betas=(0.5, 1.0))
    assert sft("optimizer: {kind: sgd}").optimizer == tree.SGD()
    assert sft("validation: {source: v}").validation == tree.Rows("v")
    assert sft("validation: {kind: rows, source: v}").validation == tree.Rows("v")


@dataclass(frozen=True)
class Named:
    source: str


@dataclass(frozen=True)
class Guessed(Named):
    is_default: ClassVar[bool] = True


@dataclass(frozen=True)
class Wide(Guessed):
    """A subclass of the default class is another choice."""

    length: int = 1


@dataclass(frozen=True)
class Reader:
    data: Named | Wide | Guessed
    other: Named | Guessed | None = None


def test_mapping_without_a_kind_uses_the_default_class():
    assert load_config(Reader, "data: {source: a}") == Reader(Guessed("a"))
    assert load_config(Reader, "data: {kind: wide, source: a}\nother: {source: b}") == Reader(Wide("a"), Guessed("b"))
    assert load_config(Reader, None, ["data.source=a"]) == Reader(Guessed("a"))
    assert load_config(Reader, dump_yaml(Reader(Guessed("a"), Named("b")))) == Reader(Guessed("a"), Named("b"))
    with pytest.raises(ConfigError, match="data.length: unknown key: 'length' belongs to kind wide, .* guess"):
        load_config(Reader, "data: {source: a, length: 2}")
    schema = json_schema(Reader)["properties"]["data"]["anyOf"]
    assert {part["$ref"]: part["required"] for part in schema if "$ref" in part} == {
        "#/$defs/Named": ["kind", "source"],
        "#/$defs/Wide": ["kind", "source"],
        "#/$defs/Guessed": ["source"],
    }


@pytest.mark.parametrize("text", ["2e-4", "2.0e-4", "0.0002", "+2E-4", ".0002", '"2e-4"', "0.000_2"])
def test_spellings_of_floats(sft, text):
    assert sft(f"optimizer: {{lr: {text}}}").optimizer.lr == 2e-4


def test_numbers(sft):
    config = sft("batch: 1_000\nclip: 3\nloss: {weights: [1, .inf, -.Inf, 2.]}")
    assert (config.batch, config.clip) == (1000, 3.0)
    assert type(config.clip) is float
    assert config.loss.weights == (1.0, float("inf"), float("-inf"), 2.0)


@pytest.mark.parametrize(
    "word", ["on", "off", "yes", "No", "y", "012", "1:30", "2024-01-01", "0x10", "1.2.3", "None", "~x"]
)
def test_yaml_1_1_special_values_are_text(sft, word):
    assert sft(f"words: {{a: {word}}}").words == {"a": word}


def test_union_of_scalars_keeps_the_type(sft):
    assert [sft(f"size: {text}").size for text in ("5", '"5"', "auto", "'null'")] == [5, "5", "auto", "null"]
    assert [sft(f"name: {text}").name for text in ("null", "~", "", "x", "'None'")] == [None, None, None, "x", "None"]


def test_mappings_of_choices(sft, tree):
    assert sft("rates: {a: {lr: 1}, b: {}}").rates == {"a": tree.SGD(lr=1.0), "b": tree.SGD()}


def test_anchors_aliases_and_merge_keys(sft, tree):
    text = "validation: &v {source: v, length: 5}\nother: &o {kind: lora, rank: 1}\nadapter: {<<: *o, rank: 2}\n"
    config = sft(text + "rates: {a: &a {lr: 1}, b: {<<: [{momentum: 3, lr: 5}, *a]}}", "validation.length=6")
    assert config.validation == tree.Rows("v", 6)
    assert (config.other, config.adapter) == (tree.LoRA(1), tree.LoRA(2))
    assert config.rates["b"] == tree.SGD(5.0, 3.0)


def test_override_of_an_alias_does_not_change_its_anchor(sft):
    config = sft("validation: &v {source: v}\nrates: {a: &a {lr: 1}, b: *a}", "rates.b.lr=2")
    assert (config.rates["a"].lr, config.rates["b"].lr) == (1.0, 2.0)


def test_recipe_must_be_a_name(tree):
    with pytest.raises(ConfigError, match=r"line 1: recipe: expected the name of a recipe, got a list"):
        load_config(tree.SFT, "recipe: [a]")


def test_config_package_imports_fast_and_without_torch():
    code = (
        "import sys, time; start = time.process_time(); import tunekit.config.load, tunekit.config.schema;"
        "print(time.process_time() - start, *({'torch', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root) for _ in range(3)]
    assert all(run.returncode == 0 and len(run.stdout.split()) == 1 for run in runs), runs
    assert min(float(run.stdout) for run in runs) < 0.25


@dataclass(frozen=True)
class Paths:
    output_dir: str
    source: str = ""
    prompt: str = ""


def test_paths_start_in_the_home_directory(monkeypatch, tmp_path):
    """With `~`, in keys of directories and files; variables of a shell are errors with their key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    built = load_config(Paths, {"output_dir": "~/runs/a", "prompt": "~/ or $HOME?"})
    assert built == Paths(f"{tmp_path}/runs/a", prompt="~/ or $HOME?")
    for override, key in (("output_dir=$HOME/a", "output_dir"), ("source=a/$DATA.jsonl", "source")):
        with pytest.raises(ConfigError, match=f": {key}: [$]"):
            load_config(Paths, {"output_dir": "a"}, [override])
