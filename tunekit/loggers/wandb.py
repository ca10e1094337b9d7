"""Logger for Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import wandb

from tunekit.loggers.markdown import Rows, to_table
from tunekit.loggers.run_id import run_id

OPEN_ERRORS = (wandb.Error,)


class Logger:
    def __init__(self, config, folder: Path, start: int, resolved: Mapping) -> None:
        self.run = wandb.init(
            project=config.project,
            name=config.name or folder.resolve().name,
            group=config.group,
            entity=config.entity,
            mode="offline" if config.offline else "online",
            id=run_id(folder / "wandb", lambda: uuid4().hex),
            resume="allow",
            dir=str(folder),
            config=dict(resolved),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def log_completions(self, step: int, rows: Rows) -> None:
        columns, data = to_table(rows)
        self.run.log({"completions": wandb.Table(columns=[*columns], data=[*data])}, step=step)

    def close(self) -> None:
        self.run.finish()
