"""Advantages and losses of PPO compared with the formulas of the papers, in float64."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tunekit.losses.policy_gradient import PolicyTokens, ReinforcePP, RewardSignals
from tunekit.losses.ppo import PPO, PPOTokens, explained_variance, gae, masked_whiten

COUNT, LENGTH = 5, 9


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_mask() -> Tensor:
    """Prompts, observations between sampled tokens, padding, one answer of a single token, and one without tokens."""
    mask = torch.rand(COUNT, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 0], mask[:, 1] = False, True
    mask[3, 2:], mask[4] = False, False
    return mask


def make_signals(with_kl: bool = True) -> RewardSignals:
    mask = make_mask()
    values, kl = randn(COUNT, LENGTH, seed=2) * mask, 0.3 * randn(COUNT, LENGTH, seed=3) * mask
    return RewardSignals(randn(COUNT, seed=1), 1, mask, kl if with_kl else None, values)


def advantages_of_answer(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 of arXiv:1506.02438: the sum of (γλ)^l δ_{t+l}, where the value after the last token is 0."""
    next_values = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, next_values, strict=True)]
    count = len(deltas)
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.7, 1.0), (1.0, 0.0)])
def test_gae_of_sampled_tokens_is_the_sum_of_the_paper(gamma: float, lam: float) -> None:
    """Observations are skipped: the answer has the advantages of its sampled tokens alone."""
    mask, rewards, values = make_mask(), randn(COUNT, LENGTH, seed=1), randn(COUNT, LENGTH, seed=2)
    advantages = gae(rewards, values, mask, gamma, lam)
    for row in range(COUNT):
        sampled = mask[row]
        expected = advantages_of_answer(rewards[row][sampled].tolist(), values[row][sampled].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[row][sampled], torch.tensor(expected, dtype=torch.float64))
        assert not advantages[row][~sampled].any()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_returns_are_rewards_minus_the_divergence_of_the_tokens_that_follow(estimator: str) -> None:
    """Without discount and with lam=1, returns do not depend on values."""
    signals, loss = make_signals(), PPO(lam=1.0, kl_coef=0.2, kl_estimator=estimator)  # pyright: ignore
    returns, kl = loss.advantages(signals).returns, signals.kl
    assert returns is not None and kl is not None
    costs = kl if estimator == "k1" else torch.exp(-kl) - 1 + kl
    for row, t in make_mask().nonzero().tolist():
        rest = costs[row, t:][signals.loss_mask[row, t:]].sum()
        torch.testing.assert_close(returns[row, t], signals.rewards[row] - 0.2 * rest)


def test_values_of_zero_give_the_advantages_and_gradients_of_reinforce() -> None:
    signals = make_signals()._replace(values=torch.zeros(COUNT, LENGTH, dtype=torch.float64))
    signals = signals._replace(rewards=100 * signals.rewards)  # the constants added to standard deviations differ
    advantages = PPO(lam=1.0, kl_coef=0.5).advantages(signals).values
    expected = ReinforcePP(beta=0.5).advantages(signals).values.nan_to_num(0)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-7)
    tokens = make_tokens(advantages[signals.loss_mask], spread=0.0)
    losses, _ = PPO(vf_coef=0.0)(tokens)
    (gradient,) = torch.autograd.grad(losses.sum(), tokens.logps)
    torch.testing.assert_close(gradient, -tokens.advantages)


def test_whitened_values_have_the_moments_of_torch() -> None:
    mask, values = make_mask(), 3 + 2 * randn(COUNT, LENGTH, seed=5)
    whitened, scaled = masked_whiten(values, mask), masked_whiten(values, mask, shift_mean=False)
    expected = (values[mask] - values[mask].mean()) / values[mask].std()
    torch.testing.assert_close(whitened[mask], expected)
    torch.testing.assert_close(scaled[mask], expected + values[mask].mean())
    assert not whitened[~mask].any() and not scaled[~mask].any()
    nothing = torch.zeros_like(mask)
    assert torch.equal(masked_whiten(values, nothing), torch.zeros_like(values)), "no answer has a reward"


