"""Each service receives the values of `metrics.jsonl`, without a network. A missing package is a one-line error."""

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tunekit.distributed.loss_scaler import LossScaler
from tunekit.errors import UserError
from tunekit.loggers.metric_logger import (
    CometConfig,
    MetricLogger,
    MLflowConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)

MAIN = SimpleNamespace(
    is_main_process=True,
    device=torch.device("cpu"),
    rank=0,
    max_over_ranks=lambda *values: [*values],
    sum_each_count=lambda *counts: [*counts],
    loss_scaler=LossScaler(),
)
COMPLETION = {"prompt": "a|b?", "completion": "two `lines`\nof text", "expected": None}
RESOLVED = {"seed": 1, "optimizer": {"kind": "adamw", "lr": 1e-4}}
PACKAGES = {
    TensorBoardConfig: "tensorboard",
    WandBConfig: "wandb",
    MLflowConfig: "mlflow",
    TrackioConfig: "trackio",
    CometConfig: "comet_ml",
}


def train(folder, service, first, last, resolved=RESOLVED):
    with MetricLogger(folder, MAIN, num_steps=4, report_to=(service,), start=first, resolved=resolved) as logger:
        for step in range(first + 1, last + 1):
            batch = SimpleNamespace(num_tokens=10, num_target_tokens=4)
            logger.log_step(step, [batch], 0.0, loss=1 / step, grad_norm=2.0, lr=1e-4)
        logger.log(last, validation_loss=0.5)
        logger.log_completions(last, [COMPLETION], 1)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("kind", PACKAGES)
def test_missing_package_names_the_extra(tmp_path, monkeypatch, kind):
    package, module = PACKAGES[kind], f"tunekit.loggers.{kind.kind}"
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == module]:
        monkeypatch.delitem(sys.modules, name)
    if kind is TensorBoardConfig:
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    expected = rf"report_to: .*{package}.*'tunekit\[{kind.kind}\]'"
    with pytest.raises(UserError, match=expected):
        MetricLogger(tmp_path / "run", MAIN, num_steps=1, report_to=(kind(),))
    assert not (tmp_path / "run").exists()


def test_packages_of_unused_services_are_not_imported():
    code = f"import sys, tunekit.loggers.metric_logger; assert not {{*sys.modules}} & {set(PACKAGES.values())}"
    subprocess.run([sys.executable, "-c", code], check=True)


def requires(package):
    return pytest.mark.skipif(PathFinder.find_spec(package) is None, reason=f"{package} is not installed")


@requires("tensorboard")
def test_tensorboard_receives_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, TensorBoardConfig(), 0, 3)
    train(tmp_path, TensorBoardConfig(), 2, 4)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert {point.step: point.value for point in read.Scalars("loss")} == pytest.approx(losses(tmp_path))
    assert [point.step for point in read.Scalars("loss")] == [1, 2, 3, 4]
    assert read.Scalars("validation_loss")[-1].value == 0.5
    assert "adamw" in str(read.Tensors("config/text_summary")[0])
    texts = {
        point.step: point.tensor_proto.string_val[0].decode() for point in read.Tensors("completions/text_summary")
    }
    assert sorted(texts) == [3, 4] and "a\\|b?" in texts[4] and "two `lines`↵of text" in texts[4]


@requires("mlflow")
def test_mlflow_receives_the_metrics(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train(tmp_path / "run", MLflowConfig(experiment_name="tries"), 0, 2)
    train(
        tmp_path / "run", MLflowConfig(experiment_name="tries"), 2, 4, RESOLVED | {"seed": 2}
    )  # mlflow takes no other value
    client = MlflowClient(f"sqlite:///{tmp_path}/run/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("tries").experiment_id])
    points = client.get_metric_history(run.info.run_id, "loss")
    assert {point.step: point.value for point in points} == pytest.approx(losses(tmp_path / "run"))
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["optimizer.lr"] == "0.0001"
    names = [file.path for file in client.list_artifacts(run.info.run_id, "completions")]
    assert names == ["completions/step_2.md", "completions/step_4.md"]
    assert (tmp_path / f"run/mlflow/artifacts/{run.info.run_id}/artifacts/completions/step_4.md").is_file()


@requires("mlflow")
def test_unreachable_service_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=r"report_to: mlflow cannot be opened: .*127\.0\.0\.1") as caught:
        train(tmp_path / "run", MLflowConfig(tracking_uri="http://127.0.0.1:9"), 0, 2)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def train_in_two_parts(folder: Path, service: object, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    train(folder, service, 0, 2)
    train(folder, service, 2, 4)


def train_in_subprocess(tmp_path, service, **environment):
    """Train in a subprocess, because some services modify the interpreter that imports them."""
    run_ranks(1, train_in_two_parts, tmp_path / "run", service, environment)
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]


@requires("wandb")
def test_wandb_offline_receives_the_metrics(tmp_path):
    train_in_subprocess(tmp_path, WandBConfig(project="tries", offline=True), HOME=str(tmp_path))
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    name = (tmp_path / "run" / "wandb" / "run-id").read_text()
    assert files
    assert all(name in file.name for file in files)
    assert any(b"validation_loss" in file.read_bytes() for file in files)
    tables = list((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/*.table.json"))
    contents = [json.loads(table.read_text()) for table in tables]
    assert contents == [{"columns": list(COMPLETION), "data": [["a|b?", COMPLETION["completion"], ""]]}] * 2


@requires("wandb")
def test_missing_token_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"report_to: wandb cannot be opened: .*wandb login"):
        train(tmp_path / "run", WandBConfig(), 0, 2)


@requires("trackio")
def test_trackio_receives_the_metrics(tmp_path):
    import sqlite3

    train_in_subprocess(
        tmp_path,
        TrackioConfig(project="tries"),
        TRACKIO_DIR=str(tmp_path / "data"),
        HF_HUB_OFFLINE="1",
        HOME=str(tmp_path),
    )
    (file,) = (tmp_path / "data").glob("tries*.db")
    with sqlite3.connect(file) as base:
        rows = [(step, json.loads(values)) for step, values in base.execute("SELECT step, metrics FROM metrics")]
    logged = {step: values["loss"] for step, values in rows if "loss" in values}
    assert logged == pytest.approx(losses(tmp_path / "run"))
    assert [step for step, values in rows if "completions" in values] == [2, 4]


@requires("comet_ml")
def test_comet_offline_receives_the_metrics(tmp_path):
    import zipfile

    train_in_subprocess(tmp_path, CometConfig(project="tries", offline=True), HOME=str(tmp_path))
    files = list((tmp_path / "run" / "comet").glob("*.zip"))
    assert files
    text = b"".join(zipfile.ZipFile(file).read("messages.json") for file in files)
    assert b"validation_loss" in text
    archives = [zipfile.ZipFile(file) for file in files]
    contents = [archive.read(name) for archive in archives for name in archive.namelist()]
    assert sum(b"two `lines`" in content for content in contents) == 2
