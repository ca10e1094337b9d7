"""Logger for TensorBoard event files."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from tunekit.loggers.markdown import Rows, to_markdown

OPEN_ERRORS = (OSError,)


class Logger:
    def __init__(self, config, folder: Path, start: int, resolved: Mapping) -> None:
        directory = folder / "tensorboard" if config.log_dir is None else Path(config.log_dir)
        self.writer = SummaryWriter(str(directory), purge_step=start + 1)
        self.writer.add_text("config", f"```\n{json.dumps(resolved, indent=2, default=str)}\n```", start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def log_completions(self, step: int, rows: Rows) -> None:
        self.writer.add_text("completions", to_markdown(rows), step)

    def close(self) -> None:
        self.writer.close()
