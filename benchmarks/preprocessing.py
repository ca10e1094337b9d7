"""Preprocessing of conversations compared with trl and torchtune: rows per second and memory of all processes.

    python benchmarks/preprocessing.py --trl PYTHON --torchtune PYTHON --rows 100000 --rounds 3
    python benchmarks/preprocessing.py --stream 10000000

Each library runs as a process in its own environment (see benchmarks/README.md), reads the same generated
conversations with the same tokenizer and template, and produces tokens and labels of at most 2,048. tunekit runs
twice, first without a cache. The report is rewritten after each run. `--stream` measures the memory of a long stream.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from library_runs import check_exit_code
from reporting import BENCHMARKS, CPU, RESULTS
from synthetic_chats import TEMPLATES, write_chats, write_tokenizers

from tunekit.data.dataloader import build
from tunekit.data.dataloader.batch import IGNORE
from tunekit.data.datasets import TextDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware

ROWS_PER_FILE = 100_000  # of the file that a stream reads repeatedly
SAMPLE_INTERVAL = 0.2  # seconds between two samples of memory
GLOBAL_BATCH_SIZE = 8  # packed rows of a stream per step
HEADER = """
| | rows | s | rows/s | speed of tunekit | peak memory, MiB | tokens | target tokens |
|---|---|---|---|---|---|---|---|
"""


@dataclass
class PreprocessingResult:
    """Measurements of one library with one template, over all rounds."""

    name: str  # of the library; "tunekit, cached" uses the cache of the previous run
    num_rows: int
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes of all processes
    measurements: dict = field(default_factory=dict)  # of the last run
    error: str = ""

    @property
    def library(self) -> str:
        return self.name.partition(",")[0]

    @property
    def rows_per_second(self) -> float:
        return self.num_rows / statistics.median(self.seconds)


def read_lines(file: Path) -> list[str]:
    """Lines of a file of a process; empty if the process has ended."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def iter_process_tree(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in " ".join(read_lines(file)).split():
            yield from iter_process_tree(int(child))


def measure_tree_memory(root_pid: int) -> int:
    """Bytes of a process tree; shared pages count once."""
    lines = (line for pid in iter_process_tree(root_pid) for line in read_lines(Path(f"/proc/{pid}/smaps_rollup")))
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def run_command(command: list[str], directory: Path) -> int:
    """Run a command; return its peak memory. Raise RuntimeError if it fails."""
    log, peak = directory / "log.txt", 0
    env = {"TUNEKIT_CACHE": str(directory / "cache"), "HF_DATASETS_CACHE": str(directory / "datasets")}
    env |= {"HF_HUB_OFFLINE": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=directory, env=os.environ | env)
        while process.poll() is None:
            peak = max(peak, measure_tree_memory(process.pid))
            time.sleep(SAMPLE_INTERVAL)
    check_exit_code(process.returncode, log)
    return peak


def run_library(directory: Path, python: str, template: str, result: PreprocessingResult) -> None:
    """Run one library, and add its measurements or its error to `result`."""
    output = directory / "result.json"
    if result.name == result.library:
        for cache in ("cache", "datasets"):
            shutil.rmtree(directory / cache, ignore_errors=True)
    script = BENCHMARKS / "libraries" / f"{result.library}_preprocessing.py"
    paths = directory / f"{result.num_rows}.jsonl", directory / "tokenizers" / template, output
    try:
        result.peaks.append(run_command([python, str(script), *map(str, paths)], directory))
        result.measurements = json.loads(output.read_text())
        result.seconds.append(result.measurements["seconds"])
        message = f"{result.num_rows / result.seconds[-1]:,.0f} rows/s"
    except (RuntimeError, OSError) as error:
        result.error = message = str(error)
    print(f"{template} {result.name}: {message}", flush=True)


def format_table(template: str, all_results: list[PreprocessingResult]) -> str:
    """A row per library, then the times of all rounds."""
    results = [result for result in all_results if result.seconds]
    baseline = next((result for result in results if result.name == "tunekit"), None)
    text = f"\n## {template}\n{HEADER}"
    for result in results:
        speedup = f"{baseline.rows_per_second / result.rows_per_second:.2f} x" if baseline else "-"
        seconds, peak = statistics.median(result.seconds), statistics.median(result.peaks) / 2**20
        num_tokens, num_target_tokens = (result.measurements[key] for key in ("num_tokens", "num_target_tokens"))
        text += f"| {result.name} | {result.num_rows:,} | {seconds:.2f} | {result.rows_per_second:,.0f} | {speedup} "
        text += f"| {peak:,.0f} | {num_tokens:,} | {num_target_tokens:,} |\n"
    text += "".join(f"\n{result.name} failed: {result.error}\n" for result in all_results if result.error)
    rounds = (f"- {result.name}: " + " ".join(f"{s:.2f}" for s in result.seconds) + "\n" for result in results)
    return text + "\nSeconds by round:\n\n" + "".join(rounds)


