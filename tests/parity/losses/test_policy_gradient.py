"""Policy gradient losses, their advantages, gradients and metrics equal those of TRL."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from tests.helpers.trl_policy import COUNT, GENERATIONS, LENGTH, REWARDS, Rollouts, make_rollouts, trl_step
from tunekit.losses.advantages import sum_rewards
from tunekit.losses.policy_gradient import (
    BNPO,
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    DrGRPO,
    PolicyGradientLoss,
    PolicyTokens,
    RewardSignals,
    StepCounts,
)

GRPO_LOSSES = {"grpo": GRPO, "bnpo": BNPO, "dr_grpo": DrGRPO, "dapo": DAPO, "cispo": CISPO, "sapo": SAPO}
TIS = "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"


def tunekit_step(loss: PolicyGradientLoss, rollouts: Rollouts, clip: bool = True) -> tuple[Tensor, Tensor, dict]:
    """Loss, advantages and metrics of one step that trains all rollouts."""
    mask = rollouts.loss_mask
    if loss.mask_truncated_completions:
        mask = mask & ~rollouts.is_truncated[:, None]
    rewards = sum_rewards(rollouts.scores, REWARDS["reward_weights"])
    kl = rollouts.old_logps - rollouts.ref_logps if loss.needs_reward_kl else None
    advantages = loss.advantages(RewardSignals(rewards, GENERATIONS, mask, kl)).values.nan_to_num(0)
    names = "logps", "entropies", "sampling_logps", "old_logps", "ref_logps"
    values = [getattr(rollouts, name)[mask] for name in names]
    doc_ids = torch.arange(COUNT)[:, None].expand_as(mask)[mask]
    tokens = PolicyTokens(*values, advantages.expand_as(mask)[mask], doc_ids, COUNT)
    threshold = None
    if loss.top_entropy_quantile < 1:
        threshold = torch.quantile(tokens.entropies, 1 - loss.top_entropy_quantile)
    losses, metrics = loss(tokens, threshold)
    num_tokens = mask.sum(1).float()
    counts = StepCounts(COUNT, int(mask.sum()), float(mask.sum()), LENGTH)
    means = {name: value.mean() for name, value in metrics.items()}
    return (losses * loss.document_weights(num_tokens, counts)[doc_ids]).sum(), advantages.squeeze(1), means


def check(loss: PolicyGradientLoss, rollouts: Rollouts, trainer: tuple = (), **options: Any) -> None:
    expected, expected_advantages, expected_metrics = trl_step(rollouts, *trainer, **options)
    (gradient,) = torch.autograd.grad(expected, rollouts.logps)
    actual, advantages, metrics = tunekit_step(loss, rollouts)
    (ours,) = torch.autograd.grad(actual, rollouts.logps)
    torch.testing.assert_close(advantages, expected_advantages, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours, gradient, rtol=1e-6, atol=1e-6)
    assert gradient.abs().max() > 1e-3
    assert not ours[~rollouts.loss_mask].any(), "observations are learned"
    if not loss.is_sequence_level:
        pairs = {"low": "clip_ratio/low", "high": "clip_ratio/high"}
        named = {f"clip_ratio/{name}_mean": metrics[ours] for name, ours in pairs.items() if ours in metrics}
        for name, value in {**named, "entropy": metrics["entropy"]}.items():
            assert float(value) == pytest.approx(expected_metrics[name], abs=1e-6)


@pytest.mark.parametrize("kind", GRPO_LOSSES)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_loss_types_with_active_clipping(kind: str, scale: Any) -> None:
    options = {"epsilon_high": 1.2} if kind == "cispo" else {}
    loss = GRPO_LOSSES[kind](scale_rewards=scale, **options)
    rollouts = make_rollouts()
    check(loss, rollouts, loss_type=kind, scale_rewards=scale, **options)
    if kind in ("grpo", "dapo"):
        _, _, metrics = tunekit_step(loss, rollouts)
        assert metrics["clip_ratio/low"] > 0 and metrics["clip_ratio/high"] > 0


@pytest.mark.parametrize("scale", [True, False])
def test_scale_rewards_as_a_boolean(scale: bool) -> None:
    name = GRPOConfig(output_dir="unused", scale_rewards=scale, use_cpu=True, bf16=False).scale_rewards
    check(DAPO(scale_rewards=scale), make_rollouts(), loss_type="dapo", scale_rewards=name)


@pytest.mark.parametrize("kind", GRPO_LOSSES)
@pytest.mark.parametrize("correct_bias", [True, False])
def test_kl_penalty(kind: str, correct_bias: bool) -> None:
    options: dict[str, Any] = {"beta": 0.3, "use_bias_correction_kl": correct_bias}
    if kind == "cispo":
        options["epsilon_high"] = 1.2
    check(GRPO_LOSSES[kind](**options), make_rollouts(), loss_type=kind, **options)


@pytest.mark.parametrize("kind", GRPO_LOSSES)
def test_truncated_answers_are_masked(kind: str) -> None:
    rollouts = make_rollouts()
    assert rollouts.is_truncated.any()
    loss = GRPO_LOSSES[kind](mask_truncated_completions=True, **({"epsilon_high": 1.2} if kind == "cispo" else {}))
    options = {"epsilon_high": 1.2} if kind == "cispo" else {}
    check(loss, rollouts, loss_type=kind, mask_truncated_completions=True, **options)


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_two_sided_clipping(kind: str) -> None:
    options = {"delta": 1.4, "epsilon_high": 0.28}
    check(GRPO_LOSSES[kind](epsilon=0.1, **options), make_rollouts(0.8), loss_type=kind, epsilon_low=0.1, **options)


@pytest.mark.parametrize("kind", ["grpo", "dapo", "sapo"])
def test_top_entropy_quantile(kind: str) -> None:
    loss = GRPO_LOSSES[kind](top_entropy_quantile=0.4, beta=0.1)
    check(loss, make_rollouts(), loss_type=kind, top_entropy_quantile=0.4, beta=0.1)


@pytest.mark.parametrize("kind", ["gspo", "sapo", "dr_grpo"])
def test_sequence_level_ratios(kind: str) -> None:
    trl = {"importance_sampling_level": "sequence", "loss_type": "grpo" if kind == "gspo" else kind}
    if kind == "gspo":
        options = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
        check(GSPO(), make_rollouts(0.1), **trl, **options)
    else:
        check(GRPO_LOSSES[kind](importance_sampling_level="sequence"), make_rollouts(), **trl)


@pytest.mark.parametrize("mode", TIS)
@pytest.mark.parametrize("low", [None, 0.9])
def test_importance_sampling_correction(mode: Any, low: float | None) -> None:
    names = {"importance_sampling_correction": True, "importance_sampling_mode": mode,
             "importance_sampling_clip_max": 1.1, "importance_sampling_clip_min": low}  # fmt: skip
    rollouts = make_rollouts()
    rollouts.sampling_logps[0, 0] = torch.nan
    trl = {f"vllm_{name}": value for name, value in names.items()}
    check(DAPO(**names), rollouts, use_vllm=True, **trl)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_rloo(normalize: bool, beta: float) -> None:
    rollouts = make_rollouts(0.1)
    rollouts = rollouts._replace(tool_mask=torch.ones_like(rollouts.tool_mask))
    loss = RLOO(beta=beta, normalize_advantages=normalize)
    check(loss, rollouts, (RLOOTrainer,), beta=beta, normalize_advantages=normalize)


def test_on_policy_gradients_are_those_of_reinforce() -> None:
    """Where the ratio is 1, no token is clipped and the gradient is the advantage."""
    rollouts = make_rollouts()
    rollouts = rollouts._replace(old_logps=rollouts.logps.detach())
    for loss in (DAPO(), CISPO()):
        value, advantages, _ = tunekit_step(loss, rollouts)
        (gradient,) = torch.autograd.grad(value, rollouts.logps)
        expected = -advantages[:, None] * rollouts.loss_mask / rollouts.loss_mask.sum()
        torch.testing.assert_close(gradient, expected)


def test_micro_batches_add_up_to_the_batch() -> None:
    rollouts = make_rollouts()
    mask, half = rollouts.loss_mask, torch.arange(COUNT) < COUNT // 2
    for loss in (GRPO(beta=0.1), BNPO(), DrGRPO(), DAPO(), GSPO(), RLOO(beta=0)):
        advantages = torch.linspace(-1, 1, COUNT)[:, None].expand_as(mask)
        counts = StepCounts(COUNT, int(mask.sum()), float(mask.sum()), LENGTH)
        weights = loss.document_weights(mask.sum(1).float(), counts)

        def total(
            rows: Tensor, loss: PolicyGradientLoss = loss, advantages: Tensor = advantages, weights: Tensor = weights
        ) -> Tensor:
            selected = mask & rows[:, None]
            ids = torch.arange(COUNT)[:, None].expand_as(mask)[selected]
            names = "logps", "entropies", "sampling_logps", "old_logps", "ref_logps"
            values = [getattr(rollouts, name)[selected] for name in names]
            losses, _ = loss(PolicyTokens(*values, advantages[selected], ids, COUNT))
            return (losses * weights[ids]).sum()

        torch.testing.assert_close(total(half) + total(~half), total(half | ~half))


def test_sequence_weights_ignore_empty_answers() -> None:
    counts = StepCounts(2, 3, 3.0, 5)
    assert GRPO().document_weights(torch.tensor([3.0, 0.0]), counts).isfinite().all()
    assert replace(DrGRPO(), beta=0.1).needs_reference
