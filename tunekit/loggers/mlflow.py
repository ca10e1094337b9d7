"""MLflow."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from tunekit.loggers.run_id import run_id

PARAMS = 100  # at most in one call


class Logger:
    def __init__(self, choice, folder: Path, start: int, resolved: Mapping) -> None:
        place = folder / "mlflow"
        self.client = MlflowClient(choice.uri or os.environ.get("MLFLOW_TRACKING_URI") or place.resolve().as_uri())
        known = self.client.get_experiment_by_name(choice.experiment)
        experiment = known.experiment_id if known else self.client.create_experiment(choice.experiment)
        name = choice.name or folder.resolve().name
        self.id = run_id(place, lambda: self.client.create_run(experiment, run_name=name).info.run_id)
        params = [Param(key, str(value)[:500]) for key, value in flat(resolved)]
        for first in range(0, len(params), PARAMS):
            self.client.log_batch(self.id, params=params[first : first + PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.id)


def flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
