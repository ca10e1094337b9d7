"""Distillation: a student learns to expect what a teacher expects, from a live teacher, from files, or on its own rows.

tune run distill nano/distill
tune run distill qwen3/0_6b_distill teacher.quantization=nf4
tune run distill llama3_2/1b_distill on_policy.lmbda=0.5 loss=jensen_shannon
"""

from dataclasses import dataclass

from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import SFTData, is_streaming
from tunekit.data.tokenizer import Tokenizer
from tunekit.distillation.on_policy import OnPolicyConfig, StudentSampler, warn_short_room
from tunekit.distillation.teacher import BaseTeacher, OfflineTeacherConfig, OnlineTeacherConfig, token_means
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.losses.kl_divergence import ForwardKL, JensenShannon, ReverseKL, SkewedKL, SkewedReverseKL, SymmetricKL
from tunekit.losses.metric_sums import MetricSums
from tunekit.memory.config import TrainOptimizer
from tunekit.models.decoder import Decoder
from tunekit.training import config as training
from tunekit.training.config import Job, Method, Taken, TrainConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Everything this recipe can be told: what every training can, who teaches, and what is compared."""

    data: SFTData  # what to learn
    eval_data: SFTData | None = None  # held-out rows
    teacher: OnlineTeacherConfig | OfflineTeacherConfig  # a model in memory, or files that one has written
    loss: ForwardKL | ReverseKL | SymmetricKL | SkewedKL | SkewedReverseKL | JensenShannon = ForwardKL()
    on_policy: OnPolicyConfig = OnPolicyConfig()  # rows whose answers the student writes itself

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.teacher, OfflineTeacherConfig) and self.on_policy.lmbda:
            raise FieldError("on_policy.lmbda", "what the student writes is stored nowhere: `teacher: {kind: online}`")
        if isinstance(self.teacher, OfflineTeacherConfig) and is_streaming(self.data):
            raise FieldError("teacher", "rows of a stream are not there to be asked about beforehand: kind: online")
        self.on_policy.check(self.data.max_length, self.loss.kd_ratio)


RECIPE = DistillConfig


def words(cfg: DistillConfig) -> Tokenizer:
    """The tokenizer that rows are written with."""
    return training.get_tokenizer(cfg)


def check(cfg: DistillConfig) -> None:
    """What can be known without reading weights."""
    training.check_training(cfg)
    cfg.teacher.check(words(cfg))


def main(cfg: DistillConfig, overwrite: bool = False) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    training.run(cfg, Method("distill", forward_backward, evaluate, beside), overwrite)


def beside(job: Job) -> dict[str, BaseTeacher | StudentSampler]:
    """The teacher, and who puts answers into rows."""
    tokenizer, loaders = training.open_tokenizer(job.source), [job.data, *filter(None, [job.held])]
    job.cfg.teacher.check(tokenizer)
    if (told := warn_short_room(job.cfg.on_policy, job.data.datasets, job.data.mixture.max_length)) is not None:
        job.run.log(told)
    writer = StudentSampler(job.cfg.on_policy, job.data.collator, job.data.mixture.max_length, tokenizer.stops)
    teacher = job.cfg.teacher.open(job.cfg.loss, job.model, tokenizer, loaders, job.run)
    return {"teacher": teacher, "writer": writer}


def forward_backward(
    model: Decoder,
    batches: list[Batch],
    cfg: DistillConfig,
    update: TrainOptimizer,
    run: DistributedContext,
    teacher: BaseTeacher,
    writer: StudentSampler,
) -> Taken:
    """One optimizer step. A learnt token weighs the same in every micro-batch, on every rank, whoever wrote it."""
    batches = writer(model, batches, run)
    own, tally = sum(batch.num_target_tokens for batch in batches), MetricSums()
    tokens = run.sum_counts(own)
    for i, batch in enumerate(batches, start=1):
        run.set_gradient_sync(model, enabled=i == len(batches))
        loss, figures = teacher.compute_loss(cfg.loss, model, batch.to(run.device))
        (loss / tokens * run.grad_scale).backward()
        tally.add({"loss": loss, **figures})
    figures = token_means(tally, run, own)
    loss = figures.pop("loss")
    return Taken(loss, update(loss), figures, batches)


def evaluate(
    model: Decoder,
    held: DataLoader,
    cfg: DistillConfig,
    run: DistributedContext,
    teacher: BaseTeacher,
    writer: StudentSampler,
) -> dict[str, float]:
    """The loss and other figures of a learnt token of held-out rows, as they are."""
    return teacher.evaluate(cfg.loss, model, held, run)
