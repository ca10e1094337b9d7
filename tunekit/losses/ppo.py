"""PPO (arXiv:1707.06347) with a value head, with the names and meanings of TRL's PPOConfig.

The advantage of a token is its generalized advantage estimate (arXiv:1506.02438), whitened over all tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tunekit.errors import check_range
from tunekit.losses.policy_gradient import (
    Advantages,
    PolicyGradientLoss,
    PolicyTokens,
    RewardSignals,
    TokenValues,
)

WHITEN_EPSILON = 1e-8  # added to variances, as in TRL


@dataclass(frozen=True, kw_only=True)
class PPOTokens(PolicyTokens):
    """Sampled tokens with values: estimates, before each token, of the rewards of this token and of those after it."""

    values: Tensor  # of the model in training, with gradients
    old_values: Tensor  # under the weights that sampled the tokens
    returns: Tensor


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradientLoss):
    """PPO (arXiv:1707.06347): clipped ratios, and a clipped squared error of the value head.

    The reward of an answer is that of its last token. The KL divergence is subtracted from the reward of each token.
    """

    kind: ClassVar[str] = "ppo"
    kl_key: ClassVar[str] = "kl_coef"
    beta: ClassVar[float] = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]  # the rewards have kl_coef
    cliprange: float = 0.2  # Probability ratios are clipped at 1 - cliprange and 1 + cliprange
    cliprange_value: float = 0.2  # Values are clipped at this distance from those at the time of sampling
    vf_coef: float = 0.1  # Coefficient of the loss of the value head
    gamma: float = 1.0  # Discount factor per token
    lam: float = 0.95  # Decay of generalized advantage estimation; 1: returns minus values
    kl_coef: float = 0.05  # Coefficient of the KL divergence, subtracted from rewards; 0: no reference model
    kl_estimator: Literal["k1", "k3"] = "k1"  # `k1`: log ratio, unbiased; `k3`: never negative, less variance
    whiten_rewards: bool = False  # Scale the rewards of all tokens to standard deviation 1
    missing_eos_penalty: float | None = None  # Subtracted from the reward of answers without a stop token

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "cliprange", "cliprange_value", "vf_coef", "kl_coef", ge=0)
        check_range(self, "gamma", "lam", ge=0, le=1)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0

    @property
    def needs_reward_kl(self) -> bool:
        return self.needs_reference

    @property
    def needs_groups(self) -> bool:
        return False

    def advantages(self, signals: RewardSignals) -> Advantages:
        """Whitened advantages and the returns of all tokens, (N, T)."""
        assert signals.values is not None
        mask, rewards = signals.loss_mask, self.token_rewards(signals)
        if self.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        advantages = gae(rewards, signals.values, mask, self.gamma, self.lam)
        returns = (advantages + signals.values) * mask
        return Advantages(masked_whiten(advantages, mask), torch.zeros_like(signals.rewards), returns)

    def token_rewards(self, signals: RewardSignals) -> Tensor:
        """Rewards (N, T): the cost of the KL divergence of each token, and the reward of the answer at its last one."""
        mask = signals.loss_mask
        is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
        rewards = torch.where(is_last, signals.rewards[:, None], 0)
        return rewards if signals.kl is None else rewards - self.kl_coef * self.estimate_kl(signals.kl) * mask

    def estimate_kl(self, log_ratios: Tensor) -> Tensor:
        """Estimate of the KL divergence from log π_old/π_ref."""
        return log_ratios if self.kl_estimator == "k1" else (-log_ratios).expm1() + log_ratios

    def policy_loss(self, ratios: Tensor, tokens: PolicyTokens) -> Tensor:
        clipped = ratios.clamp(1 - self.cliprange, 1 + self.cliprange)
        return -torch.minimum(ratios * tokens.advantages, clipped * tokens.advantages)

    def value_losses(self, tokens: PPOTokens) -> tuple[Tensor, Tensor]:
        """Squared errors (n,) of values, and of values that are clipped around those at the time of sampling."""
        limit = self.cliprange_value
        clipped = tokens.old_values + (tokens.values - tokens.old_values).clamp(-limit, limit)
        return (tokens.values - tokens.returns).square(), (clipped - tokens.returns).square()

    def __call__(self, tokens: PolicyTokens, min_entropy: Tensor | None = None) -> tuple[Tensor, TokenValues]:
        """Loss of each token, (n,), and metrics of each token under TRL's names."""
        assert isinstance(tokens, PPOTokens)
        policy_losses, metrics = super().__call__(tokens, min_entropy)
        errors, clipped_errors = self.value_losses(tokens)
        value_losses = 0.5 * torch.maximum(errors, clipped_errors)
        log_ratios = (tokens.logps - tokens.old_logps).detach()
        ratios = log_ratios.exp()
        unclipped = -ratios * tokens.advantages
        return policy_losses + self.vf_coef * value_losses, {
            "sampling/logprob_diff": metrics["sampling/logprob_diff"],
            "policy/approxkl_avg": 0.5 * log_ratios.square(),
            "policy/clipfrac_avg": (self.policy_loss(ratios, tokens) > unclipped).float(),
            "policy/entropy_avg": tokens.entropies,
            "loss/policy_avg": policy_losses.detach(),
            "loss/value_avg": value_losses.detach(),
            "val/clipfrac_avg": (clipped_errors > errors).float(),
            "val/ratio": ratios,
        }


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates (N, T) of the tokens in `mask`, 0 elsewhere.

    Other tokens are skipped: the state after a sampled token is the one before the next sampled token. After the last
    one, the value is 0.
    """
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        is_sampled, value = mask[:, t], values[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        advantage = torch.where(is_sampled, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(is_sampled, value, next_value)
        advantages[:, t] = advantage * is_sampled
    return advantages


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values in `mask` with standard deviation 1, and with mean 0 or, without `shift_mean`, their own; 0 elsewhere."""
    count = mask.sum().clamp(min=1)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return (whitened if shift_mean else whitened + mean) * mask


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Fraction of the variance of returns that values predict: 1 if all of it, 0 if none, less if they are worse."""
    if not mask.any():  # no answer has a reward
        return 0.0
    total = returns[mask].var(correction=0)
    residual = (returns - values)[mask].var(correction=0)
    return float((1 - residual / total).nan_to_num(0, neginf=0))
