"""Training runs of the compared libraries: how they are started, their measurements, and parts of their reports."""

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
from reporting import BENCHMARKS, RESULTS
from training_inputs import TrainingTask, write_json

from tunekit.env_info import package_versions

PACKAGES = ("torch", "tunekit", "transformers", "peft", "trl", "bitsandbytes", "torchtune", "torchao")


@dataclass(frozen=True)
class RunSetup:
    """Directory of all files, a command prefix for all processes, and the Python interpreter of each library."""

    directory: Path
    command_prefix: tuple[str, ...]  # such as numactl, or a lock
    pythons: Mapping[str, str]

    @classmethod
    def from_args(cls, args: argparse.Namespace, directory: str, **pythons: str) -> Self:
        return cls(Path(directory), tuple(shlex.split(args.command_prefix)), pythons)


@dataclass
class LibraryResult:
    """Measurements of one library in one task, over all rounds."""

    name: str
    seconds: list[list[float]] = field(default_factory=list)  # of the measured steps, by round
    losses: list[float] = field(default_factory=list)  # by step
    peaks: list[int] = field(default_factory=list)  # bytes at the last step, by round
    process_peaks: list[int] = field(default_factory=list)  # bytes, including startup and shutdown
    versions: dict[str, str] = field(default_factory=dict)
    threads: int = 0
    error: str = ""

    @property
    def step_time(self) -> float:
        return statistics.median(s for round_seconds in self.seconds for s in round_seconds)

    @property
    def peak_gib(self) -> float:
        """Peak at the last step."""
        return statistics.median(self.peaks) / 2**30

    @property
    def process_peak_gib(self) -> float:
        return statistics.median(self.process_peaks) / 2**30

    def add_run(self, measurements: dict, process_bytes: int, warmup_steps: int) -> None:
        self.seconds.append(measurements["seconds"][warmup_steps:])
        self.losses = measurements["losses"]
        self.peaks.append(measurements["peak"])
        self.process_peaks.append(process_bytes)
        self.versions, self.threads = measurements["versions"], measurements["threads"]


def add_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the arguments of all benchmarks that compare training runs."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warmup-steps", type=int, default=2, help="first steps, which are not measured")
    parser.add_argument("--layers", type=int, default=30, help="a small number is a quick run")
    parser.add_argument(
        "--command-prefix", default="", metavar="COMMAND", help="command that starts each process, such as a lock"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)


def build_tunekit_config(setup: RunSetup, task: TrainingTask, **options: Any) -> dict:
    """Config of tunekit, with the `options` of one recipe."""
    is_full = task.method == "full"
    return {
        "model": str(setup.directory / "model"),
        "quantization": "nf4" if task.method == "qlora" else "none",
        "optimizer": {"kind": "adamw", "lr": task.lr, "betas": [0.9, 0.999]},
        "lr_scheduler": "constant",
        "precision": {"compute_dtype": "bf16", "master_dtype": "bf16" if is_full else "fp32", "frozen_dtype": "bf16"},
        "global_batch_size": task.batch_size,
        "micro_batch_size": task.batch_size,
        "max_steps": task.steps,
        "device": "cpu",
    } | options


def run_tunekit(setup: RunSetup, config: dict, directory: Path, overrides: tuple[str, ...] = ()) -> tuple[dict, int]:
    """Run `tune run`; return the measurements in its metrics.jsonl, and the peak bytes of the process."""
    recipe, output_dir = config["recipe"], directory / f"run{time.time_ns()}"
    file = directory / f"{recipe}.yaml"
    write_json(file, config)  # JSON is YAML
    tune = Path(sys.executable).with_name("tune")
    process_bytes = run_process(setup, [str(tune), "run", recipe, str(file), f"output_dir={output_dir}", *overrides])
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line]
    total_target_tokens = [0, *(step["num_target_tokens"] for step in steps)]
    measurements = {
        "seconds": [step["step_time"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "target_tokens": [after - before for before, after in pairwise(total_target_tokens)],
        "peak": steps[-1]["peak_memory"],
        "versions": package_versions(),
        "threads": torch.get_num_threads(),
    }
    shutil.rmtree(output_dir)  # gigabytes per run
    return measurements, process_bytes


def run_library(setup: RunSetup, name: str, recipe: str, directory: Path) -> tuple[dict, int]:
    """Run the script of a library in its environment; "trl, wrapped" is trl with `--wrapped`."""
    library, *options = name.split(", ")
    output = directory / "result.json"
    output.unlink(missing_ok=True)
    script = BENCHMARKS / "libraries" / f"{library}_{recipe}.py"
    command = [setup.pythons[library], str(script), str(setup.directory), str(directory), str(output)]
    process_bytes = run_process(setup, [*command, *(f"--{option}" for option in options)])
    return json.loads(output.read_text()), process_bytes


def run_process(setup: RunSetup, command: list[str]) -> int:
    """Run a command; return its peak resident bytes. Raise RuntimeError if it fails."""
    log = setup.directory / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen([*setup.command_prefix, *command], stdout=stream, stderr=stream, cwd=setup.directory)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    check_exit_code(process.returncode, log)
    return usage.ru_maxrss * 1024


def check_exit_code(exit_code: int, log: Path) -> None:
    """Raise RuntimeError with the last line of the log if a process has failed."""
    if exit_code:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        raise RuntimeError(f"exit code {exit_code}: {lines[-1] if lines else 'no output'}")


def format_versions(results: Iterable[LibraryResult]) -> str:
    """Names and versions of the packages of all libraries."""
    versions = {name: version for result in results for name, version in result.versions.items()}
    return ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)


def format_step_times(results: Sequence[LibraryResult]) -> str:
    """Errors, and the times of all measured steps."""
    text = "".join(f"\n{result.name} failed: {result.error}\n" for result in results if result.error)
    text += "\nSeconds of all measured steps, by round:\n\n"
    for result in results:
        if result.seconds:
            rounds = (" ".join(f"{s:.2f}" for s in round_seconds) for round_seconds in result.seconds)
            text += f"- {result.name}: {'; '.join(rounds)}\n"
    return text
