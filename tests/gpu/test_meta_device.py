"""Training steps with the meta device as the GPU: no mixture of devices, and the host never waits."""

from dataclasses import replace
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
import torch

from tests.gpu.device_rules import HostWaitError, MixedDevicesError, device_rules
from tests.gpu.meta_steps import (
    build_model,
    build_optimizer,
    distill_step,
    make_batches,
    preference_step,
    read_spec,
    representative_spec,
    reward_step,
    run_on_meta,
    sft_step,
)
from tests.helpers.random_checkpoints import SHAPES
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.data.dataloader.batch import IGNORE, empty_batch
from tunekit.data.document import DocFlags
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.losses.dpo import (
    AOT,
    DPO,
    IPO,
    AOTUnpaired,
    APODown,
    APOZero,
    BCOPair,
    DiscoPOP,
    EXOPair,
    Hinge,
    NCAPair,
    Robust,
    Sigmoid,
    SigmoidNorm,
    SPPOHard,
)
from tunekit.losses.kl_divergence import ForwardKL, JensenShannon, ReverseKL, SkewedKL, SkewedReverseKL, SymmetricKL
from tunekit.losses.preference_base import PreferenceLoss
from tunekit.losses.reference_free import CPO, ORPO, AlphaPO, SFTTerm, SimPO
from tunekit.losses.reward import (
    BinaryCrossEntropy,
    BradleyTerry,
    Classification,
    ProcessReward,
    Regression,
    RewardLoss,
)
from tunekit.losses.unpaired import BCO, KTO, APOZeroUnpaired
from tunekit.memory.config import MemoryConfig
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig, MuonConfig, SGDConfig
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization
from tunekit.recipes import distill, preference, reward, sft

PAIRED = (DPO, Sigmoid, SigmoidNorm, Hinge, IPO, Robust, EXOPair, NCAPair, BCOPair, SPPOHard, AOT, AOTUnpaired,
          APOZero, APODown, DiscoPOP, SFTTerm, CPO, SimPO, AlphaPO, ORPO)  # fmt: skip
UNPAIRED = KTO, BCO, APOZeroUnpaired
REWARD = (
    BradleyTerry(center_rewards_coefficient=0.1),
    Classification(),
    Regression(),
    BinaryCrossEntropy(),
    ProcessReward(),
)
DISTILLATION = ForwardKL(), ReverseKL(kd_ratio=0.8), SymmetricKL(), SkewedKL(), SkewedReverseKL(), JensenShannon()

# Every pair of an adapter and a format, and of either and a way to save memory, is near one of these.
CHOICES: dict[str, tuple[NoAdapter | LoRAConfig, NoQuantization, MemoryConfig, Any]] = {
    "full": (NoAdapter(), NoQuantization(), MemoryConfig(optimizer_in_bwd=True), SGDConfig()),
    "full, recomputed": (NoAdapter(), NoQuantization(), MemoryConfig(activation_checkpointing="full"), SGDConfig()),
    "lora": (
        LoRAConfig(4, dropout=0.1),
        NoQuantization(),
        MemoryConfig(activation_checkpointing="selective"),
        MuonConfig(),
    ),
    "lora of all, nf4": (
        LoRAConfig(4, target_modules=("all-linear", "embed", "head"), loraplus_lr_ratio=4.0),
        NF4Config(True),
        MemoryConfig(),
        AdamWConfig(),
    ),
    "lora with norms, fp4": (
        LoRAConfig(4, modules_to_save=("norms",), bias="all"),
        FP4Config(),
        MemoryConfig(activation_checkpointing="full"),
        SGDConfig(),
    ),
    "pissa, nf4": (
        LoRAConfig(4, init="pissa"),
        NF4Config(),
        MemoryConfig(activation_checkpointing="selective"),
        SGDConfig(),
    ),
    "dora": (DoRAConfig(4), NoQuantization(), MemoryConfig(activation_checkpointing="full"), AdamW8bitConfig()),
    "dora, float8": (DoRAConfig(4, dropout=0.1), Float8Config(), MemoryConfig(), SGDConfig()),
}


def read_choices(recipe: ModuleType, key: str) -> set[type]:
    """The classes that a key of a recipe's config accepts."""
    pending, choices = [get_type_hints(recipe.CONFIG)[key]], set()
    while pending:
        hint = pending.pop()
        pending.extend(get_args(hint))
        choices |= {hint} if isinstance(hint, type) and not get_args(hint) else set()
    return choices


@pytest.mark.parametrize("recipe", [sft, preference, reward, distill])
def test_every_choice_of_the_recipes_has_a_step(recipe: ModuleType) -> None:
    """Losses, adapters, quantization formats and optimizers: a new one needs a step here."""
    tested = {CrossEntropy, *PAIRED, *UNPAIRED, *map(type, (*REWARD, *DISTILLATION))}
    tested.update(type(choice) for choices in CHOICES.values() for choice in choices)
    keys = ("loss", "adapter", "quantization", "optimizer")
    assert {choice for key in keys for choice in read_choices(recipe, key)} <= tested


