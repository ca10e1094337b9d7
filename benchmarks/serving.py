"""Load test of `tune serve`: many clients that send requests one after another, some of which disconnect.

    python benchmarks/serving.py [--model tunekit/nano] [--clients 64] [--seconds 120] [--max-num-seqs 64]

The server is a child process; the clients are in this one. Each request streams an answer of 8 to 128 tokens to one of
a few questions. The clients of 1 in 20 requests disconnect after their first token. Afterwards one more request must be
answered: all rows of the engine are free again. Reports are printed and written to benchmarks/results/.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import httpx
import torch

from tunekit import __version__, env_info

RESULTS = Path(__file__).parent / "results"
READY = re.compile(r"serving .* at (http://\S+)")
QUESTIONS = ("What is 3 plus 4?", "A story about a fox, please.", "How many grams are 62 pounds?", "Who are you?")
DISCONNECT_FRACTION = 0.05


@dataclass
class Record:
    """Times in seconds of the requests that were answered, and how the requests ended."""

    first_token: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    num_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)


async def send(client: httpx.AsyncClient, model: str, rng: random.Random, record: Record) -> None:
    """Send one request and read its stream."""
    leaves = rng.random() < DISCONNECT_FRACTION
    body = {
        "model": model,
        "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}],
        "temperature": 1.5,
        "max_tokens": rng.randint(8, 128),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, finish_reason, is_done = time.perf_counter(), None, None, False
    async with client.stream("POST", "/chat/completions", json=body) as response:
        if response.status_code != 200:
            record.ends[f"status {response.status_code}"] += 1
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
                break
            if not line.startswith("data: "):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            choice = chunk["choices"][0] if chunk["choices"] else {}
            finish_reason = choice.get("finish_reason") or finish_reason
            if first is None and choice.get("delta", {}).get("content"):
                first = time.perf_counter() - started
                if leaves:
                    record.ends["disconnected by the client"] += 1
                    return
            record.num_tokens += chunk["usage"]["completion_tokens"] if chunk.get("usage") else 0
    if not is_done or finish_reason not in ("stop", "length"):
        record.ends["lost"] += 1
        return
    record.ends["answered"] += 1
    record.total.append(time.perf_counter() - started)
    record.first_token.append(record.total[-1] if first is None else first)


async def run_clients(url: str, args: argparse.Namespace, record: Record) -> float:
    """Run all clients for the given time. Returns the seconds until the last one has its answer."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    started = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def run_client(number: int) -> None:
            rng = random.Random(number)
            while time.perf_counter() - started < args.seconds:
                try:
                    await send(client, args.model, rng, record)
                except httpx.HTTPError as error:
                    record.ends[f"lost: {type(error).__name__}"] += 1

        await asyncio.gather(*(run_client(number) for number in range(args.clients)))
        seconds = time.perf_counter() - started
        last = Record()
        await send(client, args.model, random.Random(0), last)
        record.ends["answered after the load"] += last.ends["answered"]
    return seconds


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[min(int(len(values) * fraction), len(values) - 1)]


def report(args: argparse.Namespace, record: Record, seconds: float) -> str:
    """Report as Markdown."""
    ends = ", ".join(f"{name}: {count}" for name, count in sorted(record.ends.items()))
    rows = [
        f"| {name} | {percentile(values, 0.5):.2f} | {percentile(values, 0.95):.2f} | {max(values):.2f} |"
        for name, values in (("time to first token, s", record.first_token), ("time per request, s", record.total))
    ]
    lines = [
        f"# Serving, {date.today()}",
        "",
        f"`python benchmarks/serving.py --clients {args.clients} --seconds {args.seconds:g} --max-num-seqs "
        f"{args.max_num_seqs}`: {args.model}, {args.clients} clients at once,",
        "answers of 8 to 128 tokens, temperature 1.5.",
        f"tunekit {__version__}, torch {torch.__version__}, Python {platform.python_version()},",
        f"{env_info.processor()}, {os.cpu_count()} cores, which server and clients share.",
        f"Load average before: {args.load:.1f}.",
        "",
        "| | p50 | p95 | max |",
        "|---|---|---|---|",
        *rows,
        "",
        f"{len(record.total) / seconds:.1f} answers/s, {record.num_tokens / seconds:.0f} tokens/s in {seconds:.0f} s. "
        f"Requests: {ends}. Server after SIGTERM: exit code {args.exit_code}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tunekit/nano")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{date.today()}-serving.md")
    args = parser.parse_args()
    args.load = os.getloadavg()[0]
    command = [sys.executable, "-m", "tunekit.cli", "serve", args.model, "--port", "0"]
    command += ["--max-num-seqs", str(args.max_num_seqs)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        match = next(filter(None, map(READY.match, server.stdout)), None)
        assert match, "the server did not start"
        record = Record()
        seconds = asyncio.run(run_clients(match[1], args, record))
        server.terminate()
        args.exit_code = server.wait(60)
    finally:
        server.kill()
    text = report(args, record, seconds)
    print(text)
    args.output.write_text(text)


if __name__ == "__main__":
    main()
