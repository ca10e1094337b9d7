"""MLflow."""

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from tunekit.loggers.run_id import run_id

REFUSED = (MlflowException,)
PARAMS = 100  # at most in one call


class Logger:
    def __init__(self, choice, folder: Path, start: int, resolved: Mapping) -> None:
        place = folder / "mlflow"
        place.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{place.resolve()}/mlflow.db"
        self.client = MlflowClient(choice.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own)
        there = self.client.get_experiment_by_name(choice.experiment_name)
        experiment = there.experiment_id if there else self.client.create_experiment(choice.experiment_name)
        name = choice.run_name or folder.resolve().name
        self.id = run_id(place, lambda: self.client.create_run(experiment, run_name=name).info.run_id)
        self.sent = None
        known = self.client.get_run(self.id).data.params  # no value may change, and some do between two starts of a run
        params = [Param(key, str(value)[:500]) for key, value in flat(resolved) if key not in known]
        for first in range(0, len(params), PARAMS):
            self.client.log_batch(self.id, params=params[first : first + PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self.sent = self.client.log_batch(self.id, metrics=metrics, synchronous=False)

    def close(self) -> None:
        """A server that went away costs curves, not the run: `metrics.jsonl` has the numbers."""
        try:
            if self.sent is not None:
                self.sent.wait()
            self.client.set_terminated(self.id)
        except MlflowException as error:
            warnings.warn(f"mlflow has not got all numbers: {error}", stacklevel=2)


def flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
