"""Preparing conversations beside trl and torchtune: rows a second, and the memory of all processes; and a long stream.

python benchmarks/preparation.py --trl PYTHON --torchtune PYTHON --rows 100000 --rounds 3
python benchmarks/preparation.py --stream 10000000

Each contestant is a process in an environment of its own (benchmarks/README.md says how to make them) that reads the
same file of generated conversations with the same tokenizer and template, and makes them tokens and labels of at most
2,048. tunekit runs twice: nothing is kept the first time. The report is written anew after every run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from chats import TEMPLATES, write_rows, write_tokenizers

from tunekit.data.dataloader import build
from tunekit.data.dataloader.batch import IGNORE
from tunekit.data.datasets import TextDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware

HERE = Path(__file__).parent
PART = 100_000  # rows of the file that a stream reads again and again
PAUSE = 0.2  # seconds between two looks at memory
STEP = 8  # packed rows of a step


@dataclass
class Found:
    """What one contestant has shown with one template, over all rounds."""

    name: str
    rows: int  # that it is given
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes, all its processes together
    told: dict = field(default_factory=dict)
    fault: str = ""

    @property
    def speed(self) -> float:
        """Rows a second."""
        return self.rows / statistics.median(self.seconds)


def lines(file: Path) -> list[str]:
    """Of a file of a process, which may have ended since."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def processes(first: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield first
    for file in Path(f"/proc/{first}/task").glob("*/children"):
        for child in " ".join(lines(file)).split():
            yield from processes(int(child))


def resident(first: int) -> int:
    """Bytes of a process and of those it has started; what they share counts once."""
    told = (line for process in processes(first) for line in lines(Path(f"/proc/{process}/smaps_rollup")))
    return sum(int(line.split()[1]) for line in told if line.startswith("Pss:")) * 1024


