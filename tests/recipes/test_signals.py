"""A run that is stopped saves its state, prints how to resume, and ends with the exit code that shells expect."""

import os
import signal

import pytest

from tests.helpers.wait import TIMEOUT_SECONDS, wait_until
from tunekit.distributed.signals import STOP_SIGNALS

RUN = ("run", "sft", "sft.yaml")
LONG = (*RUN, "max_steps=30", "eval_every=100")
# Slow steps, so that a signal after the first one arrives before the last.
SLOW_STEPS = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from tunekit.loggers.metric_logger import MetricLogger
step = MetricLogger.log_step
MetricLogger.log_step = lambda *args, **more: (step(*args, **more), time.sleep(0.5))
"""
# The evaluation before training is fast; the first forward pass of the next one takes longer than the test waits.
SLOW_EVALUATION = """
import time
from tunekit.models.decoder import Decoder
from tunekit.recipes import sft
evaluate, forward, delays = sft.evaluate, Decoder.forward, iter((0, 3600))

def evaluate_slowly(*args):
    delay = next(delays)
    Decoder.forward = lambda *values, **options: (forward(*values, **options), time.sleep(delay))[0]
    metrics = evaluate(*args)
    Decoder.forward = forward
    return metrics

sft.evaluate = evaluate_slowly
"""
# Creates a file when generation starts.
MARK_FIRST_ANSWER = """
from pathlib import Path
from tunekit.recipes import generate
answers = generate.generate_answers
generate.generate_answers = lambda *args: (Path("answering").touch(), answers(*args))[1]
"""


def has_taken_a_step(workspace, out="out"):
    """Whether a run has taken a step."""
    metrics = workspace.folder / out / "metrics.jsonl"
    return metrics.is_file() and '"loss"' in metrics.read_text()  # not "eval/loss" of the evaluation before training


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_signal_saves_and_the_same_command_resumes(workspace, number):
    process = workspace.start(*LONG, setup=SLOW_STEPS)
    wait_until(lambda: has_taken_a_step(workspace), process)
    os.kill(process.pid, number)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 128 + number
    last = workspace.log.splitlines()[-1]
    states = [path.name for path in (workspace.folder / "out/state").iterdir()]
    assert states == [f"{workspace.deterministic_metrics('out')[-1]['step']:08d}"], (
        "the state of the last step is saved"
    )
    assert last.startswith(f"stopped by {number.name} after step {int(states[0])} of 30")
    assert "same command" in last
    assert "Traceback" not in workspace.log
    assert not (workspace.folder / "out/final").exists()
    assert workspace.run_tune(*LONG).code == 0
    assert workspace.run_tune(*LONG, "output_dir=unbroken").code == 0
    assert workspace.is_same_run("out", "unbroken")


def test_second_signal_ends_immediately(workspace):
    """A long evaluation is interrupted."""
    process = workspace.start(*RUN, "eval_every=1", "save_every=1", setup=SLOW_EVALUATION)
    wait_until(lambda: has_taken_a_step(workspace), process)
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: "ends the run at once" in workspace.log, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 130
    assert "Traceback" not in workspace.log
    assert not list((workspace.folder / "out").glob("state/*"))


def test_signal_before_the_first_step_ends_immediately(workspace):
    """There is nothing to save."""
    (workspace.folder / "rows.jsonl").write_text((workspace.folder / "rows.jsonl").read_text() * 4000)
    process = workspace.start(*RUN)
    wait_until((workspace.folder / "out/config.yaml").exists, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 130
    assert not has_taken_a_step(workspace)
    assert "Traceback" not in workspace.log


def test_signal_ends_generation(workspace):
    """Recipes without state end at the first signal."""
    questions = ", ".join(["Why"] * 400)
    config = f"model: {workspace.model}\nprompts: [{questions}]\nmax_num_seqs: 1\ndevice: cpu\n"
    config += "sampling: {max_new_tokens: 500}\n"
    (workspace.folder / "generate.yaml").write_text(config)
    process = workspace.start("run", "generate", "generate.yaml", "output_path=answers.jsonl", setup=MARK_FIRST_ANSWER)
    wait_until((workspace.folder / "answering").exists, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 130
    assert not (workspace.folder / "answers.jsonl").exists()


def test_stop_file_stops_the_run(workspace):
    (workspace.folder / "out").mkdir()
    (workspace.folder / "out/stop").touch()  # left by an earlier run
    process = workspace.start(*LONG, setup=SLOW_STEPS)
    wait_until(lambda: has_taken_a_step(workspace), process)
    (workspace.folder / "out/stop").touch()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 143
    assert "the file out/stop: saving after this step" in workspace.log
    assert "stopped by the file out/stop after step" in workspace.log and "stopped by SIGTERM" not in workspace.log
    assert not (workspace.folder / "out/stop").exists()
