"""Distillation: train a student to match the token distribution of a teacher, on given or on its own answers.

tune run distill nano/distill
tune run distill qwen3/0_6b_distill teacher.quantization=nf4
tune run distill llama3_2/1b_distill on_policy.lmbda=0.5 loss=jensen_shannon
"""

from dataclasses import dataclass

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.mixture import SFTData
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.distillation.on_policy import OnPolicyConfig, StudentSampler, warn_short_room
from tunekit.distillation.teacher import BaseTeacher, OfflineTeacherConfig, OnlineTeacherConfig, token_means
from tunekit.distributed.context import DistributedContext
from tunekit.losses.kl_divergence import ForwardKL, JensenShannon, ReverseKL, SkewedKL, SkewedReverseKL, SymmetricKL
from tunekit.losses.metric_sums import MetricSums
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.early_stopping import EarlyStopping
from tunekit.training.export import export_final
from tunekit.training.forgetting import ForgettingMonitor
from tunekit.training.generation_monitor import GenerationMonitor
from tunekit.training.packing_check import check_packing
from tunekit.training.run_context import RunContext
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.step_guard import StepGuard


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """The keys of this recipe."""

    data: SFTData  # Training rows
    eval_data: SFTData | None = None  # Held-out rows for evaluation during training
    teacher: OnlineTeacherConfig | OfflineTeacherConfig  # Teacher in memory, or precomputed teacher logits on disk
    loss: ForwardKL | ReverseKL | SymmetricKL | SkewedKL | SkewedReverseKL | JensenShannon = ForwardKL()
    on_policy: OnPolicyConfig = OnPolicyConfig()  # Rows whose answers the student generates

    def __post_init__(self) -> None:
        super().__post_init__()
        self.teacher.check_rows(self.data, self.on_policy.lmbda)
        self.on_policy.check(self.data.max_length, self.loss.kd_ratio)


CONFIG = DistillConfig


def check(cfg: DistillConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    cfg.teacher.check(cfg.open_tokenizer())


def main(cfg: DistillConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write the result to `final/` in the run directory."""
    with RunContext(cfg, "distill", overwrite) as run:
        if not run.is_complete:
            train(cfg, run)
        run.push_result()


def train(cfg: DistillConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    forgetting = ForgettingMonitor(tokenizer, run)
    generation = GenerationMonitor(tokenizer, run)
    model = load_model(checkpoint, cfg, dist)
    cfg.teacher.check(tokenizer)
    teacher = cfg.teacher.open(cfg.loss, model, tokenizer, [*filter(None, (train_data, eval_data))], dist)
    sampler = StudentSampler(cfg.on_policy, train_data.collator, train_data.mixture.max_length, tokenizer.stops)
    warn_short_room(cfg.on_policy, train_data, dist)
    num_steps = run.begin(train_data)

    optimizer = build_optimizer(cfg, model, dist)
    lr_scheduler = cfg.lr_scheduler.build(optimizer.inner, num_steps)
    prefetcher = Prefetcher(train_data, dist.device)
    guard = StepGuard(cfg.step_guard, dist, prefetcher)
    early_stopping = EarlyStopping(cfg)
    checkpointer = run.open_checkpointer(
        model, optimizer, lr_scheduler, early_stopping, data=prefetcher, guard=guard, forgetting=forgetting
    )
    step = checkpointer.restore()  # 0 in a new run
    if step == 0:
        check_packing(model, train_data, dist)
    logger = run.open_logger(num_steps, step)

    with checkpointer, logger, run.profiler, prefetcher.start(guard.data_step(step), guard.data_step(num_steps)):
        if step == 0 and cfg.has_evaluation:
            metrics = teacher.evaluate(cfg.loss, model, eval_data, dist) | generation.evaluate(model, 0, logger)
            early_stopping.check_metric(logger.log_eval(0, metrics))
        forgetting.begin(model, step, logger)
        guard.begin(step, checkpointer)  # saves step 0 if the run may roll back
        run.handle_signals()
        while step < num_steps and not early_stopping.triggered:
            run.begin_step(step, logger)  # heartbeat, profiler, random seed of this step
            batches = prefetcher.next()  # the micro-batches of this rank
            batches = sampler(model, batches, dist)  # replaces answers by the student's own, if on_policy asks for it
            loss, metrics = forward_backward(model, batches, cfg, teacher, dist)
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
            logger.log_step(step, batches, prefetcher.data_time, loss=loss, grad_norm=grad_norm, lr=lr, **metrics)

            due = run.due_after(step, num_steps)
            with logger.pause():  # not part of the step time
                if due.any:
                    guard.check_all(logger)  # raises if a step was not finite, before its weights are used
                if due.push:
                    run.push_checkpoint(step, num_steps, model, checkpoint)
                if due.eval:
                    metrics = teacher.evaluate(cfg.loss, model, eval_data, dist)
                    metrics |= generation.evaluate(model, step, logger)
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
    model: Decoder, batches: list[Batch], cfg: DistillConfig, teacher: BaseTeacher, dist: DistributedContext
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the gradients of one optimizer step. Returns its loss and its other metrics, over all ranks.

    Every target token has the same weight, in every micro-batch and on every rank, also in answers of the student.
    """
    num_local_targets, sums = sum(batch.num_target_tokens for batch in batches), MetricSums()
    num_targets = dist.sum_counts(num_local_targets)
    for i, batch in enumerate(batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(batches))  # reduce gradients in the last micro-batch only
        loss, metrics = teacher.compute_loss(cfg.loss, model, batch.to(dist.device))
        (loss / num_targets * dist.grad_scale).backward()  # FSDP averages gradients over ranks; this makes it a sum
        sums.add({"loss": loss, **metrics})
    metrics = token_means(sums, dist, num_local_targets)
    return metrics.pop("loss"), metrics
