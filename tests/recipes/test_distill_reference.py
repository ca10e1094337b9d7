"""Whole steps of distillation against TRL's trainer and a plain loop: the same rows, start and teacher."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from trl.experimental.gkd import GKDConfig, GKDTrainer

from tests.checkpoints import (
    FP32,
    load_inference_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
)
from tests.recipes.stepwise import BATCH, PLAIN, STEADY, STEPS, figures, told, whole_steps, written
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.datasets import CompletionDataset
from tunekit.distillation.teacher import OnlineTeacherConfig
from tunekit.losses.kl_divergence import ForwardKL, JensenShannon, ReverseKL
from tunekit.recipes import distill


def config(folder: Path, loss: ForwardKL | ReverseKL | JensenShannon) -> distill.DistillConfig:
    draw = torch.Generator().manual_seed(7)
    rows = [[" ".join(f"w{i}" for i in torch.randint(0, 60, (n,), generator=draw).tolist()) for n in (3 + i % 5, 2 + i)]
            for i in range(STEPS * BATCH)]  # fmt: skip
    source = written(folder, ({"prompt": asked + " ", "completion": answer} for asked, answer in rows))
    return distill.DistillConfig(
        model=str(make_checkpoint(folder / "model", "llama3.2")),
        teacher=OnlineTeacherConfig(model=str(make_checkpoint(folder / "teacher", "mistral", seed=1)), precision=FP32),
        data=CompletionDataset(source),
        loss=loss,
        output_dir=str(folder / "run"),
        optimizer=STEADY,
        **PLAIN,
    )


def batches(cfg: distill.DistillConfig) -> list[Batch]:
    data = whole_steps(cfg)
    return [data[step][0] for step in range(STEPS)]


def compare(cfg: distill.DistillConfig, wanted: dict[str, list[float]], model: nn.Module) -> None:
    """The figures of every step, and the student behind the last."""
    distill.main(cfg)
    found = figures(cfg.output_dir)
    for name, values in wanted.items():
        assert [line[name] for line in found] == pytest.approx(values, rel=1e-5)
    with torch.no_grad():
        assert (
            relative_error(
                load_inference_model(Path(cfg.output_dir))(random_tokens()), model.eval()(random_tokens()).logits
            )
            < 1e-4
        )


class Fed(GKDTrainer):
    """TRL's trainer on batches that are made already."""

    parts: list[dict[str, Any]]

    def get_train_dataloader(self) -> Any:
        return self.parts


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_steps_are_those_of_trl(beta: float, tmp_path: Path) -> None:
    cfg = config(tmp_path, JensenShannon(beta=beta))
    args = GKDConfig(**told(cfg), beta=beta, lmbda=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
    tokenizer.pad_token = "<s>"
    rows = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "w1"}]}])
    models = load_transformers_model(Path(cfg.model)).train(), load_transformers_model(Path(cfg.teacher.model))
    trainer: Any = Fed(models[0], models[1], args, train_dataset=rows, processing_class=tokenizer)
    trainer.parts = [
        {
            "input_ids": part.tokens,
            "attention_mask": torch.ones_like(part.tokens),
            "labels": F.pad(part.targets[:, :-1], (1, 0), value=IGNORE),
        }
        for part in batches(cfg)
    ]
    trainer.train()
    wanted = {name: [line[theirs] for line in trainer.state.log_history if theirs in line]
              for name, theirs in (("loss", "loss"), ("grad_norm", "grad_norm"))}  # fmt: skip
    compare(cfg, wanted, trainer.model)


def test_figures_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    cfg = config(tmp_path, ReverseKL(temperature=2.0, kd_ratio=0.75))
    student, teacher = (
        load_transformers_model(Path(cfg.model)).train(),
        load_transformers_model(Path(cfg.teacher.model)),
    )
    optimizer = torch.optim.AdamW(student.parameters(), STEADY.lr, (0.9, 0.95), STEADY.eps, 0.0)
    names = ("loss", "divergence", "kl", "cross_entropy", "entropy", "teacher_entropy", "top1_agreement")
    wanted: dict[str, list[float]] = {name: [] for name in names}
    for part in batches(cfg):
        learnt = part.targets != IGNORE
        raw = student(part.tokens).logits[learnt]
        with torch.no_grad():
            q = (teacher(part.tokens).logits[learnt] / 2.0).log_softmax(-1)
        p = (raw / 2.0).log_softmax(-1)
        far, truth = (p.exp() * (p - q)).sum(-1).mean(), F.cross_entropy(raw, part.targets[learnt])
        loss = 0.75 * far + 0.25 * truth
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), cfg.max_grad_norm)
        optimizer.step(), optimizer.zero_grad()
        entropies = [-(x.exp() * x).sum(-1).mean() for x in (p, q)]
        same = (p.argmax(-1) == q.argmax(-1)).float().mean()
        found = loss, far, (q.exp() * (q - p)).sum(-1).mean(), truth, *entropies, same
        for name, value in zip(names, found, strict=True):
            wanted[name].append(float(value))
    compare(cfg, wanted, student)


def test_a_student_comes_near_its_teacher(tmp_path: Path) -> None:
    """Of another family, which expects other things at first."""
    cfg = config(tmp_path, ForwardKL())
    distill.main(replace(cfg, max_steps=40))
    first, *_, last = [line["kl"] for line in figures(cfg.output_dir)]
    assert last < first / 2
