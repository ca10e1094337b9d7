"""PPO on sampled answers: samples with values, the objective of a model with a value head, and mini-batches."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tunekit.losses.policy_gradient import Advantages, PolicyTokens, RewardSignals
from tunekit.losses.ppo import PPO, PPOTokens, explained_variance
from tunekit.models.decoder import Decoder, Head
from tunekit.models.weight_init import named_generator
from tunekit.policy.objective import PolicyObjective
from tunekit.policy.rollout_buffer import RolloutBuffer
from tunekit.policy.samples import PolicySamples


@dataclass(frozen=True)
class PPOSamples(PolicySamples):
    """Samples with values before the first update and with returns, (N, T) fp32; 0 for tokens that are not trained."""

    values: Tensor
    returns: Tensor


@dataclass(frozen=True)
class PPOObjective(PolicyObjective):
    """The PPO loss of a model with a value head. The values of a reference without one are left out."""

    num_outputs: ClassVar[int] = 3

    def read_tokens(self, model: Decoder, hidden: Tensor, targets: Tensor, head: Head, rows: Tensor) -> list[Tensor]:
        """Log-probabilities of targets, entropies, and the value before each target, (n,) each."""
        outputs = super().read_tokens(model, hidden, targets, head, rows)
        if model.value_head is None:
            return outputs
        return [*outputs, model.value_head(hidden[rows], model.tp_region)]

    def gather_tokens(
        self, model: Decoder, outputs: Tensor, samples: PolicySamples, where: tuple[Tensor, Tensor]
    ) -> PolicyTokens:
        assert isinstance(samples, PPOSamples)
        tokens = super().gather_tokens(model, outputs, samples, where)
        old_values, returns = samples.values[where], samples.returns[where]
        return PPOTokens(**vars(tokens), values=outputs[2], old_values=old_values, returns=returns)


class PPOBuffer(RolloutBuffer):
    """The samples of a generation with their values. Each epoch splits them into other mini-batches."""

    samples_class: ClassVar[type[PolicySamples]] = PPOSamples

    def rows(self, position: int) -> Tensor:
        """Indices of the samples of a mini-batch. Each epoch has its own order of prompts."""
        cfg = self.cfg
        epoch = position // cfg.steps_per_generation
        generator = named_generator(cfg.seed, f"mini-batches {self.generation} {epoch}")
        prompts = torch.randperm(cfg.num_prompts, generator=generator)
        order = prompts[:, None] * cfg.num_generations + torch.arange(cfg.num_generations)
        return order.flatten()[super().rows(position)]


def objective_metrics(
    loss: PPO, signals: RewardSignals, estimates: Advantages, scores: Tensor, logps: Tensor
) -> dict[str, float]:
    """Means over answers of sums over their tokens, and the explained variance of the values."""
    assert signals.kl is not None and signals.values is not None
    kl = (loss.estimate_kl(signals.kl) * signals.loss_mask).sum(1).mean()
    score = scores.nanmean()
    return {
        "objective/kl": float(kl),
        "objective/entropy": float(-logps.sum(1).mean()),
        "objective/non_score_reward": float(-loss.kl_coef * kl),
        "objective/rlhf_reward": float(score - loss.kl_coef * kl),
        "objective/scores": float(score),
        "val/explained_variance": explained_variance(signals.values, estimates.returns, signals.loss_mask),
    }
