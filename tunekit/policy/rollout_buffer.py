"""Rollouts of each generation: sampled, scored, and kept for the optimizer steps that train on them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import nan
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.loggers.metric_logger import MetricLogger
from tunekit.losses.advantages import nan_std, sum_rewards
from tunekit.losses.policy_gradient import RewardSignals
from tunekit.models.decoder import Decoder
from tunekit.policy.config import PolicyConfig
from tunekit.policy.objective import PolicyObjective
from tunekit.policy.prompt_loader import PromptLoader
from tunekit.policy.samples import PolicyCollator, PolicySamples
from tunekit.rewards.base import gather_answers, reward_names
from tunekit.rewards.context import RewardContext, TrainerState, fill_columns
from tunekit.rollouts.episode_log import episode_record
from tunekit.rollouts.episodes import describe_rewrites, generate_rollouts
from tunekit.rollouts.rollout import PromptRow, Rollout
from tunekit.training.reference_model import ReferenceModel


class ScoredRollouts(NamedTuple):
    """Rollouts of all ranks; answers to one prompt are adjacent. Scores are (N, K), NaN where none applies."""

    rollouts: Sequence[Rollout]
    scores: Tensor
    names: Sequence[str]  # of the K rewards
    weights: Tensor  # (K,)
    logged_metrics: Mapping[str, float]  # by reward functions of the user
    logged_columns: Sequence[Mapping[str, Any]]  # of each rollout

    @property
    def rewards(self) -> Tensor:
        """Weighted sums (N,), NaN if no reward applies."""
        return sum_rewards(self.scores, self.weights)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics with TRL's names."""
        lengths = torch.tensor([float(rollout.num_sampled_tokens) for rollout in self.rollouts])
        clipped = torch.tensor([float(rollout.finish_reason == "length") for rollout in self.rollouts])
        metrics = {"reward": self.rewards.nanmean(), "reward_std": nan_std(self.rewards[None]).squeeze()}
        for name, scores in zip(self.names, self.scores.unbind(1), strict=True):
            metrics[f"rewards/{name}/mean"] = scores.nanmean()
            metrics[f"rewards/{name}/std"] = nan_std(scores[None]).squeeze()
        metrics |= {f"completions/{name}_length": lengths.aminmax()[name == "max"] for name in ("min", "max")}
        metrics |= {"completions/mean_length": lengths.mean(), "completions/clipped_ratio": clipped.mean()}
        names = {name for rollout in self.rollouts for name in rollout.metrics} if "environment" in self.names else ()
        for name in sorted(names):
            values = [rollout.metrics[name] for rollout in self.rollouts if name in rollout.metrics]
            metrics[f"environment/{name}"] = torch.tensor(values, dtype=torch.float32).mean()
        return {**self.logged_metrics, **{name: float(value) for name, value in metrics.items()}}

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

    def trainer_state(self, step: int) -> TrainerState:
        """Progress of the run after `step` optimizer steps."""
        epoch, dist = step / self.train_data.num_steps(1), self.dist
        num_steps = self.cfg.max_steps or self.train_data.num_steps(self.cfg.epochs)
        return TrainerState(step, num_steps, epoch, dist.is_main_process)

    def __call__(self, prompts: Sequence[PromptRow], num_generations: int, data_step: int, step: int) -> ScoredRollouts:
        """Answers of all ranks to the prompts, after `step` optimizer steps. Collective.

        The random numbers depend on `data_step`.
        """
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
        )

    def evaluate(self, data: PromptLoader | None, step: int) -> dict[str, float]:
        """Mean rewards and lengths of one answer to each held-out prompt, if there are any, after `step` steps.

        The random numbers are always the same.
        """
        if data is None:
            return {}
        self.dist.heartbeat.record(step, "validate")
        metrics, spreads = self(data.all_prompts(), 1, 0, step).metrics, ("std", "min_length", "max_length")
        return {name: value for name, value in metrics.items() if not name.endswith(spreads)}


