import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import yaml

from tunekit.config.choices import kind_name
from tunekit.config.load import load_config
from tunekit.recipes.sft import SFTConfig


def test_values_are_parsed_by_field_type(sft):
    config = sft("", "model=123", "name=2e5", "size=5", "clip=3", "batch=7", "compile=true", "optimizer.lr=2e-4")
    assert (config.model, config.name, config.size, config.clip, config.batch) == ("123", "2e5", 5, 3.0, 7)
    assert (config.compile, config.optimizer.lr) == (True, 2e-4)
    assert sft("", "batch='8'").batch == 8


@pytest.mark.parametrize("value", ["a=b", "a: b", "a #b", "*x", "&x", "- x", "!x", "${x", "@", "a, b", "", "%", "a\nb"])
def test_value_without_brackets_is_text(sft, errors, value):
    if "${" in value:
        assert errors("", f"model={value}") == [
            "command line: model: '${x' is not allowed: references can only name keys, such as ${output_dir}"
        ]
    else:
        assert sft("", f"model={value}").model == value


def test_lists_mappings_quotes_and_nulls(sft, tree):
    config = sft("", "log.to=[wandb, {kind: wandb, project: 'a, b'}]", 'name="null"', "clip=null", "words={a: b}")
    assert config.log.to == (tree.WandB(), tree.WandB("a, b"))
    assert (config.name, config.clip, config.words) == ("null", None, {"a": "b"})
    assert sft("name: x", "name=null").name is sft("name: x", "name=").name is None


def test_kind_and_its_keys_in_any_order(sft, tree):
    assert sft("", "adapter=lora", "adapter.rank=4").adapter == tree.LoRA(rank=4)
    assert sft("", "adapter.rank=4", "adapter=lora").adapter == tree.LoRA(rank=4)
    assert sft("adapter: lora", "adapter.rank=4").adapter == tree.LoRA(rank=4)


@pytest.mark.parametrize("override", ["adapter=dora", "adapter.kind=dora", "adapter={kind: dora}"])
def test_new_kind_drops_the_keys_of_the_old_one(sft, tree, override):
    assert sft("adapter: {kind: lora, rank: 64}", override).adapter == tree.DoRA()


@dataclass(frozen=True)
class Ada:
    """Optimizer."""

    keeps_shared_keys: ClassVar[bool] = True
    lr: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True)
class Momentum:
    """Optimizer without `eps`."""

    keeps_shared_keys: ClassVar[bool] = True
    lr: float = 2.0
    momentum: float = 2.0


@dataclass(frozen=True)
class Other:
    """Optimizer that keeps no keys."""

    lr: float = 3.0


@dataclass(frozen=True)
class Options:
    optimizer: Ada | Momentum | Other = Ada()


@pytest.mark.parametrize("override", ["optimizer=momentum", "optimizer.kind=momentum"])
def test_new_kind_keeps_the_keys_that_both_kinds_share(override: str) -> None:
    text = "optimizer: {lr: 9, eps: 9}"
    assert load_config(Options, text, [override]).optimizer == Momentum(9.0)
    assert load_config(Options, text, [override, "optimizer=ada"]).optimizer == Ada(9.0)
    assert load_config(Options, text, ["optimizer={kind: momentum}"]).optimizer == Momentum()
    assert load_config(Options, text, ["optimizer=other"]).optimizer == Other()
    assert load_config(Options, "optimizer: {kind: other, lr: 9}", [override]).optimizer == Momentum()


@pytest.mark.parametrize(
    ("key", "old", "shared", "kinds"),
    [
        ("optimizer", "adamw", {"lr": 0.5, "weight_decay": 0.1}, ["adamw8bit", "muon", "sgd"]),
        ("lr_scheduler", "cosine", {"warmup_steps": 7.0}, ["linear", "constant", "wsd"]),
        ("adapter", "lora", {"rank": 3, "dropout": 0.1}, ["dora"]),
        ("quantization", "nf4", {"double_quant": True}, ["fp4"]),
        ("data", "chat", {"source": "b", "max_length": 9}, ["sharegpt", "completion", "text"]),
    ],
)
def test_another_kind_keeps_training_options(key: str, old: str, shared: dict[str, Any], kinds: list[str]) -> None:
    options: dict[str, Any] = {"model": "m", "output_dir": "out", "data": {"source": "a"}}
    options |= {"adapter": "lora", key: {"kind": old, **shared}}
    for kind in kinds:
        choice = getattr(load_config(SFTConfig, yaml.safe_dump(options), [f"{key}={kind}"]), key)
        assert kind_name(type(choice)) == kind
        assert {name: value for name, value in vars(choice).items() if name in shared} == shared


def test_new_kind_drops_the_keys_of_the_default(sft, tree):
    assert sft("optimizer: {betas: [0.5, 1]}", "optimizer=sgd", "optimizer.momentum=1").optimizer == tree.SGD(1e-2, 1.0)


