"""Interrupt runs at random moments for hours; every result must be bit-identical to that of an undisturbed run.

python scripts/soak.py --hours 2 [--seed 1] [--directory DIR] [case ...]

Each case is trained once without interruptions. Then it is trained again and again in new run directories, and each
start of the command meets a random fault: SIGKILL of the command or of one rank, SIGTERM, SIGINT or SIGHUP, a disk
without space, a Hub whose connections are cut. The same command is repeated until the run is complete. With several
layouts, each start takes a random one, and results are equal up to rounding. Needs root on Linux, for a tmpfs as disk.
"""

import argparse
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

SHARED = [
    *(
        "save_every=1",
        "eval_every=4",
        "save_total_limit=2",
        "max_steps=20",
        "global_batch_size=4",
        "micro_batch_size=2",
    ),
    *("device=cpu", "precision.compute_dtype=fp32", "data.max_length=96", "eval_data.max_samples=4", "log_every=1"),
]
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
EXIT_CODES = {"none": {0}, "SIGKILL": {0, 1, -9}, "full disk": {0, 2}, "cut connections": {0, 2}}
EXIT_CODES |= {name: {0, 128 + number, -number} for name, number in SIGNALS.items()}
EXACT_METRICS = ("step", "loss", "grad_norm", "lr", "num_tokens", "eval/loss")


@dataclass
class Soak:
    """Directory of the runs, the disk they write to, and what has happened so far."""

    directory: Path
    rng: random.Random
    hub: Hub
    seconds: float = 30.0  # duration of an undisturbed run
    starts: int = 0

    def command(self, case: str, out: str) -> list[str]:
        args = [*CASES[case], *SHARED, f"output_dir={out}"]
        if case == "one or two ranks" and self.rng.random() < 0.5 and not out.startswith("undisturbed"):
            args += TWO_RANKS
        return [sys.executable, "-P", "-m", "tunekit.cli", "run", *args]

    def start(self, case: str, out: str) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env = inherited | {
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_HOME": str(self.directory / "home"),
            "HF_TOKEN": "hf_ann",
        }
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5", "HF_HUB_DISABLE_XET": "1"}
        self.starts += 1
        with (self.directory / "log").open("wb") as log:
            return subprocess.Popen(
                self.command(case, out), cwd=self.directory, env=env, stdout=log, stderr=subprocess.STDOUT,
                preexec_fn=restore_signals, start_new_session=True,
            )  # fmt: skip

    def fill_disk(self) -> None:
        """Take the space that is left on the disk."""
        with suppress(OSError), (self.directory / "disk/filler").open("wb") as filler:
            while True:
                filler.write(bytes(2**12))
                filler.flush()

    def disturb(self, process: subprocess.Popen[bytes], case: str, out: str, fault: str) -> None:
        """Wait for a random moment of the run, and inject the fault."""
        moment = self.rng.choice([None, None, f"state/{self.rng.randint(1, 20):08}.partial", "final.partial"])
        deadline = time.monotonic() + (self.rng.uniform(0, self.seconds) if moment is None else 600)
        while process.poll() is None and time.monotonic() < deadline:
            if moment and any((self.directory / out).glob(moment)):
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

    def run_once(self, case: str, out: str, fault: str) -> tuple[int, str]:
        """Start the command, inject a fault, and wait for its end. Returns the exit code and the output."""
        if fault == "cut connections":
            cuts = [Fault(path="/storage/|/resolve/", cut="reply", at=self.rng.randrange(10**6), reset=True, times=9)]
            refused = [Fault(path=self.rng.choice(["/api/", "/commit/", "/storage/"]), code=503, times=9)]
            self.hub.faults[:] = self.rng.choice([cuts, refused])
            shutil.rmtree(self.directory / "home", ignore_errors=True)
        process = self.start(case, out)
        if fault not in ("none", "cut connections"):
            self.disturb(process, case, out, fault)
        try:
            code = process.wait(600)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = 124
        self.hub.faults.clear()
        (self.directory / "disk/filler").unlink(missing_ok=True)
        return code, (self.directory / "log").read_text(errors="replace")

    def choose_fault(self, case: str) -> str:
        faults = [*["SIGKILL"] * 6, *SIGNALS, "full disk", "none"]
        return self.rng.choice([*faults, *["cut connections"] * 6] if case == "Hub" else faults)


def restore_signals() -> None:
    """Background jobs of a shell ignore these signals, and children inherit that."""
    for number in SIGNALS.values():
        signal.signal(number, signal.SIG_DFL)


