"""Soak test: inject faults into training runs for hours. Results must be bit-identical to those without faults.

python scripts/soak.py --hours 2 [--seed 1] [--directory DIR] [CASE ...]

Each case is trained once without faults. Then it is trained repeatedly in new run directories, with a random fault in
each start of the command: SIGKILL of the command or of one rank, SIGTERM, SIGINT or SIGHUP, a full disk, or broken
connections to the Hub. The same command is repeated until the run is complete. In the case "one or two ranks", each
start has a random number of ranks, and results are equal up to rounding. Requires root on Linux, to mount a tmpfs.
"""

import argparse
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.hub.http_handler import Fault
from tests.helpers.hub.server import Hub, User
from tests.helpers.kill_ranks import kill_process, worker_pids
from tunekit import assets
from tunekit.loggers.metrics_file import read_metrics

COMMON_OPTIONS = (
    *("save_every=1", "eval_every=4", "save_total_limit=2", "max_steps=20", "global_batch_size=4"),
    *("micro_batch_size=2", "device=cpu", "precision.compute_dtype=fp32", "data.max_length=96"),
    *("eval_data.max_samples=4", "log_every=1"),
)
SFT, TWO_RANKS = ("sft", "nano/tools_full"), ("--nproc-per-node", "2")
LORA = "adapter={kind: lora, rank: 4, dropout: 0.3}"
CASES: dict[str, tuple[str, ...]] = {
    "lora": (*SFT, LORA),
    "full, two ranks": (*SFT, *TWO_RANKS),
    "qlora, two ranks": (*SFT, LORA, "quantization=nf4", *TWO_RANKS),
    "asynchronous saves": (*SFT, "async_save=true", "optimizer={kind: adamw8bit, lr: 1e-3}"),
    "stream": (*SFT, LORA, "data.streaming=true", "data.packing=true"),
    "preference": ("preference", "nano/dpo"),
    "reward": ("reward", "nano/reward", LORA),
    "distillation": ("distill", "nano/distill", "teacher={model: tunekit/nano}"),
    "one or two ranks": (*SFT, "adapter={kind: lora, rank: 4}", "optimizer={kind: adamw, lr: 1e-3, eps: 0.1}"),
    "Hub": (*SFT, LORA, "model=ann/nano", "push_to_hub.repo_id=ann/result"),
}
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGHUP}
EXIT_CODES = {"none": {0}, "SIGKILL": {0, 1, -9}, "full disk": {0, 2}, "broken connections": {0, 2}}
EXIT_CODES |= {name: {0, 128 + number, -number} for name, number in SIGNALS.items()}
EXACT_METRICS = ("step", "loss", "grad_norm", "lr", "num_tokens", "eval/loss")
RUN_TIMEOUT, MAX_STARTS = 600, 100  # seconds of a start; starts of a run
REFERENCE, DISK = "undisturbed", "disk"  # subdirectories: runs without faults; the tmpfs


