"""Comet."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import comet_ml

from tunekit.loggers.run_id import run_id

REFUSED = (OSError, ValueError)


class Logger:
    def __init__(self, choice, folder: Path, start: int, resolved: Mapping) -> None:
        place = folder / "comet"
        self.experiment = comet_ml.start(
            project=choice.project,
            workspace=choice.workspace,
            experiment_key=run_id(place, lambda: uuid4().hex),
            online=not choice.offline,
            experiment_config=comet_ml.ExperimentConfig(
                name=choice.name or folder.resolve().name,
                offline_directory=str(place),
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

    def close(self) -> None:
        self.experiment.end()