def train_until_complete(soak: Soak, case: str, out: str, counts: Counter[str]) -> list[str]:
    """Train with faults. Returns the problems: wrong exit codes, tracebacks, and refusals to resume."""
    problems = []
    for _ in range(100):
        fault = soak.choose_fault(case)
        code, output = soak.run_once(case, out, fault)
        if code == 2 and "is in use by process" in output:  # ranks of a killed launcher may live for seconds
            time.sleep(1)
            continue
        counts[fault if code else "none"] += 1
        if "Fatal Python error: init_" in output:  # a signal before Python has started
            continue
        is_rank = code != 1 or "was killed by SIGKILL" in output
        unexpected = code not in EXIT_CODES[fault] or not is_rank or "Traceback" in output
        if unexpected:
            problems.append(f"{case}: {fault}: exit code {code}\n{output[-3000:]}")
        if code == 0 or unexpected:
            return problems
    return [*problems, f"{case}: 100 starts did not complete the run"]


def describe_difference(case: str, first: Path, other: Path) -> str:
    """Describe the difference between the results of two runs; "" if they are equal."""
    exact = case != "one or two ranks"
    a, b = (
        {k: v for f in sorted(d.glob("final/*.safetensors")) for k, v in load_file(f).items()} for d in (first, other)
    )
    if not a or a.keys() != b.keys():
        return "other tensors"
    different = [
        name
        for name in a
        if not (torch.equal(a[name], b[name]) if exact else torch.allclose(a[name], b[name], 0, 1e-4))
    ]
    if different:
        worst = max((a[name].float() - b[name].float()).abs().max().item() for name in different)
        return f"{len(different)} of {len(a)} tensors differ by up to {worst}"
    rows = [[{k: row[k] for k in EXACT_METRICS if k in row} for row in read_metrics(d)] for d in (first, other)]
    return "other metrics" if exact and rows[0] != rows[1] else ""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "cases", nargs="*", default=[*CASES], metavar="CASE", help=f"default: all of {', '.join(CASES)}"
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where to run (default: a temporary directory)")
    return parser.parse_args()


def run_cases(soak: Soak, cases: list[str], hours: float) -> int:
    """Run the cases in turns until the time is over. Returns the number of problems."""
    deadline = time.monotonic() + 3600 * hours
    seconds, counts, complete, num_problems = {}, {case: Counter() for case in cases}, Counter(), 0
    for case in cases:
        start = time.monotonic()
        code, output = soak.run_once(case, f"undisturbed/{slug(case)}", "none")
        assert code == 0, output
        seconds[case] = time.monotonic() - start
    while time.monotonic() < deadline:
        for case in cases:
            soak.seconds = seconds[case]
            out = f"disk/{slug(case)}"
            problems = train_until_complete(soak, case, out, counts[case])
            difference = problems or describe_difference(
                case, soak.directory / "undisturbed" / slug(case), soak.directory / out
            )
            if difference and not problems:
                problems = [f"{case}: {difference}"]
            num_problems += len(problems)
            complete[case] += not problems
            print(*problems, sep="\n", end="\n" if problems else "", flush=True)
            if problems:
                shutil.copytree(soak.directory / out, soak.directory / f"problem-{num_problems}", dirs_exist_ok=True)
            shutil.rmtree(soak.directory / out, ignore_errors=True)
            print(json.dumps({"case": case, "complete": complete[case], **counts[case]}), flush=True)
            if time.monotonic() > deadline:
                break
    total = sum(counts.values(), Counter())
    print(f"{soak.starts} starts, {sum(complete.values())} complete runs, {num_problems} problems: {dict(total)}")
    return num_problems


def slug(case: str) -> str:
    return re.sub(r"\W+", "-", case)


def main() -> int:
    args = parse_args()
    directory = args.directory or Path(tempfile.mkdtemp(prefix="soak"))
    (directory / "disk").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", directory / "disk"], check=True)
    try:
        with Hub({"hf_ann": User("ann")}) as hub:
            hub.server.handle_error = lambda *_: None  # clients that were killed
            nano = assets.MODELS["tunekit/nano"]
            hub.put("ann/nano", {path.name: path.read_bytes() for path in nano.iterdir() if path.is_file()})
            soak = Soak(directory, random.Random(args.seed), hub)
            return int(run_cases(soak, args.cases, args.hours) > 0)
    finally:
        subprocess.run(["umount", "--lazy", directory / "disk"], check=True)


if __name__ == "__main__":
    sys.exit(main())
