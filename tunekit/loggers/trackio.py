"""Logger for Trackio."""

from collections.abc import Mapping
from pathlib import Path

import pandas
import trackio

from tunekit.loggers.markdown import Rows, to_table

OPEN_ERRORS = (OSError, ValueError)


class Logger:
    def __init__(self, config, folder: Path, start: int, resolved: Mapping) -> None:
        self.run = trackio.init(
            project=config.project,
            name=config.name or folder.resolve().name,
            group=config.group,
            space_id=config.space_id,
            config=dict(resolved),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def log_completions(self, step: int, rows: Rows) -> None:
        columns, data = to_table(rows)
        table = trackio.Table(dataframe=pandas.DataFrame(data, columns=columns))
        self.run.log({"completions": table}, step=step)

    def close(self) -> None:
        self.run.finish()
