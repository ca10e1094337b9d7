"""Distillation: train a student to match the token distribution of a teacher, on given or on its own answers.

tune run distill nano/distill
tune run distill qwen3/0_6b_distill teacher.quantization=nf4
tune run distill llama3_2/1b_distill on_policy.lmbda=0.5 loss=jensen_shannon
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.mixture import SFTData
from tunekit.distillation.on_policy import OnPolicyConfig, StudentSampler, warn_short_room
from tunekit.distillation.teacher import BaseTeacher, OfflineTeacherConfig, OnlineTeacherConfig, token_means
from tunekit.distributed.context import DistributedContext
from tunekit.losses.kl_divergence import ForwardKL, JensenShannon, ReverseKL, SkewedKL, SkewedReverseKL, SymmetricKL
from tunekit.losses.metric_sums import MetricSums
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.run_context import RunContext, run_training
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.train_loop import TrainLoop


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
    run_training("distill", train, cfg, overwrite)


def train(cfg: DistillConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model = load_model(checkpoint, cfg, dist)
        cfg.teacher.check(tokenizer)
        teacher = cfg.teacher.open(cfg.loss, model, tokenizer, [*filter(None, (train_data, eval_data))], dist)
        sampler = StudentSampler(cfg.on_policy, train_data.collator, train_data.mixture.max_length, tokenizer.stops)
        warn_short_room(cfg.on_policy, train_data, dist)
        optimizer = build_optimizer(cfg, model, dist)
        # Resumes; between two steps it logs, evaluates, saves, uploads, rolls back or stops as the config says
        for step in loop.start(model, optimizer, partial(teacher.evaluate, cfg.loss, model, eval_data, dist)):
            step.batches = sampler(model, step.batches, dist)  # replaces answers by the student's own, if asked to
            loss, metrics = forward_backward(model, step.batches, cfg, teacher, dist)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not step.accepts(loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss, grad_norm, **metrics)


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