def run(line: list[str], folder: Path) -> int:
    """Run a command to its end; the most memory that it had."""
    log = folder / "txt"
    more = {"TUNEKIT_CACHE": str(folder / "kept"), "HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(line, stdout=stream, stderr=stream, cwd=folder, env=os.environ | more)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(PAUSE)
    if process.returncode:
        said = [text for text in log.read_text().splitlines() if text.strip()]
        raise RuntimeError(f"exit {process.returncode}: {said[-1] if said else 'nothing said'}")
    return peak


def turn(given: Path, python: str, template: str, found: Found) -> None:
    """One run of one contestant; "tunekit, again" finds what tunekit has kept in the run before."""
    name, again, _ = found.name.partition(", again")
    out = given / "told.json"
    if not again:
        subprocess.run(["rm", "-rf", str(given / "kept"), str(given / "datasets")], check=True)
    line = [python, str(HERE / "contestants" / f"{name}_preparation.py")]
    try:
        found.peaks.append(
            run([*line, f"{given}/{found.rows}.jsonl", str(given / "words" / template), str(out)], given)
        )
        found.told = json.loads(out.read_text())
        found.seconds.append(found.told["seconds"])
        said = f"{found.rows / found.told['seconds']:,.0f} rows/s"
    except (RuntimeError, OSError) as error:
        found.fault = said = str(error)
    print(f"{template} {found.name}: {said}", flush=True)


def table(template: str, found: list[Found]) -> str:
    """A row for each contestant."""
    shown = [one for one in found if one.seconds]
    ours = next((one for one in shown if one.name == "tunekit"), None)
    text = f"\n## {template}\n\n| | rows | s | rows/s | tunekit's speed is | peak memory, MiB | tokens | learnt |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for one in shown:
        times = f"{ours.speed / one.speed:.2f} x" if ours else "-"
        text += f"| {one.name} | {one.rows:,} | {statistics.median(one.seconds):.2f} | {one.speed:,.0f} | {times} "
        text += f"| {statistics.median(one.peaks) / 2**20:,.0f} | {one.told['tokens']:,} | {one.told['learnt']:,} |\n"
    text += "".join(f"\n{one.name} failed: {one.fault}\n" for one in found if one.fault)
    rounds = (f"- {one.name}: " + " ".join(f"{s:.2f}" for s in one.seconds) + "\n" for one in shown)
    return text + "\nSeconds by round:\n\n" + "".join(rounds)


def report(works: dict[str, list[Found]], line: str) -> str:
    """The whole page."""
    known = {name: v for found in works.values() for one in found for name, v in one.told.get("versions", {}).items()}
    text = f"# Preparing conversations, {date.today()}\n\n`{line}`\n\n"
    text += f"{describe_hardware(torch.device('cpu'))}; {', '.join(f'{name} {v}' for name, v in known.items())}.\n"
    text += (
        "Generated conversations of three to five questions and answers, byte-level BPE of 32,000 words, rows of at "
    )
    text += (
        "most 2,048 tokens. From the file to tokens and labels, in processes that have started and imported; medians.\n"
    )
    return text + "".join(table(template, found) for template, found in works.items())


def race(args: argparse.Namespace, given: Path, pythons: dict[str, str]) -> None:
    """All rounds, in turns."""
    few = min(args.rows, args.torchtune_rows)
    for count in {args.rows, few}:
        write_rows(given / f"{count}.jsonl", count)
    works: dict[str, list[Found]] = {}
    for template in args.templates:
        names = [name for name in ("tunekit", "tunekit, again", *pythons) if name != "tunekit"]
        names = ["tunekit", *[name for name in names if name != "torchtune" or template == "headers"]]
        works[template] = [Found(name, few if name == "torchtune" else args.rows) for name in names]
    for _ in range(args.rounds):
        for template, found in works.items():
            for one in found:
                turn(given, pythons.get(one.name.partition(",")[0], sys.executable), template, one)
                page = report(works, "python benchmarks/preparation.py " + " ".join(sys.argv[1:]))
                (args.results / f"{date.today()}-preparation.md").write_text(page)


def stream(args: argparse.Namespace, given: Path) -> None:
    """Memory over rows as a run would step through them; a line for each tenth.

    Short texts, packed. The folder's files are one file under many names: a disk need not hold them all.
    """
    with (given / "part.jsonl").open("w") as file:
        texts = (f"row {n} of many, which says that {7 * n} is more than {n}" for n in range(min(PART, args.stream)))
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    (given / "many").mkdir()
    for number in range(-(-args.stream // PART)):
        os.link(given / "part.jsonl", given / "many" / f"train-{number:05d}.jsonl")
    rows = TextDataset(source=str(given / "many"), max_length=2048, packing=True, streaming=True)
    data = build.build_dataloader(
        rows, Tokenizer.open(given / "words" / args.templates[0]), STEP, STEP, DistributedContext()
    )
    began, done, tokens, told, step = time.perf_counter(), 0, 0, 0, 0
    print("| rows | tokens | s | rows/s | memory of all processes, MiB |\n|---|---|---|---|---|")
    while done < args.stream:
        batches, step = data[step], step + 1
        done += sum(int(((batch.positions == 0) & (batch.targets != IGNORE)).sum()) for batch in batches)
        tokens += sum(batch.num_tokens for batch in batches)
        if done >= told:
            spent, used = time.perf_counter() - began, resident(os.getpid()) / 2**20
            print(f"| {done:,} | {tokens:,} | {spent:.0f} | {done / spent:,.0f} | {used:,.0f} |", flush=True)
            told += args.stream // 10
    data.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("trl", "torchtune"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"of the environment with {name}")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--torchtune-rows", type=int, default=10_000, help="it uses one core, and packs in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--templates", nargs="+", choices=list(TEMPLATES), default=list(TEMPLATES))
    parser.add_argument("--stream", type=int, metavar="ROWS", help="instead: stream so many rows, and watch memory")
    parser.add_argument("--folder", type=Path, help="where files are made (default: one that is removed)")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    pythons = {name: str(Path(python).absolute()) for name in ("trl", "torchtune") if (python := vars(args)[name])}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        given = Path(folder)
        write_tokenizers(given / "words")
        stream(args, given) if args.stream else race(args, given, pythons)


if __name__ == "__main__":
    main()
