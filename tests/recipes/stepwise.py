"""Steps beside those of another trainer: rows of many lengths, what TRL is told, and what our steps have shown."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from tests.checkpoints import FP32
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.loggers import metric_logger
from tunekit.optim.config import AdamWConfig, ConstantLRConfig
from tunekit.training.config import TrainConfig

STEPS, BATCH = 3, 4
# What the configs say, whatever the method.
PLAIN: dict[str, Any] = {
    "lr_scheduler": ConstantLRConfig(),
    "precision": FP32,
    "device": "cpu",
    "global_batch_size": BATCH,
    "micro_batch_size": 2,
    "max_steps": STEPS,
}
# A larger epsilon leaves steps of Adam in proportion where gradients are nearly zero.
STEADY = AdamWConfig(lr=0.05, eps=0.1)


def texts() -> Callable[[int, int], str]:
    """Makes texts of `low` words and more, but fewer than `high`; the same ones in each test."""
    draw = torch.Generator().manual_seed(7)

    def words(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=draw))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=draw))

    return words


def written(folder: Path, rows: Iterable[dict[str, Any]]) -> str:
    """A file of rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def whole_steps(cfg: TrainConfig) -> DataLoader:
    """The rows of a config, of which a step is one micro-batch."""
    return build_dataloader(
        cfg.data,
        Tokenizer.open(Path(cfg.model)),
        cfg.global_batch_size,
        cfg.global_batch_size,
        DistributedContext(cfg.seed, "cpu"),
    )


def figures(run: str | Path) -> list[dict[str, Any]]:
    """What each step of a run has shown."""
    return [line for line in metric_logger.read_metrics(Path(run)) if "loss" in line]


def told(cfg: TrainConfig) -> dict[str, Any]:
    """What TRL is told to take the steps of a config, and to show each."""
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


def in_order(kind: Any) -> Any:
    """A trainer of TRL that does not shuffle."""

    class InOrder(kind):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder
