"""Reinforcement learning from rewards of sampled answers with a value head, full or with adapters: PPO.

tune run ppo nano/ppo
tune run ppo mistral/7b_ppo_full reward.model=REWARD_MODEL
"""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.errors import check_range
from tunekit.losses.policy_gradient import RewardSignals
from tunekit.losses.ppo import PPO
from tunekit.models.decoder import Decoder
from tunekit.policy.config import PolicyConfig, check_policy
from tunekit.policy.logprob_drift import DriftLimit
from tunekit.policy.objective import PolicyObjective, PolicyStep, open_objective
from tunekit.policy.ppo import PPOBuffer, PPOObjective, PPOSamples, objective_metrics
from tunekit.policy.prompt_loader import open_prompts
from tunekit.policy.rollout_sampler import RolloutSampler, ScoredRollouts
from tunekit.training.run_context import RunContext, run_training
from tunekit.training.setup import build_optimizer, load_model
from tunekit.training.train_loop import TrainLoop


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PolicyConfig):
    """The keys of this recipe."""

    loss: PPO = PPO()  # Clipped policy gradient and value loss, and how rewards become advantages
    num_generations: int = 1  # Answers to each prompt
    num_ppo_epochs: int = 4  # Passes over the answers of a generation
    num_mini_batches: int = 1  # Optimizer steps of a pass, each on global_batch_size answers
    value_lr: float | None = None  # Learning rate of the value head; null: optimizer.lr

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "num_ppo_epochs", "num_mini_batches", ge=1)
        check_range(self, "value_lr", gt=0)

    @property
    def steps_per_generation(self) -> int:
        return self.num_mini_batches

    @property
    def num_iterations(self) -> int:
        return self.num_ppo_epochs


CONFIG = PPOConfig
check = check_policy  # raises UserError for everything that can be found without reading weights


def main(cfg: PPOConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write the result to `final/` in the run directory."""
    run_training("ppo", train, cfg, overwrite)


def train(cfg: PPOConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_prompts(cfg, checkpoint, tokenizer, run)
    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model = load_model(checkpoint, cfg, dist, value_head=True)  # saved in training states only
        reference = cfg.reference.open_model(cfg, checkpoint, model, dist) if cfg.loss.needs_reference else None
        objective = open_objective(cfg, train_data, model, reference, dist, PPOObjective)
        sampler, buffer = RolloutSampler(cfg, model, train_data, dist), PPOBuffer(cfg)
        optimizer = build_optimizer(cfg, model, dist, cfg.value_lr)
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
    answers: ScoredRollouts, model: Decoder, objective: PolicyObjective, cfg: PPOConfig
) -> tuple[PPOSamples, dict[str, float]]:
    """Training samples of a generation: tokens with log-probabilities and values before the first update, advantages
    and returns. Also returns metrics with TRL's names. Answers without a reward are not trained.
    """
    samples = PPOSamples.from_rollouts(answers.rollouts, cfg.loss.mask_truncated_completions)
    scores = answers.rewards - (cfg.loss.missing_eos_penalty or 0) * answers.is_truncated
    samples = replace(samples, loss_mask=samples.loss_mask & ~scores.isnan()[:, None])
    logps, _, values = objective.score(model, samples)
    ref_logps = logps if objective.reference is None else objective.score_reference(samples)
    signals = RewardSignals(scores.nan_to_num(0), 1, samples.loss_mask, logps - ref_logps, values)
    estimates = cfg.loss.advantages(signals)
    samples = replace(samples, old_logps=logps, ref_logps=ref_logps, advantages=estimates.values)
    metrics = objective_metrics(cfg.loss, signals, estimates, scores, logps)
    return PPOSamples(**vars(samples), values=values, returns=estimates.returns), metrics


def forward_backward(model: Decoder, step: PolicyStep, objective: PolicyObjective) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the gradients of one optimizer step. Returns its loss and its other metrics, over all ranks."""
    dist = objective.dist
    for i, batch in enumerate(step.batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(step.batches))  # reduce gradients in the last micro-batch only
        loss = objective.token_loss(model, batch, step)  # those of all micro-batches and ranks add up
        (loss * dist.grad_scale).backward()  # FSDP averages gradients over ranks; this makes it a sum
    metrics = objective.metrics(step)
    return metrics.pop("loss"), metrics
