"""Reinforcement learning from rewards of sampled answers, full or with adapters: GRPO and its variants, RLOO,
REINFORCE++.

tune run grpo nano/grpo
tune run grpo llama3_2/3b_grpo_gsm8k_lora loss=dr_grpo
"""

from dataclasses import dataclass

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.distributed.context import DistributedContext
from tunekit.errors import check_range
from tunekit.losses.policy_gradient import DAPO, PolicyLoss
from tunekit.models.decoder import Decoder
from tunekit.policy.config import PolicyConfig, check_policy
from tunekit.policy.logprob_drift import DriftLimit
from tunekit.policy.objective import PolicyObjective, PolicyStep
from tunekit.policy.prompt_loader import open_prompts
from tunekit.policy.rollout_buffer import RolloutBuffer, RolloutSampler, open_objective
from tunekit.training.early_stopping import EarlyStopping
from tunekit.training.export import export_final
from tunekit.training.forgetting import ForgettingMonitor
from tunekit.training.generation_monitor import GenerationMonitor
from tunekit.training.run_context import RunContext
from tunekit.training.setup import build_optimizer, load_model
from tunekit.training.step_guard import StepGuard


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


def check(cfg: GRPOConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_policy(cfg)


def main(cfg: GRPOConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write the result to `final/` in the run directory."""
    with RunContext(cfg, "grpo", overwrite) as run:
        if not run.is_complete:
            train(cfg, run)
        run.push_result()


def train(cfg: GRPOConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_prompts(cfg, checkpoint, tokenizer, run)
    forgetting = ForgettingMonitor(tokenizer, run)
    generation = GenerationMonitor(tokenizer, run)
    model = load_model(checkpoint, cfg, dist)
    objective = open_objective(cfg, train_data, model)
    reference = cfg.reference.open_model(cfg, checkpoint, model, dist) if cfg.loss.needs_reference else None
    sampler = RolloutSampler(cfg, model, train_data, dist)
    num_steps = run.begin(train_data)

    optimizer = build_optimizer(cfg, model, dist)
    lr_scheduler = cfg.lr_scheduler.build(optimizer.inner, num_steps)
    prefetcher = Prefetcher(train_data, dist.device)
    guard = StepGuard(cfg.step_guard, dist, prefetcher)
    drift_limit = DriftLimit(cfg, dist)
    early_stopping = EarlyStopping(cfg)
    rollouts = RolloutBuffer(sampler, objective, reference)
    checkpointer = run.open_checkpointer(
        model, optimizer, lr_scheduler, early_stopping, data=prefetcher, guard=guard,
        forgetting=forgetting, rollouts=rollouts,
    )  # fmt: skip
    step = checkpointer.restore()  # 0 in a new run
    logger = run.open_logger(num_steps, step)

    with checkpointer, logger, run.profiler, prefetcher.start(guard.data_step(step), guard.data_step(num_steps)):
        if step == 0 and cfg.has_evaluation:
            metrics = sampler.evaluate(eval_data, step) | generation.evaluate(model, 0, logger)
            early_stopping.check_metric(logger.log_eval(0, metrics))
        forgetting.begin(model, step, logger)
        guard.begin(step, checkpointer)  # saves step 0 if the run may roll back
        run.handle_signals()
        while step < num_steps and not early_stopping.triggered:
            run.begin_step(step, logger)  # heartbeat, profiler, random seed of this step
            prefetcher.next()
            data_step = guard.data_step(step)
            if rollouts.needs_rollouts(data_step):
                rollouts.sample(model, train_data.prompts(data_step), data_step, logger)
            samples = objective.begin_step(model, *rollouts.take(data_step), dist)
            loss, metrics = forward_backward(model, samples, objective, dist)
            drift_limit.add(metrics, logger)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not guard.accepts(step, loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            lr = lr_scheduler.get_last_lr()[0]
            lr_scheduler.step()
            if guard.needs_rollback(logger):
                step = guard.roll_back(checkpointer, logger)  # to the last training state; skips the data since then
                continue
            step += 1
            metrics = rollouts.metrics | metrics
            logger.log_step(
                step, samples.batches, prefetcher.data_time, loss=loss, grad_norm=grad_norm, lr=lr, **metrics
            )

            due = run.due_after(step, num_steps)
            with logger.pause():  # not part of the step time
                if due.any:
                    guard.check_all(logger)  # raises if a step was not finite, before its weights are used
                    drift_limit.check()
                if due.push:
                    run.push_checkpoint(step, num_steps, model, checkpoint)
                if due.eval:
                    metrics = sampler.evaluate(eval_data, step) | generation.evaluate(model, step, logger)
                    early_stopping.update(step, logger.log_eval(step, metrics))
                if due.forgetting:
                    forgetting.evaluate(model, step, logger)
                if due.save or early_stopping.needs_save(step) or forgetting.exceeded:
                    checkpointer.save(step)
                    run.exit_if_stop_requested(step, num_steps)
                    forgetting.raise_if_exceeded(step)
                checkpointer.poll()  # raises if a save in the background has failed
        step = early_stopping.finish(checkpointer, step, num_steps)  # loads the best weights
    export_final(run, model, checkpoint, (train_data, eval_data), step)


def forward_backward(
    model: Decoder, step: PolicyStep, objective: PolicyObjective, dist: DistributedContext
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the gradients of one optimizer step. Returns its loss and its other metrics, over all ranks.

    The weights of all tokens are known in advance, so micro-batches and ranks add up to the loss of the step.
    """
    for i, batch in enumerate(step.batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(step.batches))  # reduce gradients in the last micro-batch only
        loss = objective.token_loss(model, batch, step)
        (loss * dist.grad_scale).backward()  # FSDP averages gradients over ranks; this makes it a sum
    metrics = objective.metrics(step, dist)
    return metrics.pop("loss"), metrics
