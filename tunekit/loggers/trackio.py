"""trackio."""

from collections.abc import Mapping
from pathlib import Path

import trackio

REFUSED = (OSError, ValueError)


class Logger:
    def __init__(self, choice, folder: Path, start: int, resolved: Mapping) -> None:
        self.run = trackio.init(
            project=choice.project,
            name=choice.name or folder.resolve().name,
            group=choice.group,
            space_id=choice.space_id,
            config=dict(resolved),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()
