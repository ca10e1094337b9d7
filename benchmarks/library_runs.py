"""Contestants that run the same training: how they are started, their results, and parts of a report."""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from stage import Task, write

from tunekit.env_info import package_versions

BENCHMARKS = Path(__file__).parent
PACKAGES = ("torch", "tunekit", "transformers", "peft", "trl", "bitsandbytes", "torchtune", "torchao")


@dataclass(frozen=True)
class RunSetup:
    """Directories, Python interpreters, and a command prefix for all processes."""

    folder: Path
    command_prefix: tuple[str, ...]  # such as numactl, or a lock
    pythons: Mapping[str, str]

    @classmethod
    def from_args(cls, args: argparse.Namespace, folder: str, **pythons: str) -> Self:
        return cls(Path(folder), tuple(shlex.split(args.command_prefix)), pythons)


@dataclass
class ContestantResult:
    """Measurements of one contestant in one task, over all rounds."""

    name: str
    seconds: list[list[float]] = field(default_factory=list)  # of the measured steps, by round
    losses: list[float] = field(default_factory=list)  # by step
    peaks: list[int] = field(default_factory=list)  # bytes at the last step, by round
    process_peaks: list[int] = field(default_factory=list)  # bytes, including startup and shutdown
    versions: dict[str, str] = field(default_factory=dict)
    threads: int = 0
    fault: str = ""

    @property
    def step(self) -> float:
        return statistics.median(s for round in self.seconds for s in round)

    @property
    def memory(self) -> tuple[float, float]:
        """GiB at the last step, and of the whole process."""
        return statistics.median(self.peaks) / 2**30, statistics.median(self.process_peaks) / 2**30

    def add_run(self, measured: dict, process_bytes: int, drop: int) -> None:
        self.seconds.append(measured["seconds"][drop:])
        self.losses = measured["losses"]
        self.peaks.append(measured["peak"])
        self.process_peaks.append(process_bytes)
        self.versions, self.threads = measured["versions"], measured["threads"]


def add_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """Arguments of all comparison benchmarks."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--drop", type=int, default=2, help="first steps that do not count")
    parser.add_argument("--layers", type=int, default=30, help="fewer, for a quick look")
    parser.add_argument(
        "--under", default="", metavar="COMMAND", help="what each process is started by, such as a lock"
    )
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results")


def tunekit_config(setup: RunSetup, task: Task, **options: Any) -> dict:
    """Config of tunekit, with `options` of one recipe."""
    full = task.method == "full"
    return {
        "model": str(setup.folder / "model"),
        "quantization": "nf4" if task.method == "qlora" else "none",
        "optimizer": {"kind": "adamw", "lr": task.lr, "betas": [0.9, 0.999]},
        "lr_scheduler": "constant",
        "precision": {"compute_dtype": "bf16", "master_dtype": "bf16" if full else "fp32", "frozen_dtype": "bf16"},
        "global_batch_size": task.batch,
        "micro_batch_size": task.batch,
        "max_steps": task.steps,
        "device": "cpu",
    } | options


def run_tunekit(setup: RunSetup, config: dict, folder: Path, overrides: tuple[str, ...] = ()) -> tuple[dict, int]:
    """Run `tune run`. Measurements of its metrics.jsonl, and the peak bytes of the process."""
    recipe, out = config["recipe"], folder / f"run{time.time_ns()}"
    file = folder / f"{recipe}.yaml"
    write(file, config)  # JSON is YAML
    command = Path(sys.executable).with_name("tune")
    process_bytes = run_process(setup, [str(command), "run", recipe, str(file), f"output_dir={out}", *overrides])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line]
    totals = [0, *(step["num_target_tokens"] for step in steps)]
    measured = {
        "seconds": [step["step_time"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "target_tokens": [after - before for before, after in pairwise(totals)],
    }
    shutil.rmtree(out)  # gigabytes a run
    peak, threads = steps[-1]["peak_memory"], torch.get_num_threads()
    return measured | {"peak": peak, "versions": package_versions(), "threads": threads}, process_bytes


def run_contestant(setup: RunSetup, name: str, kind: str, folder: Path) -> tuple[dict, int]:
    """Run the script of a contestant; "trl, wrapped" is trl with `--wrapped`."""
    script, *flags = name.split(", ")
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    command = [
        setup.pythons[script],
        str(BENCHMARKS / "contestants" / f"{script}_{kind}.py"),
        str(setup.folder),
        str(folder),
    ]
    process_bytes = run_process(setup, [*command, str(out), *(f"--{flag}" for flag in flags)])
    return json.loads(out.read_text()), process_bytes


def run_process(setup: RunSetup, command: list[str]) -> int:
    """Run a command; return its peak resident bytes."""
    log = setup.folder / "txt"
    with log.open("w") as stream:
        process = subprocess.Popen([*setup.command_prefix, *command], stdout=stream, stderr=stream, cwd=setup.folder)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        messages = [text for text in log.read_text().splitlines() if text.strip()]
        raise RuntimeError(f"exit {process.returncode}: {messages[-1] if messages else 'nothing said'}")
    return used.ru_maxrss * 1024


def format_versions(results: Iterable[ContestantResult]) -> str:
    """Names and versions of the packages of all contestants."""
    versions = {name: version for result in results for name, version in result.versions.items()}
    return ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)


def format_steps(results: Sequence[ContestantResult]) -> str:
    """Text after a table: failures, and all measured steps."""
    text = "".join(f"\n{f.name} failed: {f.fault}\n" for f in results if f.fault)
    text += "\nSeconds of all kept steps, by round:\n\n"
    for f in results:
        if f.seconds:
            text += f"- {f.name}: " + "; ".join(" ".join(f"{s:.2f}" for s in round) for round in f.seconds) + "\n"
    return text