def test_same_kind_keeps_its_keys(sft, tree):
    assert sft("adapter: {kind: lora, rank: 64}", "adapter=lora").adapter == tree.LoRA(64)
    assert sft("optimizer: {betas: [0.5, 1]}", "optimizer.kind=adamw").optimizer == tree.AdamW(3e-4, (0.5, 1.0))


@dataclass(frozen=True)
class Guessed:
    """Rows of any kind."""

    accepts_any_key: ClassVar[bool] = True
    source: str
    length: int = 8
    only: int = 0


@dataclass(frozen=True)
class Named:
    source: str
    length: int = 8
    columns: int = 1


@dataclass(frozen=True)
class Recipe:
    data: Guessed | Named = Guessed("default")


def test_kind_that_replaces_an_open_one_keeps_common_keys() -> None:
    text = "data: {kind: guessed, source: rows, length: 3, only: 4}"
    assert load_config(Recipe, text, ["data=named"]).data == Named("rows", 3)
    assert load_config(Recipe, text, ["data.kind=named", "data.columns=2"]).data == Named("rows", 3, 2)
    assert load_config(Recipe, "data: {source: rows}", ["data.kind=named"]).data == Named("rows")
    other = load_config(Recipe, "data: {kind: named, source: rows, length: 3}", ["data=guessed", "data.source=x"])
    assert other.data == Guessed("x")


def test_override_for_the_old_kind_is_an_error(errors):
    assert errors("adapter: lora", "adapter.rank=4", "adapter=full") == [
        "command line: adapter.rank: unknown key: 'rank' belongs to kind lora or dora, and the kind is full"
    ]


def test_overrides_create_omitted_mappings(sft, tree):
    config = sft("other: null", "optimizer.betas=[0,1]", "validation.source=v", "other.kind=lora", "rates.x.lr=3")
    assert config.optimizer == tree.AdamW(3e-4, (0.0, 1.0))
    assert (config.validation, config.other) == (tree.Rows("v"), tree.LoRA())
    assert config.rates == {"x": tree.SGD(3.0)}


def test_overrides_of_list_elements(sft, tree):
    assert sft("log: {to: [wandb]}", "log.to.0.project=x").log.to == (tree.WandB("x"),)
    assert sft("log: {to: [wandb]}", "log.to.0=tensorboard").log.to == (tree.TensorBoard(),)
    assert sft("", "log.to.0=wandb", "log.to.1=tensorboard").log.to == (tree.WandB(), tree.TensorBoard())
    assert sft("", "loss.weights.1=9").loss.weights == (1.0, 9.0)
    assert sft("", "loss.parts.0.alpha=9").loss.parts == (tree.LoRA(2, 9.0), tree.LoRA(3))


def test_single_choice_is_a_list_of_one(sft, tree):
    assert sft("log: {to: wandb}").log.to == (tree.WandB(),)
    assert sft("loss: {terms: {alpha: 9}}").loss.terms == (tree.LoRA(5, 9.0),)
    for text in ("", "loss: {terms: {rank: 5}}", "loss: {terms: [{kind: lora, rank: 5}]}"):
        assert sft(text, "loss.terms.alpha=9").loss.terms == (tree.LoRA(5, 9.0),)
        assert sft(text, "loss.terms=sgd", "loss.terms.lr=9").loss.terms == (tree.SGD(9.0),)
        assert sft(text, "loss.terms.kind=sgd", "loss.terms.lr=9").loss.terms == (tree.SGD(9.0),)
        assert sft(text, "loss.terms=[sgd, lora]", "loss.terms.0.lr=9").loss.terms == (tree.SGD(9.0), tree.LoRA())
    assert sft("log: {to: wandb}", "log.to.project=x").log.to == (tree.WandB("x"),)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed", ".*'seed'"),
        (
            "loss.parts.rank=3",
            r"loss\.parts\.rank: ",
        ),
        ("--seed=1", r".*'\-\-seed=1'"),
        ("=3", ".*'=3'"),
        ("a..b=3", r".*'a\.\.b=3'"),
        ("data.=3", r".*'data\.=3'"),
        (".".join("a" * 5000) + "=1", r"a\.a\.a\.a: "),
        ("lenght=3", "lenght: .*'data.length'"),
        ("nothing.at.all=3", "nothing: "),
        ("recipe=dpo", "recipe: "),
        ("batch=", "batch: "),
        ("batch=1e3", "batch: "),
        ("batch=true", "batch: "),
        ("batch.x=3", "batch: "),
        ("compile=yes", "compile: "),
        ("adapter=lorra", "adapter: .*'lora'"),
        ("other.rank=2", "other: "),
        ("log.to.1=wandb", r"log\.to\.1: "),
        ("log.to.x=wandb", r"log\.to\.x: "),
        ("model=[a", "model: "),
        ("model='a", "model: "),
        ("words={a: 1, a: 2}", "words: "),
    ],
)
def test_invalid_override_is_an_error(errors, override, line):
    assert re.match(f"command line: {line}", errors("recipe: sft", override)[0])


def test_last_override_wins(tree):
    assert load_config(tree.Log, "every: 2", ["every=3", "every=4"]).every == 4