@dataclass
class FaultInjector:
    """Starts training commands and injects random faults."""

    directory: Path
    rng: random.Random
    hub: Hub
    run_time: float = 30.0  # seconds of a run without faults
    num_starts: int = 0

    def build_command(self, case: str, output_dir: str) -> list[str]:
        args = [*CASES[case], *COMMON_OPTIONS, f"output_dir={output_dir}"]
        if case == "one or two ranks" and self.rng.random() < 0.5 and not output_dir.startswith(REFERENCE):
            args += TWO_RANKS
        return [sys.executable, "-P", "-m", "tunekit.cli", "run", *args]

    def start_process(self, case: str, output_dir: str) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env |= {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.directory / "home"), "HF_TOKEN": "hf_ann"}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5", "HF_HUB_DISABLE_XET": "1"}
        self.num_starts += 1
        with (self.directory / "log").open("wb") as log:
            return subprocess.Popen(
                self.build_command(case, output_dir), cwd=self.directory, env=env, stdout=log,
                stderr=subprocess.STDOUT, preexec_fn=restore_signal_handlers, start_new_session=True,
            )  # fmt: skip

    def fill_disk(self) -> None:
        """Write to the disk until no space is left."""
        with suppress(OSError), (self.directory / DISK / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(2**12))
                filler.flush()

    def inject_fault(self, process: subprocess.Popen[bytes], output_dir: str, fault: str) -> None:
        """Wait for a random time, or until a random file of the run is being written, and inject the fault."""
        trigger = self.rng.choice([None, None, f"state/{self.rng.randint(1, 20):08}.partial", "final.partial"])
        deadline = time.monotonic() + (self.rng.uniform(0, self.run_time) if trigger is None else RUN_TIMEOUT)
        while process.poll() is None and time.monotonic() < deadline:
            if trigger and any((self.directory / output_dir).glob(trigger)):
                break
            time.sleep(0.0005)
        time.sleep(self.rng.uniform(0, 0.01))
        if process.poll() is not None:
            return
        if fault == "SIGKILL":
            kill_process(self.rng.choice([process.pid, *worker_pids(process.pid)]))
        elif fault == "full disk":
            self.fill_disk()
        elif fault in SIGNALS:
            process.send_signal(SIGNALS[fault])

    def break_connections(self) -> None:
        """Let the Hub reset connections or reply with errors, and clear its cache."""
        resets = [Fault(path="/storage/|/resolve/", cut="reply", at=self.rng.randrange(10**6), reset=True, times=9)]
        errors = [Fault(path=self.rng.choice(["/api/", "/commit/", "/storage/"]), code=503, times=9)]
        self.hub.faults[:] = self.rng.choice([resets, errors])
        shutil.rmtree(self.directory / "home", ignore_errors=True)

    def run_command(self, case: str, output_dir: str, fault: str) -> tuple[int, str]:
        """Start the command, inject the fault, and wait for the end. Returns the exit code and the output."""
        if fault == "broken connections":
            self.break_connections()
        process = self.start_process(case, output_dir)
        if fault not in ("none", "broken connections"):
            self.inject_fault(process, output_dir, fault)
        try:
            exit_code = process.wait(RUN_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            exit_code = 124
        self.hub.faults.clear()
        (self.directory / DISK / "filler").unlink(missing_ok=True)
        return exit_code, (self.directory / "log").read_text(errors="replace")

    def choose_fault(self, case: str) -> str:
        faults = [*["SIGKILL"] * 6, *SIGNALS, "full disk", "none"]
        return self.rng.choice([*faults, *["broken connections"] * 6] if case == "Hub" else faults)


def restore_signal_handlers() -> None:
    """Restore the default handlers: background jobs of a shell ignore these signals, and children inherit this."""
    for number in SIGNALS.values():
        signal.signal(number, signal.SIG_DFL)


def train_until_complete(injector: FaultInjector, case: str, output_dir: str, counts: Counter[str]) -> list[str]:
    """Train with faults. Returns the problems: unexpected exit codes, tracebacks, and runs that do not complete."""
    for _ in range(MAX_STARTS):
        fault = injector.choose_fault(case)
        exit_code, output = injector.run_command(case, output_dir, fault)
        if exit_code == 2 and "is in use by process" in output:  # ranks of a killed launcher can live for seconds
            time.sleep(1)
            continue
        counts[fault if exit_code else "none"] += 1
        if "Fatal Python error: init_" in output:  # a signal during the start of Python
            continue
        is_error = exit_code == 1 and "was killed by SIGKILL" not in output
        if exit_code not in EXIT_CODES[fault] or is_error or "Traceback" in output:
            return [f"{case}: {fault}: exit code {exit_code}\n{output[-3000:]}"]
        if exit_code == 0:
            return []
    return [f"{case}: not complete after {MAX_STARTS} starts"]


def describe_difference(case: str, expected_dir: Path, actual_dir: Path) -> str:
    """Describe the difference between the results of two runs; "" if they are equal."""
    is_exact = case != "one or two ranks"
    expected, actual = (
        {
            name: tensor
            for path in sorted(directory.glob("final/*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for directory in (expected_dir, actual_dir)
    )
    if not expected or expected.keys() != actual.keys():
        return "different tensor names"
    is_equal = torch.equal if is_exact else functools.partial(torch.allclose, rtol=0, atol=1e-4)
    different = [name for name in expected if not is_equal(expected[name], actual[name])]
    if different:
        max_difference = max((expected[name].float() - actual[name].float()).abs().max().item() for name in different)
        return f"{len(different)} of {len(expected)} tensors differ by up to {max_difference}"
    expected_metrics, actual_metrics = (
        [{key: row[key] for key in EXACT_METRICS if key in row} for row in read_metrics(directory)]
        for directory in (expected_dir, actual_dir)
    )
    return "different metrics" if is_exact and expected_metrics != actual_metrics else ""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "cases", nargs="*", default=[*CASES], metavar="CASE", help=f"default: all of {', '.join(CASES)}"
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="directory of the runs (default: a temporary directory)")
    return parser.parse_args()


def measure_run_time(injector: FaultInjector, case: str) -> float:
    """Train without faults. Returns the seconds."""
    start = time.monotonic()
    exit_code, output = injector.run_command(case, f"{REFERENCE}/{get_dir_name(case)}", "none")
    assert exit_code == 0, output
    return time.monotonic() - start


def find_problems(injector: FaultInjector, case: str, counts: Counter[str]) -> list[str]:
    """Train with faults and compare the result with that of the run without faults."""
    output_dir = f"{DISK}/{get_dir_name(case)}"
    if problems := train_until_complete(injector, case, output_dir, counts):
        return problems
    expected_dir = injector.directory / REFERENCE / get_dir_name(case)
    difference = describe_difference(case, expected_dir, injector.directory / output_dir)
    return [f"{case}: {difference}"] if difference else []


def run_cases(injector: FaultInjector, cases: list[str], hours: float) -> int:
    """Repeat all cases until the time is over. Returns the number of problems."""
    deadline = time.monotonic() + 3600 * hours
    run_times = {case: measure_run_time(injector, case) for case in cases}
    counts, num_complete, num_problems = {case: Counter() for case in cases}, Counter(), 0
    for case in itertools.cycle(cases):
        if time.monotonic() > deadline:
            break
        injector.run_time = run_times[case]
        problems = find_problems(injector, case, counts[case])
        num_problems += len(problems)
        num_complete[case] += not problems
        run_dir = injector.directory / DISK / get_dir_name(case)
        if problems:
            print(*problems, sep="\n", flush=True)
            shutil.copytree(run_dir, injector.directory / f"problem-{num_problems}", dirs_exist_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        print(json.dumps({"case": case, "complete": num_complete[case], **counts[case]}), flush=True)
    totals = dict(sum(counts.values(), Counter()))
    print(f"{injector.num_starts} starts, {num_complete.total()} complete runs, {num_problems} problems: {totals}")
    return num_problems


def get_dir_name(case: str) -> str:
    return re.sub(r"\W+", "-", case)


def main() -> int:
    args = parse_args()
    directory = args.directory or Path(tempfile.mkdtemp(prefix="soak"))
    (directory / DISK).mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", directory / DISK], check=True)
    try:
        with Hub({"hf_ann": User("ann")}) as hub:
            hub.server.handle_error = lambda *_: None  # of clients that were killed
            nano = assets.MODELS["tunekit/nano"]
            hub.put("ann/nano", {path.name: path.read_bytes() for path in nano.iterdir() if path.is_file()})
            injector = FaultInjector(directory, random.Random(args.seed), hub)
            return int(run_cases(injector, args.cases, args.hours) > 0)
    finally:
        subprocess.run(["umount", "--lazy", directory / DISK], check=True)


if __name__ == "__main__":
    sys.exit(main())
