"""Schedules compared with transformers and formulas, optimizers with torch, and which parameters have weight decay."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from tests.helpers.random_checkpoints import load_model, make_checkpoint
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.errors import FieldError
from tunekit.optim.config import (
    AdamW8bitConfig,
    AdamWConfig,
    ConstantLRConfig,
    CosineLRConfig,
    LinearLRConfig,
    LRSchedulerConfig,
    MuonConfig,
    SGDConfig,
    WSDConfig,
    resolve_steps,
)


def learning_rates(schedule: LRSchedulerConfig, steps: int) -> list[float]:
    """Learning rate of each step, with a peak of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rates, scheduler = [], schedule.build(optimizer, steps)
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def transformers_rates(name: str, warmup: int, steps: int, **options: object) -> list[float]:
    """Schedule of transformers. It starts with a step at rate 0; tunekit starts with the first rate above 0."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = getattr(transformers, name)(optimizer, num_warmup_steps=warmup, **options)
    return [scheduler.lr_lambdas[0](step) for step in range(steps + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize(("schedule", "name"), [
    (CosineLRConfig, "get_cosine_schedule_with_warmup"), (LinearLRConfig, "get_linear_schedule_with_warmup"),
])  # fmt: skip
def test_schedules_match_transformers(schedule: type[LRSchedulerConfig], name: str, warmup: int) -> None:
    expected = transformers_rates(name, warmup, 50, num_training_steps=50)
    actual = learning_rates(schedule(warmup_steps=warmup), 50)
    assert actual[warmup:] == pytest.approx(expected[warmup:50], abs=1e-9)
    assert actual[:warmup] == pytest.approx(expected[1 : warmup + 1], abs=1e-9)


def test_constant_schedule_with_warmup() -> None:
    expected = transformers_rates("get_constant_schedule_with_warmup", 8, 30)
    assert learning_rates(ConstantLRConfig(warmup_steps=8), 30)[:8] == pytest.approx(expected[1:9])
    assert learning_rates(ConstantLRConfig(warmup_steps=8), 30)[8:] == [1.0] * 22
    assert learning_rates(ConstantLRConfig(), 5) == [1.0] * 5


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_wsd_schedule(floor: float) -> None:
    actual = learning_rates(WSDConfig(warmup_steps=10, decay_ratio=0.25, min_lr_ratio=floor), 50)
    assert actual[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert actual[10:41] == pytest.approx([1.0] * 31)
    assert actual[40:] == pytest.approx([1 - (1 - floor) * i / 10 for i in range(10)])


@pytest.mark.parametrize("kind", [CosineLRConfig, LinearLRConfig])
def test_schedule_ends_at_min_lr_ratio(kind: type) -> None:
    unscaled, with_floor = (
        learning_rates(kind(warmup_steps=5), 40),
        learning_rates(kind(warmup_steps=5, min_lr_ratio=0.2), 40),
    )
    assert with_floor[5:] == pytest.approx([0.2 + 0.8 * rate for rate in unscaled[5:]])
    assert kind(min_lr_ratio=0.2).factors(40)(40) == pytest.approx(0.2)
    assert kind(min_lr_ratio=0.2).factors(40)(90) == pytest.approx(0.2)


@pytest.mark.parametrize(("warmup", "steps"), [(0.1, 25), (0.03, 16), (0.5, 3), (3.0, 16), (0.0, 16)])
def test_warmup_fraction_equals_transformers(warmup: float, steps: int) -> None:
    expected = transformers.TrainingArguments(warmup_steps=warmup).get_warmup_steps(steps)
    assert resolve_steps(warmup, steps) == expected


def test_warmup_steps_below_one_are_a_fraction() -> None:
    for kind in (CosineLRConfig, LinearLRConfig, ConstantLRConfig, WSDConfig):
        assert learning_rates(kind(warmup_steps=0.1), 50) == learning_rates(kind(warmup_steps=5), 50)
    assert all(math.isfinite(rate) for rate in learning_rates(CosineLRConfig(warmup_steps=80), 50)), (
        "warmup longer than the run"
    )
    assert learning_rates(CosineLRConfig(warmup_steps=80), 50)[-1] == pytest.approx(50 / 80)


@pytest.mark.parametrize(
    "adapter",
    [NoAdapter(), LoRAConfig(2, target_modules=("all-linear", "embed", "head"), loraplus_lr_ratio=4.0), DoRAConfig(2)],
)
def test_vectors_have_no_weight_decay(adapter: NoAdapter | LoRAConfig, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama-biases"), adapter)
    for kind in (
        AdamWConfig(lr=0.5, weight_decay=0.1),
        SGDConfig(lr=0.5, weight_decay=0.1),
        AdamW8bitConfig(0.5, weight_decay=0.1),
        MuonConfig(0.5, weight_decay=0.1),
    ):
        inner = (p for layer in model.layers for p in layer.parameters())
        groups = kind.build(adapter.param_groups(model), inner).param_groups
        group_of = {id(p): group for group in groups for p in group["params"]}
        assert len(group_of) == sum(len(group["params"]) for group in groups)
        assert group_of.keys() == {id(p) for p in model.parameters() if p.requires_grad}
        for name, p in model.named_parameters():
            if p.requires_grad:
                group = group_of[id(p)]
                assert group["weight_decay"] == (0.0 if "norm" in name or "bias" in name or "magn" in name else 0.1)
                is_loraplus_b = isinstance(adapter, LoRAConfig) and adapter.loraplus_lr_ratio > 1 and "_B" in name
                assert group["lr"] == (2.0 if is_loraplus_b else 0.5), name


@pytest.mark.parametrize(("config", "make_torch_optimizer"), [
    (AdamWConfig(0.1, (0.8, 0.9), 1e-4, 0.3),
     lambda ps: torch.optim.AdamW(ps, 0.1, (0.8, 0.9), 1e-4, 0.3, foreach=False)),
    (SGDConfig(0.1, 0.7, 0.3), lambda ps: torch.optim.SGD(ps, 0.1, 0.7, weight_decay=0.3)),
])  # fmt: skip
def test_steps_match_torch(config: AdamWConfig | SGDConfig, make_torch_optimizer) -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    optimizers = config.build([([ours], 1.0)]), make_torch_optimizer([theirs])
    for step in range(5):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = (p.detach() * 3 + step).sin()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: AdamWConfig(lr=0.0), "lr"),
        (lambda: AdamWConfig(lr=float("nan")), "lr"),
        (lambda: AdamWConfig(lr=math.inf), "lr"),
        (lambda: AdamWConfig(lr_pattern={"lm_head": math.inf}), "lr_pattern"),
        (lambda: AdamW8bitConfig(weight_decay=math.inf), "weight_decay"),
        (lambda: SGDConfig(weight_decay=-0.1), "weight_decay"),
        (lambda: WSDConfig(warmup_steps=math.inf), "warmup_steps"),
        (lambda: AdamWConfig(betas=(0.9,)), "betas"),
        (lambda: AdamWConfig(betas=(0.9, 1.0)), "betas"),
        (lambda: SGDConfig(lr=-1.0), "lr"),
        (lambda: CosineLRConfig(warmup_steps=-1.0), "warmup_steps"),
        (lambda: MuonConfig(momentum=1.0), "momentum"),
        (lambda: AdamW8bitConfig(betas=(0.9,)), "betas"),
        (lambda: MuonConfig(0.0), "lr"),
        (lambda: WSDConfig(decay_ratio=0.0), "decay_ratio"),
        (lambda: WSDConfig(decay_ratio=1.5), "decay_ratio"),
        (lambda: WSDConfig(warmup_steps=-1.0), "warmup_steps"),
    ],
)
def test_invalid_values_name_their_field(make, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert caught.value.field == field
