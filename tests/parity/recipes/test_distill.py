"""Distillation steps compared with TRL's trainer and with a plain loop: same rows, initial weights and teacher."""

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

from tests.helpers.random_checkpoints import (
    FP32,
    load_inference_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
)
from tests.helpers.trl_runs import (
    BATCH,
    PROPORTIONAL_ADAMW,
    SHARED_OPTIONS,
    STEPS,
    open_full_steps,
    step_metrics,
    trl_options,
    write_rows,
)
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.datasets import CompletionDataset
from tunekit.distillation.teacher import OnlineTeacherConfig
from tunekit.losses.kl_divergence import ForwardKL, JensenShannon, ReverseKL
from tunekit.recipes import distill


def make_config(folder: Path, loss: ForwardKL | ReverseKL | JensenShannon) -> distill.DistillConfig:
    generator = torch.Generator().manual_seed(7)
    rows = [
        [" ".join(f"w{i}" for i in torch.randint(0, 60, (n,), generator=generator).tolist()) for n in lengths]
        for lengths in ((3 + i % 5, 2 + i) for i in range(STEPS * BATCH))
    ]
    source = write_rows(folder, ({"prompt": question + " ", "completion": answer} for question, answer in rows))
    return distill.DistillConfig(
        model=str(make_checkpoint(folder / "model", "llama3.2")),
        teacher=OnlineTeacherConfig(model=str(make_checkpoint(folder / "teacher", "mistral", seed=1)), precision=FP32),
        data=CompletionDataset(source),
        loss=loss,
        output_dir=str(folder / "run"),
        optimizer=PROPORTIONAL_ADAMW,
        **SHARED_OPTIONS,
    )


def batches(cfg: distill.DistillConfig) -> list[Batch]:
    data = open_full_steps(cfg)
    return [data[step][0] for step in range(STEPS)]


def compare_with_run(cfg: distill.DistillConfig, expected: dict[str, list[float]], model: nn.Module) -> None:
    """Compare the metrics of each step and the student after the last one."""
    distill.main(cfg)
    metrics = step_metrics(cfg.output_dir)
    for name, values in expected.items():
        assert [line[name] for line in metrics] == pytest.approx(values, rel=3e-5)
    with torch.no_grad():
        assert (
            relative_error(
                load_inference_model(Path(cfg.output_dir))(random_tokens()), model.eval()(random_tokens()).logits
            )
            < 1e-4
        )


class FixedBatchTrainer(GKDTrainer):
    """TRL trainer with given batches."""

    parts: list[dict[str, Any]]

    def get_train_dataloader(self) -> Any:
        return self.parts


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_steps_match_trl(beta: float, tmp_path: Path) -> None:
    cfg = make_config(tmp_path, JensenShannon(beta=beta))
    args = GKDConfig(**trl_options(cfg), beta=beta, lmbda=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
    tokenizer.pad_token = "<s>"
    rows = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "w1"}]}])
    models = load_transformers_model(Path(cfg.model)).train(), load_transformers_model(Path(cfg.teacher.model))
    trainer: Any = FixedBatchTrainer(models[0], models[1], args, train_dataset=rows, processing_class=tokenizer)
    trainer.parts = [
        {
            "input_ids": batch.tokens,
            "attention_mask": torch.ones_like(batch.tokens),
            "labels": F.pad(batch.targets[:, :-1], (1, 0), value=IGNORE),
        }
        for batch in batches(cfg)
    ]
    trainer.train()
    expected = {name: [line[trl_name] for line in trainer.state.log_history if trl_name in line]
              for name, trl_name in (("loss", "loss"), ("grad_norm", "grad_norm"))}  # fmt: skip
    compare_with_run(cfg, expected, trainer.model)


def test_metrics_match_a_plain_loop(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, ReverseKL(temperature=2.0, kd_ratio=0.75))
    student, teacher = (
        load_transformers_model(Path(cfg.model)).train(),
        load_transformers_model(Path(cfg.teacher.model)),
    )
    optimizer = torch.optim.AdamW(student.parameters(), PROPORTIONAL_ADAMW.lr, (0.9, 0.95), PROPORTIONAL_ADAMW.eps, 0.0)
    names = ("loss", "divergence", "kl", "cross_entropy", "entropy", "teacher_entropy", "top1_agreement")
    expected: dict[str, list[float]] = {name: [] for name in names}
    for batch in batches(cfg):
        is_target = batch.targets != IGNORE
        logits = student(batch.tokens).logits[is_target]
        with torch.no_grad():
            q = (teacher(batch.tokens).logits[is_target] / 2.0).log_softmax(-1)
        p = (logits / 2.0).log_softmax(-1)
        divergence, cross_entropy = (
            (p.exp() * (p - q)).sum(-1).mean(),
            F.cross_entropy(logits, batch.targets[is_target]),
        )
        loss = 0.75 * divergence + 0.25 * cross_entropy
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), cfg.max_grad_norm)
        optimizer.step(), optimizer.zero_grad()
        entropies = [-(x.exp() * x).sum(-1).mean() for x in (p, q)]
        agreement = (p.argmax(-1) == q.argmax(-1)).float().mean()
        values = loss, divergence, (q.exp() * (q - p)).sum(-1).mean(), cross_entropy, *entropies, agreement
        for name, value in zip(names, values, strict=True):
            expected[name].append(float(value))
    compare_with_run(cfg, expected, student)


def test_student_approaches_its_teacher(tmp_path: Path) -> None:
    """A teacher of another family, whose predictions differ at first."""
    cfg = make_config(tmp_path, ForwardKL())
    distill.main(replace(cfg, max_steps=40))
    first, *_, last = [line["kl"] for line in step_metrics(cfg.output_dir)]
    assert last < first / 2
