"""Policy gradient losses of sampled answers, with the names and meanings of TRL: GRPO and its variants, RLOO, and
REINFORCE++.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tunekit.errors import check_range
from tunekit.losses.advantages import group_advantages, leave_one_out_advantages, rewards_to_go, whiten

TokenValues = dict[str, Tensor]  # values (n,) of the tokens of a micro-batch, by the name of their metric
# What has the same weight: the tokens of an optimizer step or of a generation, sequences, or tokens of sequences whose
# length counts as the maximum
Reduction = Literal["step", "generation", "sequence", "max_length"]


@dataclass(frozen=True)
class PolicyTokens:
    """The n sampled tokens of a micro-batch of D documents. Tensors are (n,) fp32 unless stated otherwise."""

    logps: Tensor  # log-probabilities under the model in training, with gradients
    entropies: Tensor  # of the predictions, in nats; no gradient
    sampling_logps: Tensor  # log-probabilities that the generation engine reported; NaN if it did not
    old_logps: Tensor  # log-probabilities under the weights that sampled the tokens
    ref_logps: Tensor  # log-probabilities under the reference model
    advantages: Tensor
    doc_ids: Tensor  # int64, document of each token
    num_docs: int
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums  # sums (D,) over the ranks that share documents

    def sum_per_document(self, values: Tensor) -> Tensor:
        """Sums (D,) of values (n,) over the tokens of each document."""
        return self.reduce(values.new_zeros(self.num_docs).index_add(0, self.doc_ids, values))

    def mean_per_document(self, values: Tensor) -> Tensor:
        """Means (D,) of values (n,) over the tokens of each document."""
        return self.sum_per_document(values) / self.sum_per_document(torch.ones_like(values)).clamp(min=1)


class StepCounts(NamedTuple):
    """Denominators of the loss of an optimizer step, over all ranks and micro-batches."""

    num_sequences: int
    num_tokens: int  # trained tokens of this step
    mean_num_tokens: float  # trained tokens per step of the generation that this step belongs to
    max_completion_length: int


class RewardSignals(NamedTuple):
    """Rewards of N answers of at most T tokens; answers to one prompt are adjacent."""

    rewards: Tensor  # (N,); NaN: no reward function applies to the answer
    num_generations: int
    loss_mask: Tensor  # (N, T) bool
    kl: Tensor | None = None  # (N, T), log π_old/π_ref of each token, if the loss subtracts it from the rewards
    values: Tensor | None = None  # (N, T), of the value head before each token, if the loss trains one


@dataclass(frozen=True)
class Advantages:
    """Advantages (N, T) or (N, 1), and the standard deviations (N,) of the rewards that they were scaled by."""

    values: Tensor
    reward_std: Tensor
    returns: Tensor = torch.empty(0)  # (N, T), which the value head learns, if there is one


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss(ABC):
    """A loss of each sampled token, from its probability ratio to the model that sampled it and from its advantage.

    The loss of a step is the sum over tokens, weighted by `document_weights`.
    """

    is_sequence_level: ClassVar[bool] = False  # whether all tokens of an answer have the same ratio
    reduction: ClassVar[Reduction] = "step"
    kl_key: ClassVar[str] = "beta"  # field with the coefficient of the KL divergence
    beta: float = 0.0  # Coefficient of the KL divergence from the reference; 0: no reference model
    mask_truncated_completions: bool = False  # Do not train answers without a stop token
    # Train only this fraction of the tokens of a step, those with the highest entropy (arXiv:2506.01939), such as 0.2
    top_entropy_quantile: float = 1.0
    # Multiply the loss by the probability ratio of the trainer to the generation engine (truncated importance
    # sampling), if the two compute different probabilities
    importance_sampling_correction: bool = False
    # `token` ratios or their product over the `sequence`; ratios out of bounds are clamped (`truncate`) or set to 0
    # (`mask`)
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "sequence_mask"
    )
    importance_sampling_clip_max: float | None = 3.0  # Upper bound of the ratio of the correction
    importance_sampling_clip_min: float | None = None  # Lower bound of the ratio of the correction

    def __post_init__(self) -> None:
        check_range(self, "beta", ge=0)
        check_range(self, "top_entropy_quantile", gt=0, le=1)

    @property
    def needs_reference(self) -> bool:
        return self.beta != 0

    @property
    def needs_reward_kl(self) -> bool:
        """Whether the KL divergence is subtracted from the rewards instead of being added to the loss."""
        return False

    @property
    def needs_groups(self) -> bool:
        """Whether an answer is compared with the other answers to its prompt."""
        return True

    @abstractmethod
    def advantages(self, signals: RewardSignals) -> Advantages:
        """Advantages of the answers of a generation, before NaN is replaced by 0."""

    def document_weights(self, num_tokens: Tensor, step: StepCounts) -> Tensor:
        """Weight (N,) of the tokens of each sequence of a step, of which `num_tokens` (N,) are trained."""
        if self.reduction == "sequence":
            return 1 / (num_tokens.clamp(min=1) * step.num_sequences)
        divisors = {
            "step": max(step.num_tokens, 1),
            "generation": max(step.mean_num_tokens, 1),
            "max_length": step.num_sequences * step.max_completion_length,
        }
        return torch.full_like(num_tokens, 1 / divisors[self.reduction])

    @abstractmethod
    def policy_loss(self, ratios: Tensor, tokens: PolicyTokens) -> Tensor:
        """Loss (n,) of each token, from its probability ratio."""

    def clip_metrics(self, ratios: Tensor, tokens: PolicyTokens) -> TokenValues:
        """Whether each token has no gradient because of its ratio."""
        return {}

    def log_ratios(self, tokens: PolicyTokens) -> Tensor:
        """log π/π_old of each token, (n,)."""
        return tokens.logps - tokens.old_logps

    def __call__(self, tokens: PolicyTokens, min_entropy: Tensor | None = None) -> tuple[Tensor, TokenValues]:
        """Loss of each token, (n,), and metrics of each token. Tokens below `min_entropy` have no policy loss."""
        ratios = self.log_ratios(tokens).exp()
        losses = self.policy_loss(ratios, tokens)
        if min_entropy is not None:
            losses = losses * (tokens.entropies >= min_entropy)
        if self.importance_sampling_correction:
            losses = losses * self.correction(tokens)
        metrics = {"entropy": tokens.entropies, **self.clip_metrics(ratios.detach(), tokens)}
        log_ratios = (tokens.logps - tokens.old_logps).detach()
        metrics["approx_kl"] = log_ratios.expm1() - log_ratios
        metrics["sampling/logprob_diff"] = (tokens.old_logps - tokens.sampling_logps).abs().nan_to_num(0)
        if self.needs_reference:
            kl = self.kl_divergence(ratios, tokens)
            metrics["kl"] = kl.detach()
            losses = losses if self.needs_reward_kl else losses + self.beta * kl
        return losses, metrics

    def kl_divergence(self, ratios: Tensor, tokens: PolicyTokens) -> Tensor:
        """Estimate (n,) of the KL divergence from the reference, which is never negative (k3)."""
        difference = tokens.ref_logps - tokens.logps
        return difference.exp() - difference - 1

    def correction(self, tokens: PolicyTokens) -> Tensor:
        """Importance weights (n,) of the trainer against the generation engine; 1 where the engine reports NaN."""
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        differences = (tokens.old_logps - tokens.sampling_logps).nan_to_num(0)
        if self.importance_sampling_mode.startswith("sequence"):
            differences = tokens.sum_per_document(differences)[tokens.doc_ids]
        ratios = differences.exp()
        if self.importance_sampling_mode.endswith("truncate"):
            return ratios if low is high is None else ratios.clamp(low, high)
        is_valid = (ratios >= (low or 0.0)) & (ratios <= (float("inf") if high is None else high))
        return ratios * is_valid


@dataclass(frozen=True, kw_only=True)
class GroupRelativeLoss(PolicyGradientLoss):
    """Losses whose advantage is the reward minus the mean reward of the answers to the same prompt."""

    reduction: ClassVar[Reduction] = "generation"
    # Divide advantages by the standard deviation of the rewards of the `group`, or of all answers (`batch`). As in TRL,
    # true is `group` and false is `none`
    scale_rewards: Literal["group", "batch", "none"] | bool = "group"
    importance_sampling_level: Literal["token", "sequence"] = "token"  # `sequence`: one ratio per answer (GSPO)
    use_bias_correction_kl: bool = True  # Multiply the KL divergence by the probability ratio (arXiv:2512.02556)

    @property
    def is_sequence_level(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.importance_sampling_level == "sequence"

    def advantages(self, signals: RewardSignals) -> Advantages:
        scale = self.scale_rewards
        scale = scale if isinstance(scale, str) else "group" if scale else "none"
        values, std = group_advantages(signals.rewards, signals.num_generations, scale)
        return Advantages(values[:, None], std)

    def log_ratios(self, tokens: PolicyTokens) -> Tensor:
        ratios = super().log_ratios(tokens)
        return tokens.mean_per_document(ratios)[tokens.doc_ids] if self.is_sequence_level else ratios

    def kl_divergence(self, ratios: Tensor, tokens: PolicyTokens) -> Tensor:
        kl = super().kl_divergence(ratios, tokens)
        return kl * ratios if self.use_bias_correction_kl else kl


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyGradientLoss):
    """The clipped objective of PPO: tokens whose ratio is out of bounds have no gradient."""

    epsilon: float = 0.2  # Ratios are clipped at 1 - epsilon
    epsilon_high: float | None = None  # Ratios are clipped at 1 + epsilon_high; null: epsilon
    delta: float | None = None  # Upper bound of the ratio of tokens with a negative advantage; null: no bound

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "epsilon", "epsilon_high", ge=0)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def policy_loss(self, ratios: Tensor, tokens: PolicyTokens) -> Tensor:
        clipped = ratios.clamp(*self.bounds)
        limited = ratios if self.delta is None else ratios.clamp(max=self.delta)
        return -torch.minimum(limited * tokens.advantages, clipped * tokens.advantages)

    def clip_metrics(self, ratios: Tensor, tokens: PolicyTokens) -> TokenValues:
        ratios = ratios if self.delta is None else ratios.clamp(max=self.delta)
        low = ((ratios < self.bounds[0]) & (tokens.advantages < 0)).float()
        high = ((ratios > self.bounds[1]) & (tokens.advantages > 0)).float()
        return {"clip_ratio/low": low, "clip_ratio/high": high}


@dataclass(frozen=True, kw_only=True)
class DAPO(ClippedLoss, GroupRelativeLoss):
    """Token-level loss of DAPO (arXiv:2503.14476): every token has the same weight. TRL's default."""

    kind: ClassVar[str] = "dapo"


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedLoss, GroupRelativeLoss):
    """GRPO (arXiv:2402.03300): the mean over answers of the mean over their tokens, which favors short answers."""

    kind: ClassVar[str] = "grpo"
    reduction: ClassVar[Reduction] = "sequence"


