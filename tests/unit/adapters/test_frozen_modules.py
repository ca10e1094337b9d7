"""Full training of some modules: which weights are trained, and with which learning rate."""

from pathlib import Path

import pytest
import torch

from tests.helpers.random_checkpoints import SHAPES, build, load_model, make_checkpoint, random_tokens, save
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.classification_head import ScoreHead
from tunekit.errors import FieldError, UserError
from tunekit.models.decoder import Decoder
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama-biases")


def trained_names(model: Decoder) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (NoAdapter(trainable_modules="attn"), lambda name: ".attn." in name),
        (NoAdapter(frozen_modules=("embed_tokens", "norms")), lambda name: "embed" not in name and "norm" not in name),
        (NoAdapter(trainable_modules=r"layers\.1"), lambda name: name.startswith("layers.1.")),
        (NoAdapter(trainable_modules=("attn", "mlp"), frozen_modules="[qk]_proj"), lambda name: name.split(".")[-2] in (
            "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)  # fmt: skip
def test_patterns_select_the_trained_weights(adapter: NoAdapter, expected, folder: Path) -> None:
    model = load_model(folder, adapter)
    names = [name for name, _ in model.named_parameters()]
    assert trained_names(model) == {name for name in names if expected(name)} != set(names)
    assert {id(p) for ps, _ in adapter.param_groups(model) for p in ps} == {
        id(p) for p in model.parameters() if p.requires_grad
    }


def test_gradients_equal_those_of_full_training(folder: Path) -> None:
    full, partial = load_model(folder), load_model(folder, NoAdapter(frozen_modules=("embed_tokens", r"layers\.0")))
    for model in (full, partial):
        model(random_tokens()).square().mean().backward()
    expected = dict(full.named_parameters())
    for name, parameter in partial.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, expected[name].grad)
        else:
            assert parameter.grad is None


def test_tied_head_is_frozen_with_the_embedding(tmp_path: Path) -> None:
    folder = save(build(SHAPES["llama-biases"] | {"tie_word_embeddings": True}), tmp_path)
    for name in ("embed_tokens", "lm_head"):
        assert "embed.weight" not in trained_names(load_model(folder, NoAdapter(frozen_modules=name)))
        assert trained_names(load_model(folder, NoAdapter(trainable_modules=name))) == {"embed.weight"}


def test_score_head_is_always_trained(folder: Path) -> None:
    spec = load_model(folder).spec.with_score_head(ScoreHead(1))
    with torch.device("meta"):
        model = Decoder(spec)
    NoAdapter(trainable_modules="norm").apply(model)
    assert trained_names(model) == {"norm.weight", "head.weight"}


@pytest.mark.parametrize("adapter", [
    NoAdapter(trainable_modules="qproj"), NoAdapter(frozen_modules=("attn", "router")), NoAdapter(frozen_modules=".*"),
])  # fmt: skip
def test_pattern_without_a_match_and_nothing_to_train_are_errors(adapter: NoAdapter, folder: Path) -> None:
    with pytest.raises(UserError, match=r"^adapter\.(trainable|frozen)_modules: no "):
        load_model(folder, adapter)


def test_invalid_pattern_names_the_key() -> None:
    for make, key in (
        (lambda: NoAdapter(frozen_modules="("), "frozen_modules"),
        (lambda: NoAdapter(trainable_modules=("(a*)*b",)), "trainable_modules"),
        (lambda: AdamWConfig(lr_pattern={"(": 1e-4}), "lr_pattern"),
        (lambda: SGDConfig(lr_pattern={"norms": 0.0}), "lr_pattern"),
    ):
        with pytest.raises(FieldError) as error:
            make()
        assert error.value.field == key


RATES = {"embed_tokens": 0.5, r"layers\.0\..*": 0.25, "norms": 0.125}


@pytest.mark.parametrize("config", [AdamWConfig, SGDConfig, AdamW8bitConfig, MuonConfig])
def test_lr_pattern_sets_the_rate_of_modules(config: type[OptimizerConfig], folder: Path) -> None:
    """The first match wins; the first group has the learning rate that is logged."""
    model, optimizer = load_model(folder), config(lr=1.0, lr_pattern=RATES)
    trained = [*optimizer.apply_lr_pattern(NoAdapter().param_groups(model), model)]
    inner = (p for layer in model.layers for p in layer.parameters())
    groups = optimizer.build(trained, inner).param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = 0.25 if name.startswith("layers.0.") else 0.125 if "norm" in name else 1.0
        assert rates.pop(id(parameter)) == (0.5 if name == "embed.weight" else expected), name
    assert not rates and groups[0]["lr"] in (1.0, 0.25)


def test_lr_pattern_of_adapters_multiplies_with_loraplus(folder: Path) -> None:
    adapter = LoRAConfig(2, loraplus_lr_ratio=4.0, modules_to_save="norms")
    model, optimizer = load_model(folder, adapter), AdamWConfig(lr=1.0, lr_pattern={"q_proj": 0.5, "norms": 0.25})
    groups = optimizer.build(optimizer.apply_lr_pattern(adapter.param_groups(model), model)).param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factor = 4.0 if "lora_B" in name else 1.0
            assert rates[id(parameter)] == factor * (0.25 if "norm" in name else 0.5 if "q_proj" in name else 1.0)


def test_lr_pattern_of_a_frozen_module_is_an_error(folder: Path) -> None:
    adapter, optimizer = NoAdapter(frozen_modules="norms"), AdamWConfig(lr_pattern={"norms": 1e-4})
    model = load_model(folder, adapter)
    with pytest.raises(UserError, match=r"^optimizer\.lr_pattern: no trained module matches 'norms'"):
        list(optimizer.apply_lr_pattern(adapter.param_groups(model), model))