def test_rules_catch_what_a_gpu_refuses_or_waits_for() -> None:
    """One example of each rule."""
    x = torch.ones(3, device="meta")
    with device_rules() as rules:
        for wait in (x.sum().item, x.tolist, x.cpu, x.nonzero, lambda: x[x > 0], lambda: bool(x.any())):
            with pytest.raises(HostWaitError):
                wait()
        with pytest.raises(MixedDevicesError):
            x + torch.ones(3)
        assert not rules.blocking_copies
        torch.ones(3).to("meta", non_blocking=True)
        assert not rules.blocking_copies
        torch.ones(3).to("meta")
        torch.tensor([1, 2], device="meta")
        x.copy_(torch.ones(3))
        assert rules.blocking_copies.total() == 3


@pytest.mark.parametrize("loss", [*PAIRED, *UNPAIRED])
def test_preference_losses(loss: type[PreferenceLoss]) -> None:
    run, adapter, packed = run_on_meta(), LoRAConfig(4), loss not in (DPO, ORPO, KTO)
    model = build_model(read_spec("llama3.2", layers=1), adapter=adapter)
    batches = make_batches(packed, model.spec.vocab, DocFlags.DESIRABLE, crossed=40 if loss in UNPAIRED else 0)
    train_optimizer = build_optimizer(model, adapter, run)
    with device_rules() as rules:
        result = preference_step(model, (loss(),), batches[:1] if packed else batches, train_optimizer, run)
    assert result.loss.is_meta and not rules.blocking_copies


@pytest.mark.parametrize(
    ("terms", "packed"), [((KTO(),), False), ((ORPO(),), True), ((KTO(), ORPO()), False), ((KTO(), ORPO()), True)]
)
def test_mismatched_answers_and_prompts(terms: tuple[PreferenceLoss, ...], packed: bool) -> None:
    """The host knows the number of target tokens of mismatched answers and of prompts; also on a rank without rows."""
    run, adapter, crossed = run_on_meta(), LoRAConfig(4), 40 if terms[0].needs_mismatched else 0
    model = build_model(read_spec("llama3.2", layers=1), adapter=adapter)
    batches = make_batches(packed, model.spec.vocab, DocFlags.DESIRABLE, crossed)
    for batch in batches:
        assert (
            batch.documents.num_targets_with_prompts
            == int((batch.targets_with_prompts != IGNORE).sum())
            > batch.num_target_tokens
        )
        if batch.documents.mismatched is not None:
            assert (
                batch.documents.mismatched.num_target_tokens
                == int((batch.documents.mismatched.targets != IGNORE).sum())
                > 0
            )
    train_optimizer = build_optimizer(model, adapter, run)
    with device_rules() as rules:
        preference_step(model, terms, batches, train_optimizer, run)
        preference_step(model, terms, [batches[0], empty_batch(batches[1])], train_optimizer, run)
    assert not rules.blocking_copies


@pytest.mark.parametrize("loss", REWARD, ids=str)
def test_reward_losses(loss: RewardLoss) -> None:
    run, score = run_on_meta(), loss.score_head(0)
    model = build_model(read_spec("llama3.2", score, layers=1))
    batches = make_batches(
        True, model.spec.vocab, DocFlags.STEPWISE if isinstance(loss, ProcessReward) else DocFlags.DESIRABLE
    )
    train_optimizer = build_optimizer(model, NoAdapter(), run)
    with device_rules() as rules:
        result = reward_step(model, loss, batches[:1], train_optimizer, run)
    assert result.loss.is_meta and not rules.blocking_copies


@pytest.mark.parametrize("top", [None, 5])
@pytest.mark.parametrize("loss", DISTILLATION, ids=str)
def test_distillation_losses(loss: Any, top: int | None) -> None:
    run = run_on_meta()
    model = build_model(read_spec("llama3.2", layers=1))
    batches, train_optimizer = make_batches(top is None, model.spec.vocab), build_optimizer(model, NoAdapter(), run)
    with device_rules() as rules:
        result = distill_step(model, loss, batches[:1], train_optimizer, run, top)
    assert result.loss.is_meta and not rules.blocking_copies


def family_cases() -> list[tuple[str, bool]]:
    """Every shape, and every family with packed and with padded rows."""
    families: dict[str, list[str]] = {}
    for name, shape in SHAPES.items():
        families.setdefault(shape["model_type"], []).append(name)
    return [(names[i % len(names)], i % 2 == 0) for names in families.values() for i in range(max(len(names), 2))]


@pytest.mark.parametrize(("name", "packed"), family_cases())
def test_families(name: str, packed: bool) -> None:
    run, model = run_on_meta(), build_model(representative_spec(name))
    train_optimizer = build_optimizer(model, NoAdapter(), run)
    with device_rules() as rules:
        sft_step(model, CrossEntropy(), make_batches(packed, model.spec.vocab)[:1], train_optimizer, run)
    assert not rules.blocking_copies


@pytest.mark.parametrize("choice", CHOICES)
def test_adapters_formats_and_memory(choice: str) -> None:
    adapter, weights, memory, optimizer = CHOICES[choice]
    run = run_on_meta()
    spec = replace(read_spec("llama-biases", layers=1), dim=64)
    model = build_model(spec, weights, adapter, memory)
    train_optimizer = build_optimizer(model, adapter, run, memory, optimizer)
    loss = CrossEntropy(label_smoothing=0.1, z_loss=1e-4)
    with device_rules() as rules:
        sft_step(model, loss, make_batches(True, model.spec.vocab)[:1], train_optimizer, run)
    assert not rules.blocking_copies
