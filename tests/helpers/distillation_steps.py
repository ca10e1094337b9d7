"""Distillation steps on any layout, and their results. Has few imports because each rank loads it."""

from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import torch

from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.training_steps import FP32, Case, Outcome, make_micro_batches
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

TOKENIZER = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0}, "w")), {}, {})


@dataclass(frozen=True, kw_only=True)
class DistillCase(Case):
    """Distillation of `teacher` into the model of a case."""

    teacher: Path
    loss: KLDivergenceLoss = field(default_factory=lambda: JensenShannon(beta=0.3, kd_ratio=0.8, temperature=1.5))
    top: int | None = None
    share: float = 0.0  # fraction of rows with answers of the student


def run_distillation(case: DistillCase) -> Outcome:
    """Train a few steps as the recipe does. The losses end with the other metrics of the last step."""
    outcome = Outcome()
    with DistributedContext(7, "cpu", case.parallel) as dist:
        source = HFCheckpoint.open(case.folder)
        model = build.build_model(source, case.weights, case.adapter, case.precision, case.memory, dist)
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
        collator = Collator(
            4, case.micro_batch, dist.dp_rank, dist.dims.dp_size, 0, case.length if case.packed else None
        )
        online_teacher = teacher.open(case.loss, model, TOKENIZER, [], dist)
        on_policy = OnPolicyConfig(case.share, max_new_tokens=6, batch_size=2)
        sampler = StudentSampler(on_policy, collator, case.length, frozenset({3, 4, 5}))
        optimizer = case.optimizer.build(case.adapter.param_groups(model))
        train_optimizer = case.memory.wrap_optimizer(optimizer, dist)
        metrics = {}
        for step in range(case.steps):
            dist.begin_step(step)
            batches = sampler(model, make_micro_batches(case, step, dist), dist)
            loss, step_metrics = distill.forward_backward(model, batches, cfg, online_teacher, dist)
            outcome.losses.append(float(loss))
            outcome.norms.append(float(step_optimizer(train_optimizer, case.clip)))
            metrics = {name: float(value) for name, value in step_metrics.items()}
        outcome.losses += [metrics[name] for name in sorted(metrics)]
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        outcome.tensors = {name: full_tensor(p).clone() for name, p in parameters}
    return outcome


def run_distillation_cases(cases: list[DistillCase]) -> list[Outcome]:
    """Run all cases in one start of the ranks."""
    torch.set_num_threads(1)
    return [run_distillation(case) for case in cases]
