"""Runs in a longer Python session: they resume, stop and fail without an effect on what follows."""

import gc
import json
import os
import random
import signal
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW

import tunekit
from tests.helpers.recipe_runs import Workspace, addition_rows
from tests.helpers.wait import TIMEOUT_SECONDS
from tunekit.api.result import read_metric_lines
from tunekit.models.decoder import Decoder

ROWS = [json.loads(line) for line in addition_rows(1, 10).splitlines()]
ENVIRONMENT = ("GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE", "TORCHINDUCTOR_CACHE_DIR")
SIGTERM_PROGRAM = """
import json, signal
import tunekit
def stop(metrics):
    if metrics["step"] == 2:
        signal.raise_signal(signal.SIGTERM)
keys = json.loads({keys!r})
tunekit.finetune(callbacks=[stop], **keys)
print("not reached")
"""


@pytest.fixture
def finetune(workspace: Workspace) -> Callable[..., tunekit.Run]:
    """Function that trains the tiny model on ten rows."""
    shared: dict[str, Any] = {"precision": {"compute_dtype": "fp32"}, "device": "cpu", "data": {"max_length": 64}}
    shared |= {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 6, "rows": ROWS, "model": workspace.model}
    shared |= {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.2}}
    return lambda **changes: tunekit.finetune(**(shared | changes))


def interrupt_at(step: int, number: signal.Signals = signal.SIGINT) -> Callable[[dict[str, float]], None]:
    """Callback that sends a signal after a step."""

    def interrupt(metrics: dict[str, float]) -> None:
        if metrics["step"] == step:
            signal.raise_signal(number)

    return interrupt


def test_interrupted_run_resumes_with_the_same_call(workspace: Workspace, finetune: Callable[..., tunekit.Run]) -> None:
    run = finetune(output_dir="out", callbacks=[interrupt_at(2)])
    assert not run.finished and run.metrics.index.max() == 2 and "resumes" in repr(run)
    assert "same command to resume" in workspace.capture.readouterr().err
    with pytest.raises(tunekit.UserError, match="not complete"):
        _ = run.model
    resumed = finetune(output_dir="out")
    assert resumed.finished and "resuming from step 2" in workspace.capture.readouterr().err
    finetune(output_dir="unbroken")
    assert workspace.is_same_run("out", "unbroken")


def test_other_rows_are_an_error(finetune: Callable[..., tunekit.Run]) -> None:
    finetune(output_dir="out", callbacks=[interrupt_at(2)])
    with pytest.raises(tunekit.UserError) as error:
        finetune(output_dir="out", rows=ROWS[:8])
    assert str(error.value).startswith("finetune(...): rows: ") and "8 given" in str(error.value)
    assert finetune(output_dir="out", rows=ROWS[:8], overwrite=True).finished


def test_default_directory_depends_on_keys_and_rows(finetune: Callable[..., tunekit.Run]) -> None:
    first = finetune(max_steps=1)
    assert first.directory.parent == Path("runs") and finetune(max_steps=1).directory == first.directory
    others = finetune(max_steps=1, seed=1), finetune(max_steps=1, rows=ROWS[:8])
    assert len({run.directory for run in (first, *others)}) == 3