def format_report(results: dict[str, list[PreprocessingResult]]) -> str:
    measurements = [result.measurements for template_results in results.values() for result in template_results]
    versions = {name: version for m in measurements for name, version in m.get("versions", {}).items()}
    text = f"# Preprocessing of conversations, {date.today()}\n\n"
    text += f"`python benchmarks/preprocessing.py {' '.join(sys.argv[1:])}`\n\n"
    text += f"{describe_hardware(CPU)}; {', '.join(f'{name} {v}' for name, v in versions.items())}.\n"
    text += "Generated conversations of three to five questions and answers, byte-level BPE with a vocabulary of\n"
    text += "32,000, rows of at most 2,048 tokens. From the file to tokens and labels, without startup; medians.\n"
    return text + "".join(format_table(template, template_results) for template, template_results in results.items())


def compare_libraries(args: argparse.Namespace, directory: Path, pythons: dict[str, str]) -> None:
    """Run all rounds; runs of the libraries alternate."""
    num_rows: dict[str, int] = dict.fromkeys(("tunekit", "tunekit, cached", *pythons), args.rows)
    if "torchtune" in pythons:
        num_rows["torchtune"] = min(args.rows, args.torchtune_rows)
    for count in set(num_rows.values()):
        write_chats(directory / f"{count}.jsonl", count)
    all_results = {
        template: [
            PreprocessingResult(name, count)
            for name, count in num_rows.items()
            if name != "torchtune" or template == "headers"
        ]
        for template in args.templates
    }
    for _ in range(args.rounds):
        for template, results in all_results.items():
            for result in results:
                run_library(directory, pythons.get(result.library, sys.executable), template, result)
                report = format_report(all_results)
                (args.results / f"{date.today()}-preprocessing.md").write_text(report)


def write_stream(directory: Path, num_rows: int) -> Path:
    """Write short texts, in files that are links to one file to save disk space. Return their directory."""
    file, stream_dir = directory / "texts.jsonl", directory / "stream"
    texts = (f"row {n} of a stream: {7 * n} is larger than {n}" for n in range(min(ROWS_PER_FILE, num_rows)))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream_dir.mkdir()
    for number in range(-(-num_rows // ROWS_PER_FILE)):
        os.link(file, stream_dir / f"train-{number:05d}.jsonl")
    return stream_dir


def measure_stream(args: argparse.Namespace, directory: Path) -> None:
    """Print the memory while a data loader reads a packed stream, after each tenth of its rows."""
    source = str(write_stream(directory, args.stream))
    dataset = TextDataset(source=source, max_length=2048, packing=True, streaming=True)
    tokenizer = Tokenizer.open(directory / "tokenizers" / args.templates[0])
    dataloader = build.build_dataloader(dataset, tokenizer, GLOBAL_BATCH_SIZE, GLOBAL_BATCH_SIZE, DistributedContext())
    start, num_rows, num_tokens, next_report, step = time.perf_counter(), 0, 0, 0, 0
    print("| rows | tokens | s | rows/s | memory of all processes, MiB |\n|---|---|---|---|---|")
    while num_rows < args.stream:
        batches, step = dataloader[step], step + 1
        num_rows += sum(int(((batch.positions == 0) & (batch.targets != IGNORE)).sum()) for batch in batches)
        num_tokens += sum(batch.num_tokens for batch in batches)
        if num_rows >= next_report:
            seconds, memory = time.perf_counter() - start, measure_tree_memory(os.getpid()) / 2**20
            speed = f"{seconds:.0f} | {num_rows / seconds:,.0f}"
            print(f"| {num_rows:,} | {num_tokens:,} | {speed} | {memory:,.0f} |", flush=True)
            next_report += args.stream // 10
    dataloader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("trl", "torchtune"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter of the environment with {name}")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--torchtune-rows", type=int, default=10_000, help="it uses one core, and packs in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--templates", nargs="+", choices=list(TEMPLATES), default=list(TEMPLATES))
    parser.add_argument("--stream", type=int, metavar="ROWS", help="instead, stream this many rows and measure memory")
    parser.add_argument("--directory", type=Path, help="parent of the temporary directory")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    pythons = {name: str(Path(python).absolute()) for name in ("trl", "torchtune") if (python := vars(args)[name])}
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        write_tokenizers(directory / "tokenizers")
        measure_stream(args, directory) if args.stream else compare_libraries(args, directory, pythons)


if __name__ == "__main__":
    main()
