"""Reinforcement learning from rewards of sampled answers, full or with adapters: GRPO and its variants, RLOO,
REINFORCE++.

tune run grpo nano/grpo
tune run grpo llama3_2/3b_grpo_gsm8k_lora loss=dr_grpo
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.errors import check_range
from tunekit.losses.policy_gradient import DAPO, PolicyLoss, RewardSignals
from tunekit.models.decoder import Decoder
from tunekit.policy.config import PolicyConfig, check_policy
from tunekit.policy.logprob_drift import DriftLimit
from tunekit.policy.objective import PolicyObjective, PolicyStep, open_objective
from tunekit.policy.prompt_loader import open_prompts
from tunekit.policy.rollout_buffer import RolloutBuffer
from tunekit.policy.rollout_sampler import RolloutSampler, ScoredRollouts
from tunekit.policy.samples import PolicySamples
from tunekit.training.run_context import RunContext, run_training
from tunekit.training.setup import build_optimizer, load_model
from tunekit.training.train_loop import TrainLoop


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyConfig):
    """The keys of this recipe."""

    loss: PolicyLoss = DAPO()  # Policy gradient: advantages, probability ratios, and how tokens are weighted
    # Optimizer steps, each on other answers, between two generations; above 1, the later steps are off-policy. TRL
    # counts micro-batches instead
    steps_per_generation: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    # Passes over the answers of a generation
    num_iterations: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "steps_per_generation", "num_iterations", ge=1)


CONFIG = GRPOConfig
check = check_policy  # raises UserError for everything that can be found without reading weights


def main(cfg: GRPOConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write the result to `final/` in the run directory."""
    run_training("grpo", train, cfg, overwrite)


def train(cfg: GRPOConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_prompts(cfg, checkpoint, tokenizer, run)
    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model = load_model(checkpoint, cfg, dist)
        reference = cfg.reference.open_model(cfg, checkpoint, model, dist) if cfg.loss.needs_reference else None
        objective = open_objective(cfg, train_data, model, reference, dist)
        sampler, buffer = RolloutSampler(cfg, model, train_data, dist), RolloutBuffer(cfg)
        optimizer = build_optimizer(cfg, model, dist)
        evaluate = partial(sampler.evaluate, eval_data, loop)
        # Resumes; between two steps it logs, evaluates, saves, uploads, rolls back or stops as the config says
        for step in loop.start(model, optimizer, evaluate, [DriftLimit(cfg, dist)], rollouts=buffer):
            if buffer.needs_rollouts(step.data_step):
                answers = sampler.sample(train_data.prompts(step.data_step), step.data_step)
                samples, metrics = make_samples(answers, model, objective, cfg)
                sampler.log(answers, samples, metrics, loop.logger)
                buffer.fill(step.data_step, samples, answers.metrics | metrics)
            policy_step = objective.begin_step(model, *buffer.take(step.data_step))
            step.batches = policy_step.batches
            loss, metrics = forward_backward(model, policy_step, objective)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not step.accepts(loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss, grad_norm, **buffer.metrics | metrics)


def make_samples(
    answers: ScoredRollouts, model: Decoder, objective: PolicyObjective, cfg: GRPOConfig
) -> tuple[PolicySamples, dict[str, float]]:
    """Training samples of a generation: tokens, their log-probabilities before the first step and under the reference,
    and their advantages. Also returns metrics of the generation.
    """
    loss = cfg.loss
    samples = PolicySamples.from_rollouts(answers.rollouts, loss.mask_truncated_completions)
    if cfg.steps_per_prompt > 1 or loss.needs_reward_kl:  # else the probability ratios of the only step are 1
        samples = replace(samples, old_logps=objective.score(model, samples)[0])
    if objective.reference is not None:
        samples = replace(samples, ref_logps=objective.score_reference(samples))
    kl = samples.old_logps - samples.ref_logps if loss.needs_reward_kl else None
    advantages = loss.advantages(RewardSignals(answers.rewards, cfg.num_generations, samples.loss_mask, kl))
    values = advantages.values.nan_to_num(0) * samples.loss_mask  # NaN: an answer without a reward
    is_zero = advantages.reward_std.isclose(torch.zeros(())).float()
    return replace(samples, advantages=values), {"frac_reward_zero_std": float(is_zero.mean())}


def forward_backward(model: Decoder, step: PolicyStep, objective: PolicyObjective) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the gradients of one optimizer step. Returns its loss and its other metrics, over all ranks."""
    dist = objective.dist
    for i, batch in enumerate(step.batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(step.batches))  # reduce gradients in the last micro-batch only
        loss = objective.token_loss(model, batch, step)  # those of all micro-batches and ranks add up
        (loss * dist.grad_scale).backward()  # FSDP averages gradients over ranks; this makes it a sum
    metrics = objective.metrics(step)
    return metrics.pop("loss"), metrics
