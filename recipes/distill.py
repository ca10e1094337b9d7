"""Distillation: a student learns to expect what a teacher expects, from a live teacher, from files, or on its own rows.

tune run distill nano/distill
tune run distill qwen3/0_6b_distill teacher.weights=nf4
tune run distill llama3_2/1b_distill on_policy.share=0.5 loss=jensenshannon
"""

from dataclasses import dataclass

from tunekit import training
from tunekit.data.steps.batch import Batch
from tunekit.data.steps.loader import Loader
from tunekit.data.steps.mix import Learnable, streams
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError
from tunekit.losses.divergence import ForwardKL, JensenShannon, ReverseKL, SkewedKL, SkewedReverseKL, SymmetricKL
from tunekit.losses.tally import Tally
from tunekit.memory import Update
from tunekit.models.decoder import Decoder
from tunekit.on_policy import OnPolicy, Writer, cramped
from tunekit.parallel.run import Run
from tunekit.teacher import Live, Stored, View, means
from tunekit.training import Job, Method, Taken, Training


@dataclass(frozen=True, kw_only=True)
class Distill(Training):
    """Everything this recipe can be told: what every training can, who teaches, and what is compared."""

    data: Learnable  # what to learn
    validation: Learnable | None = None  # held-out rows
    teacher: Live | Stored  # a model in memory, or files that one has written
    loss: ForwardKL | ReverseKL | SymmetricKL | SkewedKL | SkewedReverseKL | JensenShannon = ForwardKL()
    on_policy: OnPolicy = OnPolicy()  # rows whose answers the student writes itself

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.teacher, Stored) and self.on_policy.share:
            raise FieldError("on_policy.share", "what the student writes is stored nowhere: `teacher: {kind: live}`")
        if isinstance(self.teacher, Stored) and streams(self.data):
            raise FieldError("teacher", "rows of a stream are not there to be asked about beforehand: kind: live")
        self.on_policy.check(self.data.length, self.loss.truth)


RECIPE = Distill


def words(cfg: Distill) -> Tokenizer:
    """The tokenizer that rows are written with."""
    return training.words(cfg)


def check(cfg: Distill) -> None:
    """What can be known without reading weights."""
    training.check(cfg)
    cfg.teacher.check(words(cfg))


def main(cfg: Distill, fresh: bool = False) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    training.run(cfg, Method("distill", train_step, validate, beside), fresh)


def beside(job: Job) -> dict[str, View | Writer]:
    """The teacher, and who puts answers into rows."""
    tokenizer, loaders = training.tokenizer_of(job.source), [job.data, *filter(None, [job.held])]
    job.cfg.teacher.check(tokenizer)
    if (told := cramped(job.cfg.on_policy, job.data.parts, job.data.mix.length)) is not None:
        job.run.tell(told)
    writer = Writer(job.cfg.on_policy, job.data.layout, job.data.mix.length, tokenizer.stops)
    teacher = job.cfg.teacher.open(job.cfg.loss, job.model, tokenizer, loaders, job.run)
    return {"teacher": teacher, "writer": writer}


def train_step(
    model: Decoder, batches: list[Batch], cfg: Distill, update: Update, run: Run, teacher: View, writer: Writer
) -> Taken:
    """One optimizer step. A learnt token weighs the same in every micro-batch, on every rank, whoever wrote it."""
    batches = writer(model, batches, run)
    own, tally = sum(batch.learnt for batch in batches), Tally()
    tokens = run.total(own)
    for i, batch in enumerate(batches, start=1):
        run.sync_gradients(model, on=i == len(batches))
        loss, figures = teacher.compare(cfg.loss, model, batch.to(run.device))
        (loss / tokens * run.averaged).backward()
        tally.add({"loss": loss, **figures})
    figures = means(tally, run, own)
    loss = figures.pop("loss")
    return Taken(loss, update(loss), figures, batches)


def validate(model: Decoder, held: Loader, cfg: Distill, run: Run, teacher: View, writer: Writer) -> dict[str, float]:
    """The loss and other figures of a learnt token of held-out rows, as they are."""
    return teacher.means(cfg.loss, model, held, run)
