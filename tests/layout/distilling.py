"""Some steps of distillation on any layout, and what came of them. Lean: every rank imports it."""

from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import torch

from tests.helpers.optimizer_step import step_optimizer
from tests.layout.steps import FP32, Case, Outcome, batches
from tunekit import build
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Collator
from tunekit.data.datasets import TextDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distillation.on_policy import OnPolicyConfig, StudentSampler
from tunekit.distillation.teacher import OnlineTeacherConfig
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import full_tensor
from tunekit.losses.kl_divergence import JensenShannon, KLDivergenceLoss
from tunekit.recipes import distill

WORDS = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0}, "w")), {}, {})


@dataclass(frozen=True, kw_only=True)
class Lesson(Case):
    """What a student learns from a teacher."""

    teacher: Path
    loss: KLDivergenceLoss = field(default_factory=lambda: JensenShannon(beta=0.3, kd_ratio=0.8, temperature=1.5))
    top: int | None = None
    share: float = 0.0  # of rows that the student answers itself


def taught(case: Lesson) -> Outcome:
    """A few steps as the recipe takes them. Behind the losses of all steps stand the other figures of the last one."""
    found = Outcome()
    with DistributedContext(7, "cpu", case.parallel) as run:
        source = HFCheckpoint.open(case.folder)
        model = build.build_model(source, case.weights, case.adapter, case.precision, case.memory, run)
        teacher = OnlineTeacherConfig(model=str(case.teacher), precision=FP32, top_k=case.top)
        cfg = distill.DistillConfig(
            model="m",
            data=TextDataset("t"),
            output_dir="o",
            teacher=teacher,
            loss=case.loss,
            adapter=case.adapter,
            max_grad_norm=case.clip,
        )
        layout = Collator(4, case.micro_batch, run.reader, run.sizes.readers, 0, case.length if case.packed else None)
        online_teacher = teacher.open(case.loss, model, WORDS, [], run)
        on_policy = OnPolicyConfig(case.share, max_new_tokens=6, batch_size=2)
        sampler = StudentSampler(on_policy, layout, case.length, frozenset({3, 4, 5}))
        optimizer = case.optimizer.build(case.adapter.param_groups(model))
        train_optimizer = case.memory.wrap_optimizer(optimizer, run)
        figures = {}
        for step in range(case.steps):
            run.begin_step(step)
            micro_batches = sampler(model, batches(case, step, run), run)
            loss, metrics = distill.forward_backward(model, micro_batches, cfg, online_teacher, run)
            found.losses.append(float(loss))
            found.norms.append(float(step_optimizer(train_optimizer, case.clip)))
            figures = {name: float(value) for name, value in metrics.items()}
        found.losses += [figures[name] for name in sorted(figures)]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        found.tensors = {name: full_tensor(p).clone() for name, p in named}
    return found


def lessons(cases: list[Lesson]) -> list[Outcome]:
    """One after the other, in one start of the ranks."""
    torch.set_num_threads(1)
    return [taught(case) for case in cases]
