"""Logger for MLflow."""

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from tunekit.loggers.markdown import Rows, to_markdown
from tunekit.loggers.run_id import run_id

OPEN_ERRORS = (MlflowException,)
PARAMS = 100  # maximum per call


class Logger:
    def __init__(self, config, folder: Path, start: int, resolved: Mapping) -> None:
        directory = folder / "mlflow"
        directory.mkdir(parents=True, exist_ok=True)
        default_uri = f"sqlite:///{directory.resolve()}/mlflow.db"
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(uri or default_uri)
        # The default of mlflow is a directory `mlruns` in the current one.
        artifacts = None if uri else (directory.resolve() / "artifacts").as_uri()
        experiment_entity = self.client.get_experiment_by_name(config.experiment_name)
        experiment = (
            experiment_entity.experiment_id
            if experiment_entity
            else self.client.create_experiment(config.experiment_name, artifact_location=artifacts)
        )
        name = config.run_name or folder.resolve().name
        self.id = run_id(directory, lambda: self.client.create_run(experiment, run_name=name).info.run_id)
        self.sent = None
        logged = self.client.get_run(self.id).data.params  # immutable, but some differ when a run is resumed
        params = [Param(key, str(value)[:500]) for key, value in flatten(resolved) if key not in logged]
        for offset in range(0, len(params), PARAMS):
            self.client.log_batch(self.id, params=params[offset : offset + PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        # names must not contain @, as in cosine_ndcg@10
        metrics = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self.sent = self.client.log_batch(self.id, metrics=metrics, synchronous=False)

    def log_completions(self, step: int, rows: Rows) -> None:
        try:
            self.client.log_text(self.id, to_markdown(rows), f"completions/step_{step}.md")
        except MlflowException as error:
            warnings.warn(f"mlflow: the answers of step {step} were not sent: {error}", stacklevel=2)

    def close(self) -> None:
        """Finish the run. Errors are only warnings, because `metrics.jsonl` has all metrics."""
        try:
            if self.sent is not None:
                self.sent.wait()
            self.client.set_terminated(self.id)
        except MlflowException as error:
            warnings.warn(f"mlflow: some metrics were not sent: {error}", stacklevel=2)


def flatten(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