class RolloutBuffer:
    """The samples of a generation, from the first step that trains on them to the last.

    Saved in training states: a run that resumes in the middle of a generation trains on the same samples.
    """

    samples_class: ClassVar[type[PolicySamples]] = PolicySamples

    def __init__(self, sampler: RolloutSampler, objective: PolicyObjective, reference: ReferenceModel | None) -> None:
        self.sampler, self.objective, self.reference = sampler, objective, reference
        self.generation = -1  # number of the generation; -1: none
        self.samples: PolicySamples | None = None
        self.metrics: dict[str, float] = {}  # of the generation
        self.warnings: set[str] = set()  # problems that were logged

    def needs_rollouts(self, data_step: int) -> bool:
        """Whether a step has no samples yet."""
        return self.samples is None or self.generation != data_step // self.sampler.cfg.steps_per_prompt

    def sample(self, model: Decoder, prompts: Sequence[PromptRow], data_step: int, logger: MetricLogger) -> None:
        """Sample and score answers under the current weights, and log them."""
        start_time = time.perf_counter()
        scored = self.sampler(prompts, self.sampler.cfg.num_generations, data_step, self.sampler.dist.step)
        self.check_rewards(scored)
        self.generation = data_step // self.sampler.cfg.steps_per_prompt
        self.samples, metrics = self.prepare(model, scored)
        seconds = time.perf_counter() - start_time
        self.metrics = {**scored.metrics, **metrics, "generation_time": seconds}
        if metrics.get("frac_reward_zero_std") == 1 and not scored.rewards.isnan().all():
            self.warn("all answers to each prompt have the same reward")
        advantages = self.samples.advantages.sum(1) / self.samples.num_tokens.clamp(min=1)
        rows = scored.rows(advantages)
        number, cfg = self.sampler.dist.step + 1, self.sampler.cfg
        logger.log_completions(number, rows, cfg.num_completions_to_print)
        episodes = scored.episodes(self.sampler.tokenizer, self.samples.advantages, cfg.num_episodes_to_save)
        logger.log_episodes(number, episodes)

    def check_rewards(self, scored: ScoredRollouts) -> None:
        """Raise UserError if no answer of the first generation has a reward. In later ones, this is a warning."""
        if not scored.rewards.isnan().all():
            return
        if self.generation < 0:
            names = ", ".join(scored.names)
            problem = f"no answer has a reward: {names} returned None or NaN for all {len(scored.rollouts)} answers"
            fix = "Return a number, or remove rows without rewards."
            raise UserError(f"rewards: {problem} of step {self.sampler.dist.step + 1}. {fix}")
        self.warn("no answer of a generation has a reward")

    def warn(self, problem: str) -> None:
        """Log, once, why nothing is learned from the answers of a generation."""
        if problem not in self.warnings:
            self.warnings.add(problem)
            hint = "completions.jsonl has the answers and their rewards"
            self.sampler.dist.log(f"doubtful: rewards: {problem}, so nothing is learned from them. {hint}.")

    def prepare(self, model: Decoder, scored: ScoredRollouts) -> tuple[PolicySamples, dict[str, float]]:
        """Samples with log-probabilities and advantages, and metrics of the generation."""
        cfg, dist, objective, loss = self.sampler.cfg, self.sampler.dist, self.objective, self.objective.loss
        samples = PolicySamples.from_rollouts(scored.rollouts, loss.mask_truncated_completions)
        if cfg.steps_per_prompt > 1 or loss.needs_reward_kl:
            samples = replace(samples, old_logps=objective.score(model, samples, dist)[0])
        if self.reference is not None:
            samples = replace(samples, ref_logps=self.score_reference(self.reference, samples))
        kl = samples.old_logps - samples.ref_logps if loss.needs_reward_kl else None
        advantages = loss.advantages(RewardSignals(scored.rewards, cfg.num_generations, samples.loss_mask, kl))
        values = advantages.values.nan_to_num(0) * samples.loss_mask
        is_zero = advantages.reward_std.isclose(torch.zeros(())).float()
        return replace(samples, advantages=values), {"frac_reward_zero_std": float(is_zero.mean())}

    def score_reference(self, reference: ReferenceModel, samples: PolicySamples) -> Tensor:
        """Log-probabilities (N, T) of samples under the reference."""
        with reference.use():
            return self.objective.score(reference.model, samples, self.sampler.dist)[0]

    def take(self, data_step: int) -> tuple[PolicySamples, float]:
        """Samples of a step, and the mean number of trained tokens per step of its generation.

        After the last step of a generation, the buffer is empty.
        """
        assert self.samples is not None
        cfg, samples = self.sampler.cfg, self.samples
        position = data_step % cfg.steps_per_prompt
        if position == cfg.steps_per_prompt - 1:
            self.samples = None
        mean_num_tokens = float(samples.num_tokens.sum()) / cfg.steps_per_generation
        return samples[self.rows(position)], mean_num_tokens

    def rows(self, position: int) -> slice | Tensor:
        """Indices of the samples of a step, by its position in the generation."""
        first = position % self.sampler.cfg.steps_per_generation * self.sampler.cfg.global_batch_size
        return slice(first, first + self.sampler.cfg.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        samples = None if self.samples is None else self.samples.state_dict()
        return {"generation": self.generation, "samples": samples, "metrics": self.metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generation, self.metrics = state["generation"], dict(state["metrics"])
        self.samples = None if state["samples"] is None else self.samples_class.from_state_dict(state["samples"])


def open_objective(
    cfg: PolicyConfig, data: PromptLoader, model: Decoder, kind: type[PolicyObjective] = PolicyObjective
) -> PolicyObjective:
    """The objective of a run. With `data.packing`, the answers to a prompt share it where the model supports that."""
    max_length = data.mixture.max_length
    collator = replace(
        data.collator,
        global_batch_size=cfg.global_batch_size,
        micro_batch_size=cfg.micro_batch_size,
        capacity=max_length if cfg.data.packing else None,
        with_document_ids=True,
    )
    policy_collator = PolicyCollator(collator, cfg.num_generations, model.shares_prefixes(max_length))
    return kind(cfg.loss, policy_collator, cfg.sampling.temperature, cfg.sampling.max_new_tokens)


def none_for_nan(value: float) -> float | None:
    return None if value != value else value
