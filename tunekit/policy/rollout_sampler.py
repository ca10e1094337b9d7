"""Answers to the prompts of a generation: sampled, scored and logged."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.loggers.metric_logger import MetricLogger
from tunekit.losses.advantages import nan_std, sum_rewards
from tunekit.models.decoder import Decoder
from tunekit.policy.config import PolicyConfig
from tunekit.policy.prompt_loader import PromptLoader
from tunekit.policy.samples import PolicySamples
from tunekit.rewards.base import gather_answers, reward_names
from tunekit.rewards.context import RewardContext, TrainerState, fill_columns
from tunekit.rollouts.episode_log import episode_record
from tunekit.rollouts.episodes import describe_rewrites, generate_rollouts
from tunekit.rollouts.rollout import PromptRow, Rollout
from tunekit.training.train_loop import TrainLoop


class ScoredRollouts(NamedTuple):
    """Rollouts of all ranks; answers to one prompt are adjacent. Scores are (N, K), NaN where none applies."""

    rollouts: Sequence[Rollout]
    scores: Tensor
    names: Sequence[str]  # of the K rewards
    weights: Tensor  # (K,)
    logged_metrics: Mapping[str, float]  # by reward functions of the user
    logged_columns: Sequence[Mapping[str, Any]]  # of each rollout
    start_time: float = 0.0  # when their generation began

    @property
    def rewards(self) -> Tensor:
        """Weighted sums (N,), NaN if no reward applies."""
        return sum_rewards(self.scores, self.weights)

    @property
    def is_truncated(self) -> Tensor:
        """Whether the limit of new tokens has ended each rollout, (N,) fp32."""
        return torch.tensor([float(rollout.finish_reason == "length") for rollout in self.rollouts])

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics with TRL's names, and the seconds since the generation began."""
        lengths = torch.tensor([float(rollout.num_sampled_tokens) for rollout in self.rollouts])
        metrics = {"reward": self.rewards.nanmean(), "reward_std": nan_std(self.rewards[None]).squeeze()}
        for name, scores in zip(self.names, self.scores.unbind(1), strict=True):
            metrics[f"rewards/{name}/mean"] = scores.nanmean()
            metrics[f"rewards/{name}/std"] = nan_std(scores[None]).squeeze()
        metrics |= {f"completions/{name}_length": lengths.aminmax()[name == "max"] for name in ("min", "max")}
        metrics |= {"completions/mean_length": lengths.mean(), "completions/clipped_ratio": self.is_truncated.mean()}
        names = {name for rollout in self.rollouts for name in rollout.metrics} if "environment" in self.names else ()
        for name in sorted(names):
            values = [rollout.metrics[name] for rollout in self.rollouts if name in rollout.metrics]
            metrics[f"environment/{name}"] = torch.tensor(values, dtype=torch.float32).mean()
        seconds = {"generation_time": time.perf_counter() - self.start_time}
        return {**self.logged_metrics, **{name: float(value) for name, value in metrics.items()}, **seconds}

    def episodes(self, tokenizer: Tokenizer, advantages: Tensor, count: int) -> Iterator[dict[str, Any]]:
        """Lines of `episodes.jsonl` for the first `count` rollouts, with the advantages (N, T) of their tokens."""
        columns = zip(self.rollouts, self.rewards.tolist(), self.scores.tolist(), advantages, strict=True)
        for rollout, reward, scores, values in islice(columns, count):
            named_scores = {name: none_for_nan(score) for name, score in zip(self.names, scores, strict=True)}
            token_advantages = values[rollout.prompt_length : len(rollout.tokens)].tolist()
            yield episode_record(tokenizer, rollout, named_scores, none_for_nan(reward), token_advantages)

    def rows(self, advantages: Tensor) -> list[dict[str, Any]]:
        """Lines of `completions.jsonl`, with the mean advantage (N,) of each rollout."""
        columns = zip(
            self.rollouts,
            self.rewards.tolist(),
            self.scores.tolist(),
            advantages.tolist(),
            self.logged_columns,
            strict=True,
        )
        return [
            {
                "prompt": str(rollout.prompt.messages[-1].get("content") or ""),
                "completion": rollout.completion if len(rollout.messages) == 1 else list(rollout.messages),
                "row": rollout.prompt.where,
                "reward": none_for_nan(reward),
                **{name: none_for_nan(score) for name, score in zip(self.names, scores, strict=True)},
                "advantage": advantage,
                "num_tokens": rollout.num_sampled_tokens,
                "finish_reason": rollout.finish_reason,
                **logged,
            }
            for rollout, reward, scores, advantage, logged in columns
        ]


