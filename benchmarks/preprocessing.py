"""Preprocessing of conversations compared with trl and torchtune: rows per second and memory of all processes; also
a long stream.

    python benchmarks/preparation.py --trl PYTHON --torchtune PYTHON --rows 100000 --rounds 3
    python benchmarks/preparation.py --stream 10000000

Each contestant runs as a process in its own environment (see benchmarks/README.md), reads the same generated
conversations with the same tokenizer and template, and produces tokens and labels of at most 2,048. tunekit runs
twice, first without a cache. The report is rewritten after each run.
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

BENCHMARKS = Path(__file__).parent
FILE_ROWS = 100_000  # rows of the file that a stream reads repeatedly
SAMPLE_SECONDS = 0.2  # seconds between two samples of memory
ROWS_PER_STEP = 8  # packed rows per step


@dataclass
class PreprocessingResult:
    """Results of one contestant with one template, over all rounds."""

    name: str
    rows: int  # number of input rows
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes of all processes
    measured: dict = field(default_factory=dict)
    fault: str = ""

    @property
    def speed(self) -> float:
        """Rows per second."""
        return self.rows / statistics.median(self.seconds)


def read_lines(file: Path) -> list[str]:
    """Lines of a file of a process; empty if the process has ended."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def process_tree(first: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield first
    for file in Path(f"/proc/{first}/task").glob("*/children"):
        for child in " ".join(read_lines(file)).split():
            yield from process_tree(int(child))


def tree_memory(first: int) -> int:
    """Bytes of a process tree; shared pages count once."""
    lines = (line for process in process_tree(first) for line in read_lines(Path(f"/proc/{process}/smaps_rollup")))
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def run_command(line: list[str], folder: Path) -> int:
    """Run a command; return its peak memory."""
    log = folder / "txt"
    more = {"TUNEKIT_CACHE": str(folder / "kept"), "HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(line, stdout=stream, stderr=stream, cwd=folder, env=os.environ | more)
        peak = 0
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid))
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        messages = [text for text in log.read_text().splitlines() if text.strip()]
        raise RuntimeError(f"exit {process.returncode}: {messages[-1] if messages else 'nothing said'}")
    return peak


def run_contestant(directory: Path, python: str, template: str, results: PreprocessingResult) -> None:
    """One run of one contestant; "tunekit, again" uses the cache of the previous run."""
    name, cached_run, _ = results.name.partition(", again")
    out = directory / "result.json"
    if not cached_run:
        subprocess.run(["rm", "-rf", str(directory / "kept"), str(directory / "datasets")], check=True)
    line = [python, str(BENCHMARKS / "contestants" / f"{name}_preparation.py")]
    try:
        results.peaks.append(
            run_command(
                [*line, f"{directory}/{results.rows}.jsonl", str(directory / "words" / template), str(out)], directory
            )
        )
        results.measured = json.loads(out.read_text())
        results.seconds.append(results.measured["seconds"])
        message = f"{results.rows / results.measured['seconds']:,.0f} rows/s"
    except (RuntimeError, OSError) as error:
        results.fault = message = str(error)
    print(f"{template} {results.name}: {message}", flush=True)


def table(template: str, results: list[PreprocessingResult]) -> str:
    """A row per contestant."""
    successful = [result for result in results if result.seconds]
    tunekit_result = next((result for result in successful if result.name == "tunekit"), None)
    text = (
        f"\n## {template}\n\n| | rows | s | rows/s | tunekit's speed is | peak memory, MiB | tokens | target tokens |\n"
    )
    text += "|---|---|---|---|---|---|---|---|\n"
    for result in successful:
        times = f"{tunekit_result.speed / result.speed:.2f} x" if tunekit_result else "-"
        seconds, peak = statistics.median(result.seconds), statistics.median(result.peaks) / 2**20
        tokens, target_tokens = result.measured["tokens"], result.measured["target_tokens"]
        text += f"| {result.name} | {result.rows:,} | {seconds:.2f} | {result.speed:,.0f} | {times} "
        text += f"| {peak:,.0f} | {tokens:,} | {target_tokens:,} |\n"
    text += "".join(f"\n{result.name} failed: {result.fault}\n" for result in results if result.fault)
    rounds = (f"- {result.name}: " + " ".join(f"{s:.2f}" for s in result.seconds) + "\n" for result in successful)
    return text + "\nSeconds by round:\n\n" + "".join(rounds)