@dataclass(frozen=True, kw_only=True)
class BNPO(ClippedLoss, GroupRelativeLoss):
    """The mean over the tokens of the optimizer step."""

    kind: ClassVar[str] = "bnpo"
    reduction: ClassVar[Reduction] = "step"


@dataclass(frozen=True, kw_only=True)
class DrGRPO(ClippedLoss, GroupRelativeLoss):
    """Dr. GRPO (arXiv:2503.20783): tokens are divided by a constant length. The paper sets scale_rewards=none."""

    kind: ClassVar[str] = "dr_grpo"
    reduction: ClassVar[Reduction] = "max_length"


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GSPO (arXiv:2507.18071): GRPO with one ratio per answer, the geometric mean over its tokens."""

    kind: ClassVar[str] = "gspo"
    importance_sampling_level: Literal["token", "sequence"] = "sequence"
    epsilon: float = 3e-4  # Ratios are clipped at 1 - epsilon
    epsilon_high: float | None = 4e-4  # Ratios are clipped at 1 + epsilon_high; null: epsilon


@dataclass(frozen=True, kw_only=True)
class CISPO(GroupRelativeLoss):
    """CISPO (arXiv:2506.13585): the ratio is a clipped weight, so that all tokens keep their gradients."""

    kind: ClassVar[str] = "cispo"
    epsilon_high: float = 5.0  # Upper bound of the ratio (not 1 + epsilon_high)

    def policy_loss(self, ratios: Tensor, tokens: PolicyTokens) -> Tensor:
        return -ratios.clamp(max=self.epsilon_high).detach() * tokens.advantages * tokens.logps

    def clip_metrics(self, ratios: Tensor, tokens: PolicyTokens) -> TokenValues:
        return {"cispo_clip_ratio": ((ratios > self.epsilon_high) & (tokens.advantages > 0)).float()}


@dataclass(frozen=True, kw_only=True)
class SAPO(GroupRelativeLoss):
    """SAPO (arXiv:2511.20347): a sigmoid of the ratio lowers the gradients of distant tokens gradually."""

    kind: ClassVar[str] = "sapo"
    reduction: ClassVar[Reduction] = "sequence"
    sapo_temperature_pos: float = 1.0  # Steepness for positive advantages
    sapo_temperature_neg: float = 1.05  # Steepness for other advantages

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "sapo_temperature_pos", "sapo_temperature_neg", gt=0)

    def policy_loss(self, ratios: Tensor, tokens: PolicyTokens) -> Tensor:
        is_positive = tokens.advantages > 0
        steepness = torch.where(is_positive, self.sapo_temperature_pos, self.sapo_temperature_neg)
        return -4 / steepness * torch.sigmoid(steepness * (ratios - 1)) * tokens.advantages


@dataclass(frozen=True, kw_only=True)
class RewardKLLoss(ClippedLoss):
    """Losses that subtract the KL divergence from the rewards."""

    @property
    def needs_reward_kl(self) -> bool:
        return self.beta != 0


@dataclass(frozen=True, kw_only=True)
class RLOO(RewardKLLoss):
    """RLOO (arXiv:2402.14740): the baseline of an answer is the mean reward of the others; one ratio per answer."""

    kind: ClassVar[str] = "rloo"
    reduction: ClassVar[Reduction] = "sequence"
    is_sequence_level: ClassVar[bool] = True
    beta: float = 0.05  # Coefficient of the KL divergence of an answer, subtracted from its reward; 0: no reference
    normalize_advantages: bool = False  # Scale the advantages of a step to mean 0 and standard deviation 1

    def advantages(self, signals: RewardSignals) -> Advantages:
        rewards = signals.rewards
        if signals.kl is not None:
            rewards = rewards - self.beta * (signals.kl * signals.loss_mask).sum(1)
        values, std = leave_one_out_advantages(rewards, signals.num_generations)
        return Advantages((whiten(values) if self.normalize_advantages else values)[:, None], std)

    def log_ratios(self, tokens: PolicyTokens) -> Tensor:
        return tokens.sum_per_document(tokens.logps - tokens.old_logps)[tokens.doc_ids]


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(RewardKLLoss):
    """REINFORCE++ (arXiv:2501.03262): rewards minus the KL divergence of the tokens that follow, whitened."""

    kind: ClassVar[str] = "reinforce_pp"
    beta: float = 0.01  # Coefficient of the KL divergence of a token, subtracted from its reward; 0: no reference
    use_baseline: bool = False  # Subtract the mean reward of the answers to the same prompt first

    @property
    def needs_groups(self) -> bool:
        return self.use_baseline

    def advantages(self, signals: RewardSignals) -> Advantages:
        centered, std = group_advantages(signals.rewards, signals.num_generations, "none")
        rewards = centered if self.use_baseline else signals.rewards
        kl = torch.zeros(signals.loss_mask.shape) if signals.kl is None else signals.kl
        returns = rewards_to_go(rewards, self.beta * kl * signals.loss_mask)
        return Advantages(whiten(returns.masked_fill(~signals.loss_mask, torch.nan)), std)


PolicyLoss = DAPO | GRPO | BNPO | DrGRPO | GSPO | CISPO | SAPO | RLOO | ReinforcePP