class RewardCheck:
    """Finds generations from which nothing is learned."""

    def __init__(self, dist: DistributedContext) -> None:
        self.dist = dist
        self.warnings: set[str] = set()  # problems that were logged

    def check_missing(self, scored: ScoredRollouts) -> None:
        """Raise UserError if no answer of the first step has a reward. In later ones, this is a warning."""
        if not scored.rewards.isnan().all():
            return
        if self.dist.step == 0:
            names = ", ".join(scored.names)
            problem = f"no answer has a reward: {names} returned None or NaN for all {len(scored.rollouts)} answers"
            raise UserError(f"rewards: {problem} of step 1. Return a number, or remove rows without rewards.")
        self.warn("no answer of a generation has a reward")

    def warn(self, problem: str) -> None:
        """Log a problem once."""
        if problem not in self.warnings:
            self.warnings.add(problem)
            hint = "completions.jsonl has the answers and their rewards"
            self.dist.log(f"doubtful: rewards: {problem}, so nothing is learned from them. {hint}.")


class RolloutSampler:
    """Samples and scores answers with an engine of its own. Each rank answers its share of the prompts."""

    def __init__(self, cfg: PolicyConfig, model: Decoder, train_data: PromptLoader, dist: DistributedContext) -> None:
        self.cfg, self.train_data, self.dist = cfg, train_data, dist
        self.tokenizer = train_data.tokenizer  # with the chat template of the prompts
        max_length = max(data.max_length for data in (cfg.data, cfg.eval_data) if data is not None)
        for reward in cfg.rewards:
            reward.prepare(dist)
        environment = cfg.environment
        if environment and (warning := dist.run_on_main(lambda: describe_rewrites(self.tokenizer, environment))):
            dist.log(f"warning: {warning}.")
        self.engine = cfg.engine.open(cfg, model, cfg.max_num_seqs, max_length, dist)
        self.reward_check = RewardCheck(dist)

    def trainer_state(self, step: int) -> TrainerState:
        """Progress of the run after `step` optimizer steps."""
        epoch, dist = step / self.train_data.num_steps(1), self.dist
        num_steps = self.cfg.max_steps or self.train_data.num_steps(self.cfg.epochs)
        return TrainerState(step, num_steps, epoch, dist.is_main_process)

    def __call__(self, prompts: Sequence[PromptRow], num_generations: int, data_step: int, step: int) -> ScoredRollouts:
        """Answers of all ranks to the prompts, after `step` optimizer steps. Collective.

        The random numbers depend on `data_step`.
        """
        start_time = time.perf_counter()
        dist, engine, environment = self.dist, self.engine, self.cfg.environment
        share = {index: prompts[index] for index in range(dist.dp_rank, len(prompts), dist.dims.dp_size)}
        sampling = replace(self.cfg.sampling, seed=self.cfg.sampling.seed + dist.seed)
        generate = partial(
            generate_rollouts, engine, self.tokenizer, share, num_generations, sampling, environment, data_step
        )
        with engine.closing_on_error():
            engine.sync_weights()
            rollouts = dist.run_on_all(generate)
            engine.sleep()  # frees the cache for training
        answers, metrics = gather_answers(self.cfg.rewards, rollouts, RewardContext(self.trainer_state(step)), dist)
        names, weights = reward_names(self.cfg.rewards), [reward.weight for reward in self.cfg.rewards]
        if environment is not None:
            names, weights = [*names, "environment"], [*weights, 1.0]
        scores = [[answer.scores.get(name) for name in names] for answer in answers]
        return ScoredRollouts(
            [answer.rollout for answer in answers],
            torch.tensor([[nan if score is None else score for score in row] for row in scores]),
            names,
            torch.tensor(weights),
            metrics,
            fill_columns([answer.columns for answer in answers]),
            start_time,
        )

    def sample(self, prompts: Sequence[PromptRow], data_step: int) -> ScoredRollouts:
        """Answers to train on. Raises UserError if no answer of the first step has a reward."""
        scored = self(prompts, self.cfg.num_generations, data_step, self.dist.step)
        self.reward_check.check_missing(scored)
        return scored

    def evaluate(self, data: PromptLoader | None, loop: TrainLoop) -> dict[str, float]:
        """Mean rewards and lengths of one answer to each held-out prompt, if there are any, after the steps so far.

        The random numbers are always the same.
        """
        if data is None:
            return {}
        self.dist.heartbeat.record(loop.step, "validate")
        metrics, spreads = (
            self(data.all_prompts(), 1, 0, loop.step).metrics,
            ("std", "min_length", "max_length", "generation_time"),
        )
        return {name: value for name, value in metrics.items() if not name.endswith(spreads)}

    def log(
        self, scored: ScoredRollouts, samples: PolicySamples, metrics: Mapping[str, float], logger: MetricLogger
    ) -> None:
        """Log the answers of a generation with their rewards and advantages, and a warning if nothing is learned."""
        if metrics.get("frac_reward_zero_std") == 1 and not scored.rewards.isnan().all():
            self.reward_check.warn("all answers to each prompt have the same reward")
        advantages = samples.advantages.sum(1) / samples.num_tokens.clamp(min=1)
        number, cfg = self.dist.step + 1, self.cfg
        logger.log_completions(number, scored.rows(advantages), cfg.num_completions_to_print)
        logger.log_episodes(number, scored.episodes(self.tokenizer, samples.advantages, cfg.num_episodes_to_save))


def none_for_nan(value: float) -> float | None:
    return None if value != value else value
