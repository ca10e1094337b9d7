"""Contestants that train the same, in turns: how each is started, what it has shown, and the words for a report."""

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
from pathlib import Path
from typing import Any, Self

import torch
from stage import Task, write

from tunekit.env_info import package_versions

HERE = Path(__file__).parent
PACKAGES = ("torch", "tunekit", "transformers", "peft", "trl", "bitsandbytes", "torchtune", "torchao")


@dataclass(frozen=True)
class Given:
    """Where things are, and how processes are started."""

    folder: Path
    under: tuple[str, ...]  # a command that starts each process: numactl, a lock
    pythons: Mapping[str, str]

    @classmethod
    def of(cls, args: argparse.Namespace, folder: str, **pythons: str) -> Self:
        return cls(Path(folder), tuple(shlex.split(args.under)), pythons)


@dataclass
class Found:
    """What one contestant has shown at one work, over all rounds."""

    name: str
    seconds: list[list[float]] = field(default_factory=list)  # of the kept steps, by round
    losses: list[float] = field(default_factory=list)  # by step
    peaks: list[int] = field(default_factory=list)  # bytes at the last step, by round
    whole: list[int] = field(default_factory=list)  # bytes, the whole process with its start and end
    versions: dict[str, str] = field(default_factory=dict)
    threads: int = 0
    fault: str = ""

    @property
    def step(self) -> float:
        return statistics.median(s for round in self.seconds for s in round)

    @property
    def memory(self) -> tuple[float, float]:
        """GiB at the last step, and of the whole process."""
        return statistics.median(self.peaks) / 2**30, statistics.median(self.whole) / 2**30

    def take(self, told: dict, whole: int, drop: int) -> None:
        self.seconds.append(told["seconds"][drop:])
        self.losses = told["losses"]
        self.peaks.append(told["peak"])
        self.whole.append(whole)
        self.versions, self.threads = told["versions"], told["threads"]


def options(parser: argparse.ArgumentParser, steps: int) -> None:
    """What all of these benchmarks can be told."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--drop", type=int, default=2, help="first steps that do not count")
    parser.add_argument("--layers", type=int, default=30, help="fewer, for a quick look")
    parser.add_argument(
        "--under", default="", metavar="COMMAND", help="what each process is started by, such as a lock"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")


def config(given: Given, work: Task, **own: Any) -> dict:
    """Of tunekit: what every recipe is told, and what is one recipe's `own`."""
    full = work.method == "full"
    return {
        "model": str(given.folder / "model"),
        "quantization": "nf4" if work.method == "qlora" else "plain",
        "optimizer": {"kind": "adamw", "lr": work.lr, "betas": [0.9, 0.999]},
        "lr_scheduler": "constant",
        "precision": {"compute": "bf16", "trained": "bf16" if full else "fp32", "frozen": "bf16"},
        "global_batch_size": work.batch,
        "micro_batch_size": work.batch,
        "max_steps": work.steps,
        "device": "cpu",
    } | own


def tune(given: Given, told: dict, folder: Path, more: tuple[str, ...] = ()) -> tuple[dict, int]:
    """One `tune run` of a config; its numbers are those of its metrics.jsonl. Last, the bytes of the process."""
    recipe, out = told["recipe"], folder / f"run{time.time_ns()}"
    file = folder / f"{recipe}.yaml"
    write(file, told)  # JSON is YAML
    command = Path(sys.executable).with_name("tune")
    whole = start(given, [str(command), "run", recipe, str(file), f"output_dir={out}", *more])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line]
    names = {"seconds": "seconds", "losses": "loss", "learnt": "learnt"}
    shown = {name: [step[key] for step in steps] for name, key in names.items()}
    shutil.rmtree(out)  # gigabytes a run
    peak, threads = steps[-1]["peak_memory"], torch.get_num_threads()
    return shown | {"peak": peak, "versions": package_versions(), "threads": threads}, whole


def other(given: Given, name: str, what: str, folder: Path) -> tuple[dict, int]:
    """One run of a contestant that is a script beside this one; "trl, wrapped" is trl with `--wrapped`."""
    script, *flags = name.split(", ")
    out = folder / "told.json"
    out.unlink(missing_ok=True)
    line = [given.pythons[script], str(HERE / "contestants" / f"{script}_{what}.py"), str(given.folder), str(folder)]
    whole = start(given, [*line, str(out), *(f"--{flag}" for flag in flags)])
    return json.loads(out.read_text()), whole


def start(given: Given, line: list[str]) -> int:
    """Run a command to its end; bytes that it had resident at most."""
    log = given.folder / "txt"
    with log.open("w") as stream:
        process = subprocess.Popen([*given.under, *line], stdout=stream, stderr=stream, cwd=given.folder)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = [text for text in log.read_text().splitlines() if text.strip()]
        raise RuntimeError(f"exit {process.returncode}: {said[-1] if said else 'nothing said'}")
    return used.ru_maxrss * 1024


def packages(found: Iterable[Found]) -> str:
    """Names and versions of all that took part."""
    known = {name: version for one in found for name, version in one.versions.items()}
    return ", ".join(f"{name} {known[name]}" for name in PACKAGES if name in known)


def kept_steps(found: Sequence[Found]) -> str:
    """Below a table: who failed, and all kept steps of the others."""
    text = "".join(f"\n{f.name} failed: {f.fault}\n" for f in found if f.fault)
    text += "\nSeconds of all kept steps, by round:\n\n"
    for f in found:
        if f.seconds:
            text += f"- {f.name}: " + "; ".join(" ".join(f"{s:.2f}" for s in round) for round in f.seconds) + "\n"
    return text
