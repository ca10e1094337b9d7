"""Helpers for comparisons with TRL trainers: rows of many lengths, TRL options for a config, and metrics of each
step.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from tests.helpers.random_checkpoints import FP32
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.loggers import metrics_file
from tunekit.optim.config import AdamWConfig, ConstantLRConfig
from tunekit.training.config import TrainConfig

STEPS, BATCH = 3, 4
# Config values of all methods.
SHARED_OPTIONS: dict[str, Any] = {
    "lr_scheduler": ConstantLRConfig(),
    "precision": FP32,
    "device": "cpu",
    "global_batch_size": BATCH,
    "micro_batch_size": 2,
    "max_steps": STEPS,
}
# A large epsilon makes steps of Adam proportional to gradients, whose direction near zero is rounding error.
PROPORTIONAL_ADAMW = AdamWConfig(lr=0.05, eps=0.1)


def make_text_generator() -> Callable[[int, int], str]:
    """Function that makes random texts of `low` to `high` - 1 words, reproducibly."""
    generator = torch.Generator().manual_seed(7)

    def random_text(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=generator))

    return random_text


def write_rows(folder: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write rows to a file and return its path."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def open_full_steps(cfg: TrainConfig) -> DataLoader:
    """Data loader of a config with one micro-batch per step."""
    return build_dataloader(
        cfg.data,
        Tokenizer.open(Path(cfg.model)),
        cfg.global_batch_size,
        cfg.global_batch_size,
        DistributedContext(cfg.seed, "cpu"),
    )


def step_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Metrics of each step of a run."""
    return [line for line in metrics_file.read_metrics(Path(run)) if "loss" in line]


def trl_options(cfg: TrainConfig) -> dict[str, Any]:
    """Options of a TRL trainer that takes the steps of a config and logs each."""
    optimizer: dict[str, Any] = {"optim": "sgd"}
    if isinstance(cfg.optimizer, AdamWConfig):
        optimizer = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": cfg.optimizer.eps}
    return {
        "output_dir": str(Path(cfg.output_dir).with_name("theirs")),
        "per_device_train_batch_size": cfg.global_batch_size,
        "max_steps": cfg.max_steps,
        "learning_rate": cfg.optimizer.lr,
        "lr_scheduler_type": "constant",
        **optimizer,
        "weight_decay": 0.0,
        "max_grad_norm": cfg.max_grad_norm,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def unshuffled(trainer_class: Any) -> Any:
    """Subclass of a TRL trainer that does not shuffle."""

    class InOrder(trainer_class):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder
