"""Event files for TensorBoard."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

REFUSED = (OSError,)


class Logger:
    def __init__(self, choice, folder: Path, start: int, resolved: Mapping) -> None:
        place = folder / "tensorboard" if choice.log_dir is None else Path(choice.log_dir)
        self.writer = SummaryWriter(str(place), purge_step=start + 1)
        self.writer.add_text("config", f"```\n{json.dumps(resolved, indent=2, default=str)}\n```", start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()
