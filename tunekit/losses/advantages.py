"""Advantages of sampled answers from their rewards, (N,) fp32 each. Answers to one prompt are adjacent.

A reward is NaN if no reward function applies to the answer: it is left out of means, and its advantage is NaN.
"""

from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-4  # added to standard deviations, as in TRL


def sum_rewards(scores: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums (N,) of scores (N, K), without those that are NaN; NaN if all of them are."""
    sums = (scores * weights).nansum(1)
    return sums.masked_fill(scores.isnan().all(1), torch.nan)


def group_advantages(
    rewards: Tensor, num_generations: int, scale: Literal["group", "batch", "none"]
) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of their group, divided by the standard deviation of the group or of all rewards.

    Also returns the standard deviations (N,), those of the group if nothing is scaled.
    """
    groups = rewards.view(-1, num_generations)
    advantages = (groups - groups.nanmean(1, keepdim=True)).flatten()
    std = nan_std(rewards[None]) if scale == "batch" else nan_std(groups)
    std = std.expand_as(groups).flatten()
    return (advantages if scale == "none" else advantages / (std + STD_EPSILON)), std


def leave_one_out_advantages(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of the other rewards of their group; and the standard deviations of the groups, (N,).

    The advantage of the only reward of a group is NaN.
    """
    groups = rewards.view(-1, num_generations)
    counts = (~groups.isnan()).sum(1, keepdim=True)
    baselines = (groups.nansum(1, keepdim=True) - groups) / (counts - 1)
    advantages = (groups - baselines).masked_fill(counts < 2, torch.nan)
    return advantages.flatten(), nan_std(groups).expand_as(groups).flatten()


def rewards_to_go(rewards: Tensor, costs: Tensor) -> Tensor:
    """Reward (N,) of each answer minus the costs (N, T) of a token and of those that follow it, (N, T)."""
    return rewards[:, None] - costs.flip(1).cumsum(1).flip(1)


def whiten(values: Tensor) -> Tensor:
    """Values with mean 0 and standard deviation 1, over all that are not NaN."""
    return (values - values.nanmean()) / (nan_std(values.flatten()[None]) + STD_EPSILON).squeeze()


def nan_std(values: Tensor) -> Tensor:
    """Sample standard deviation (N, 1) of the values of each row that are not NaN; NaN of fewer than two of them.

    Rows of a single column have a standard deviation of 0.
    """
    if values.shape[1] == 1:
        return torch.zeros_like(values)
    counts = (~values.isnan()).sum(1, keepdim=True)
    squares = (values - values.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (counts - 1).clamp(min=1)).sqrt().masked_fill(counts < 2, torch.nan)