def test_process_is_as_before(finetune: Callable[..., tunekit.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)

    def state() -> list[Any]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        randoms = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore
        switches = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
        switches += torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        return [[signal.getsignal(number) for number in numbers], dict(os.environ), randoms, switches, Path.cwd()]

    before = state()
    run = finetune(max_steps=1, deterministic=True)
    assert state() == before
    with pytest.raises(tunekit.UserError):
        finetune(max_steps=1, optimizer={"lr": "fast"})
    finetune(output_dir="out", callbacks=[interrupt_at(2)])
    assert state() == before
    model = run.model.train()
    model.chat("Hello", max_new_tokens=4)
    model.generate(["Hello"], max_new_tokens=4, temperature=1.0)
    tunekit.evaluate(model, ROWS[:2], sampling={"max_new_tokens": 4}, data={"max_length": 64})
    assert state() == before and model.training


def test_callbacks_get_all_metrics_and_change_nothing(
    workspace: Workspace, finetune: Callable[..., tunekit.Run]
) -> None:
    seen: list[dict[str, float]] = []

    def disturb(metrics: dict[str, float]) -> None:
        seen.append(dict(metrics))
        torch.manual_seed(0)
        torch.set_num_threads(1 + torch.get_num_threads())
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        metrics["loss"] = 0.0

    run = finetune(output_dir="out", eval_rows=ROWS[:2], data_checks="warn", eval_every=3, callbacks=[disturb])
    finetune(output_dir="undisturbed", eval_rows=ROWS[:2], data_checks="warn", eval_every=3)
    assert workspace.is_same_run("out", "undisturbed")
    assert [metrics["step"] for metrics in seen] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert [line["loss"] for line in read_metric_lines(run.directory) if "loss" in line] == [
        m["loss"] for m in seen if "loss" in m
    ]


def test_callbacks_are_not_part_of_the_step_time(finetune: Callable[..., tunekit.Run]) -> None:
    run = finetune(max_steps=2, callbacks=[lambda metrics: time.sleep(2)])
    assert run.metrics["step_time"].loc[2] < 1.5


def fail(metrics: dict[str, float]) -> None:
    raise KeyError("no such metric")


@pytest.mark.parametrize("callback", [fail, 3, lambda: None])
def test_errors_of_callbacks_have_one_line(finetune: Callable[..., tunekit.Run], callback: Any) -> None:
    with pytest.raises(tunekit.UserError) as error:
        finetune(callbacks=[callback])
    assert str(error.value).startswith("finetune(...): callbacks.0: ") and "\n" not in str(error.value)
    assert (f"{Path(__file__).name}:" in str(error.value)) == (callback is fail)
    assert error.value._render_traceback_() == [f"UserError: {error.value}"]


def test_errors_are_those_of_the_config(finetune: Callable[..., tunekit.Run]) -> None:
    with pytest.raises(tunekit.ConfigError) as error:
        finetune(adapter={"rnk": 4}, max_step=3)
    assert all(line.startswith("finetune(...): ") for line in error.value.lines) and len(error.value.lines) == 2
    assert not Path("runs").exists()
    with pytest.raises(tunekit.UserError, match="does not train"):
        tunekit.run("nano/generate")
    with pytest.raises(tunekit.UserError, match="dict of config keys"):
        tunekit.run("nano/tools_lora", "nano/dpo")
    with pytest.raises(tunekit.UserError, match="no recipe"):
        tunekit.run("sftt", {"model": "tunekit/nano"})
    with pytest.raises(tunekit.UserError, match="data.source"):
        finetune(data={"source": "rows.jsonl"})


def test_worker_of_a_launcher_is_an_error(
    finetune: Callable[..., tunekit.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tunekit.UserError, match="nproc-per-node"):
        finetune()


def test_changed_weights_are_not_trained_from_files(workspace: Workspace) -> None:
    model = tunekit.load(workspace.model, device="cpu")
    run = tunekit.finetune(model, ROWS, max_steps=1, data={"max_length": 64}, output_dir="out")
    assert run.config["model"] == str(workspace.model) and run.config["device"] == "cpu"
    loss = model.requires_grad_()(torch.tensor([[1, 2, 3]])).float().logsumexp(-1).sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(tunekit.UserError, match="changed in memory"):
        tunekit.finetune(model, ROWS, max_steps=1)


def test_loaded_model_is_trained_as_it_was_loaded(workspace: Workspace) -> None:
    options: dict[str, Any] = {"quantization": "nf4", "device": "cpu", "dtype": "fp32", "chat_template": "alpaca"}
    model = tunekit.load("tunekit/nano", **options)
    first = tunekit.finetune(model, ROWS, max_steps=1, data={"max_length": 64}, output_dir="first")
    config = first.config
    assert (config["quantization"]["kind"], config["data"]["chat_template"]) == ("nf4", "alpaca")
    assert config["precision"]["compute_dtype"] == "auto"
    lines = tunekit.generate(model, ROWS[:2], sampling={"max_new_tokens": 4})
    assert [line["answer"] for line in lines] == model.generate(
        [[row["messages"][0]] for row in ROWS[:2]], max_new_tokens=4
    )
    continued = tunekit.load("tunekit/nano", adapter=first.directory, device="cpu")
    second = tunekit.finetune(continued, ROWS, max_steps=1, data={"max_length": 64}, output_dir="second")
    assert second.config["adapter"]["adapter_path"] == str(first.directory / "final")
    with pytest.raises(tunekit.UserError, match="adapter alone"):
        tunekit.generate(continued, ROWS[:2])


def test_runs_are_freed(finetune: Callable[..., tunekit.Run]) -> None:
    existing = weakref.WeakSet(find_models_and_optimizers())  # of other tests
    finetune(output_dir="stopped", callbacks=[interrupt_at(2)])
    run = finetune(output_dir="out")
    with pytest.raises(tunekit.UserError):
        finetune(output_dir="failed", callbacks=[fail])
    run.chat("Hello", max_new_tokens=2)
    del run
    assert not [item for item in find_models_and_optimizers() if item not in existing]


def find_models_and_optimizers() -> list[Decoder | AdamW]:
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, Decoder | AdamW)]


def test_runs_in_other_threads(finetune: Callable[..., tunekit.Run]) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(finetune, output_dir="out", max_steps=1).result().finished


def test_other_signals_end_the_process_after_the_state_is_saved(workspace: Workspace) -> None:
    keys = {"model": str(workspace.model), "rows": ROWS, "output_dir": "out", "device": "cpu", "max_steps": 6}
    code = SIGTERM_PROGRAM.format(keys=json.dumps(keys | {"data": {"max_length": 64}}))
    process = workspace.start("ls", setup=code)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == -signal.SIGTERM
    assert "stopped by SIGTERM after step 2" in workspace.log and "not reached" not in workspace.log
    assert [path.name for path in (workspace.folder / "out/state").iterdir()] == ["00000002"]
