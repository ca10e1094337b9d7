"""Logger for Comet."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import comet_ml

from tunekit.loggers.markdown import Rows, to_markdown
from tunekit.loggers.run_id import run_id

OPEN_ERRORS = (OSError, ValueError)


class Logger:
    def __init__(self, config, folder: Path, start: int, resolved: Mapping) -> None:
        directory = folder / "comet"
        self.experiment = comet_ml.start(
            project=config.project,
            workspace=config.workspace,
            experiment_key=run_id(directory, lambda: uuid4().hex),
            online=not config.offline,
            experiment_config=comet_ml.ExperimentConfig(
                name=config.name or folder.resolve().name,
                offline_directory=str(directory),
                auto_output_logging="",
                auto_param_logging=False,
                auto_metric_logging=False,
                log_code=False,
                log_git_patch=False,
                parse_args=False,
            ),
        )
        self.experiment.log_parameters(dict(resolved))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.experiment.log_metrics(dict(values), step=step)

    def log_completions(self, step: int, rows: Rows) -> None:
        self.experiment.log_text(to_markdown(rows), step=step)

    def close(self) -> None:
        self.experiment.end()