def test_whitened_rewards_change_advantages_as_if_given_so() -> None:
    signals, loss = make_signals(), PPO(whiten_rewards=True)
    rewards = loss.token_rewards(signals)
    assert signals.values is not None
    expected = gae(masked_whiten(rewards, signals.loss_mask, False), signals.values, signals.loss_mask, 1.0, 0.95)
    torch.testing.assert_close(loss.advantages(signals).values, masked_whiten(expected, signals.loss_mask))


def make_tokens(advantages: Tensor, spread: float = 0.5) -> PPOTokens:
    """Tokens whose log-probabilities and values have moved by `spread` since sampling."""
    n = len(advantages)
    old, values = -randn(n, seed=6).abs(), randn(n, seed=7)
    return PPOTokens(
        logps=(old + spread * randn(n, seed=8)).requires_grad_(),
        entropies=randn(n, seed=9).abs(),
        sampling_logps=old,
        old_logps=old,
        ref_logps=old,
        advantages=advantages,
        doc_ids=torch.zeros(n, dtype=torch.int64),
        num_docs=1,
        values=(values + spread * randn(n, seed=10)).requires_grad_(),
        old_values=values,
        returns=values + randn(n, seed=11),
    )


def test_losses_and_gradients_are_those_of_the_paper() -> None:
    """Equation 9 of arXiv:1707.06347 with clipped values, token by token."""
    tokens, loss = make_tokens(randn(40, seed=4)), PPO(cliprange=0.1, cliprange_value=0.3, vf_coef=0.7)
    losses, metrics = loss(tokens)
    expected, clipped_policy, clipped_values = [], 0, 0
    for i in range(40):
        ratio, advantage = (tokens.logps[i] - tokens.old_logps[i]).exp(), tokens.advantages[i]
        surrogate = torch.min(ratio * advantage, torch.clip(ratio, 0.9, 1.1) * advantage)
        old, target = tokens.old_values[i], tokens.returns[i]
        near = torch.clip(tokens.values[i], old - 0.3, old + 0.3)
        error = torch.max((tokens.values[i] - target) ** 2, (near - target) ** 2)
        expected.append(-surrogate + 0.7 * 0.5 * error)
        clipped_policy += int(surrogate < ratio * advantage)
        clipped_values += int((near - target) ** 2 > (tokens.values[i] - target) ** 2)
    torch.testing.assert_close(losses, torch.stack(expected))
    inputs = tokens.logps, tokens.values
    gradients = torch.autograd.grad(losses.sum(), inputs, retain_graph=True)
    for actual, value in zip(gradients, torch.autograd.grad(torch.stack(expected).sum(), inputs), strict=True):
        torch.testing.assert_close(actual, value)
    assert clipped_policy == metrics["policy/clipfrac_avg"].sum() > 3
    assert clipped_values == metrics["val/clipfrac_avg"].sum() > 3
    total = metrics["loss/policy_avg"] + 0.7 * metrics["loss/value_avg"]
    torch.testing.assert_close(total, losses.detach())


def test_truncated_importance_sampling_scales_the_policy_loss_only() -> None:
    tokens = make_tokens(randn(40, seed=4))
    tokens = replace(tokens, sampling_logps=tokens.old_logps - 0.2)
    losses, metrics = PPO()(tokens)
    options = {"importance_sampling_correction": True, "importance_sampling_mode": "token_truncate"}
    corrected, _ = PPO(**options)(tokens)  # pyright: ignore
    weight = torch.tensor(0.2).double().exp()
    torch.testing.assert_close(corrected - losses, (weight - 1) * metrics["loss/policy_avg"])


def test_explained_variance() -> None:
    mask, returns = make_mask(), randn(COUNT, LENGTH, seed=1)
    assert explained_variance(returns, returns, mask) == pytest.approx(1)
    assert explained_variance(torch.zeros_like(returns), returns, mask) == pytest.approx(0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones_like(returns), mask) == 0, "equal returns"
    with warnings.catch_warnings(action="error"):
        assert explained_variance(returns, returns, torch.zeros_like(mask)) == 0, "no answer has a reward"


def test_tokens_need_values() -> None:
    with pytest.raises(AssertionError):
        PPO()(PolicyTokens(*[torch.zeros(1)] * 6, torch.zeros(1, dtype=torch.int64), 1))