def report(works: dict[str, list[PreprocessingResult]], line: str) -> str:
    """The complete report."""
    versions = {
        name: v
        for results in works.values()
        for result in results
        for name, v in result.measured.get("versions", {}).items()
    }
    text = f"# Preparing conversations, {date.today()}\n\n`{line}`\n\n"
    text += f"{describe_hardware(torch.device('cpu'))}; {', '.join(f'{name} {v}' for name, v in versions.items())}.\n"
    text += (
        "Generated conversations of three to five questions and answers, byte-level BPE of 32,000 words, rows of at "
    )
    text += (
        "most 2,048 tokens. From the file to tokens and labels, in processes that have started and imported; medians.\n"
    )
    return text + "".join(table(template, results) for template, results in works.items())


def compare(args: argparse.Namespace, directory: Path, pythons: dict[str, str]) -> None:
    """All rounds; contestants alternate."""
    few = min(args.rows, args.torchtune_rows)
    for count in {args.rows, few}:
        write_rows(directory / f"{count}.jsonl", count)
    works: dict[str, list[PreprocessingResult]] = {}
    for template in args.templates:
        names = [name for name in ("tunekit", "tunekit, again", *pythons) if name != "tunekit"]
        names = ["tunekit", *[name for name in names if name != "torchtune" or template == "headers"]]
        works[template] = [PreprocessingResult(name, few if name == "torchtune" else args.rows) for name in names]
    for _ in range(args.rounds):
        for template, results in works.items():
            for result in results:
                run_contestant(directory, pythons.get(result.name.partition(",")[0], sys.executable), template, result)
                page = report(works, "python benchmarks/preparation.py " + " ".join(sys.argv[1:]))
                (args.results / f"{date.today()}-preparation.md").write_text(page)


def measure_stream(args: argparse.Namespace, directory: Path) -> None:
    """Memory while stepping through the rows of a stream; a line for each tenth.

    Short texts, packed. All files of the directory are links to one file, to save disk space.
    """
    with (directory / "part.jsonl").open("w") as file:
        texts = (
            f"row {n} of many, which says that {7 * n} is more than {n}" for n in range(min(FILE_ROWS, args.stream))
        )
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "many").mkdir()
    for number in range(-(-args.stream // FILE_ROWS)):
        os.link(directory / "part.jsonl", directory / "many" / f"train-{number:05d}.jsonl")
    rows = TextDataset(source=str(directory / "many"), max_length=2048, packing=True, streaming=True)
    data = build.build_dataloader(
        rows,
        Tokenizer.open(directory / "words" / args.templates[0]),
        ROWS_PER_STEP,
        ROWS_PER_STEP,
        DistributedContext(),
    )
    start, done, tokens, next_report, step = time.perf_counter(), 0, 0, 0, 0
    print("| rows | tokens | s | rows/s | memory of all processes, MiB |\n|---|---|---|---|---|")
    while done < args.stream:
        batches, step = data[step], step + 1
        done += sum(int(((batch.positions == 0) & (batch.targets != IGNORE)).sum()) for batch in batches)
        tokens += sum(batch.num_tokens for batch in batches)
        if done >= next_report:
            spent, used = time.perf_counter() - start, tree_memory(os.getpid()) / 2**20
            print(f"| {done:,} | {tokens:,} | {spent:.0f} | {done / spent:,.0f} | {used:,.0f} |", flush=True)
            next_report += args.stream // 10
    data.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("trl", "torchtune"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"of the environment with {name}")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--torchtune-rows", type=int, default=10_000, help="it uses one core, and packs in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--templates", nargs="+", choices=list(TEMPLATES), default=list(TEMPLATES))
    parser.add_argument("--stream", type=int, metavar="ROWS", help="instead, stream this many rows and measure memory")
    parser.add_argument("--folder", type=Path, help="where files are made (default: one that is removed)")
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results")
    args = parser.parse_args()
    pythons = {name: str(Path(python).absolute()) for name in ("trl", "torchtune") if (python := vars(args)[name])}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        directory = Path(folder)
        write_tokenizers(directory / "words")
        measure_stream(args, directory) if args.stream else compare(args, directory, pythons)


if __name__ == "__main__":
    main()
