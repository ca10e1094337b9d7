"""A run that is told to stop saves, says how to go on, and leaves with the exit code that a shell expects."""

import os
import signal

import pytest

from tests.waiting import TIMEOUT_SECONDS, wait_until

RUN = ("run", "sft", "sft.yaml")
LONG = (*RUN, "max_steps=60", "save_every=100", "eval_every=100")
# Steps take their time: whoever sends a signal behind the first comes before the last.
SLOW = """
import time
from tunekit.loggers.metric_logger import MetricLogger
step = MetricLogger.step
MetricLogger.step = lambda *args, **more: (step(*args, **more), time.sleep(0.5))
"""
# Tells when the first prompt is answered.
TOLD = """
from pathlib import Path
from tunekit.recipes import generate
answers = generate.generate_all
generate.generate_all = lambda *args: (Path("answering").touch(), answers(*args))[1]
"""


def begun(work, out="out"):
    """Whether a run has taken a step."""
    metrics = work.folder / out / "metrics.jsonl"
    return metrics.is_file() and "loss" in metrics.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_saves_and_the_same_command_goes_on(work, number):
    process = work.start(*LONG, first=SLOW)
    wait_until(lambda: begun(work), process)
    os.kill(process.pid, number)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 128 + number
    last = work.log.splitlines()[-1]
    states = [path.name for path in (work.folder / "out/state").iterdir()]
    assert states == [f"{work.numbers('out')[-1]['step']:08d}"], "it has saved where it stopped"
    assert last.startswith(f"stopped by {number.name} after step {int(states[0])} of 60")
    assert "the same command goes on" in last
    assert "Traceback" not in work.log
    assert not (work.folder / "out/final").exists()
    assert work.tune(*LONG).code == 0
    assert work.tune(*LONG, "output_dir=unbroken").code == 0
    assert work.same("out", "unbroken")


def test_the_second_one_leaves_at_once(work):
    """While validation takes long, nobody has to wait for it."""
    (work.folder / "held.jsonl").write_text((work.folder / "held.jsonl").read_text() * 2000)
    process = work.start(*RUN, "eval_every=1", "save_every=1")
    wait_until(lambda: begun(work), process)
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: "once more leaves at once" in work.log, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 130
    assert "Traceback" not in work.log
    assert not list((work.folder / "out").glob("state/*"))


def test_before_the_first_step_a_signal_leaves_at_once(work):
    """Nothing is there to save yet."""
    (work.folder / "rows.jsonl").write_text((work.folder / "rows.jsonl").read_text() * 4000)
    process = work.start(*RUN)
    wait_until((work.folder / "out/config.yaml").exists, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 130
    assert not begun(work)
    assert "Traceback" not in work.log


def test_asking_a_model_can_be_stopped(work):
    """Recipes that have nothing to save end at the first signal."""
    questions = ", ".join(["Why"] * 400)
    config = f"model: {work.model}\nprompts: [{questions}]\nbatch_size: 1\ndevice: cpu\n"
    config += "sampling: {max_new_tokens: 500}\n"
    (work.folder / "generate.yaml").write_text(config)
    process = work.start("run", "generate", "generate.yaml", "output_path=answers.jsonl", first=TOLD)
    wait_until((work.folder / "answering").exists, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 130
    assert not (work.folder / "answers.jsonl").exists()


def test_a_file_in_the_folder_stops_the_run(work):
    (work.folder / "out").mkdir()
    (work.folder / "out/stop").touch()  # of an earlier run, which had ended before
    process = work.start(*LONG, first=SLOW)
    wait_until(lambda: begun(work), process)
    (work.folder / "out/stop").touch()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 143
    assert "the file out/stop: ending this step and saving" in work.log
    assert "stopped by the file out/stop after step" in work.log and "stopped by SIGTERM" not in work.log
    assert not (work.folder / "out/stop").exists()
