"""Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import wandb

from tunekit.loggers.run_id import run_id

REFUSED = (wandb.Error,)


class Logger:
    def __init__(self, choice, folder: Path, start: int, resolved: Mapping) -> None:
        self.run = wandb.init(
            project=choice.project,
            name=choice.name or folder.resolve().name,
            group=choice.group,
            entity=choice.entity,
            mode="offline" if choice.offline else "online",
            id=run_id(folder / "wandb", lambda: uuid4().hex),
            resume="allow",
            dir=str(folder),
            config=dict(resolved),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()
