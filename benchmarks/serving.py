"""Load test of `tune serve`: many clients that send requests one after another, some of which disconnect.

    python benchmarks/serving.py [--model tunekit/nano] [--clients 64] [--seconds 120] [--max-num-seqs 64]

The server is a child process; the clients are in this one. Each request streams an answer of 8 to 128 tokens to one of
a few questions. The clients of 1 in 20 requests disconnect after their first token. Afterwards one more request must be
answered, which shows that no row of the engine is leaked. The report is printed and written to benchmarks/results/.
"""

import argparse
import asyncio
import json
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
from reporting import RESULTS, describe_environment

READY_PATTERN = re.compile(r"serving .* at (http://\S+)")
QUESTIONS = ("What is 3 plus 4?", "A story about a fox, please.", "How many grams are 62 pounds?", "Who are you?")
DISCONNECT_FRACTION = 0.05


@dataclass
class LoadStats:
    """Times in seconds of the answered requests, and the outcomes of all requests."""

    time_to_first_token: list[float] = field(default_factory=list)
    request_time: list[float] = field(default_factory=list)
    num_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


async def send_request(client: httpx.AsyncClient, model: str, rng: random.Random, stats: LoadStats) -> None:
    """Send one request and read its stream."""
    disconnects = rng.random() < DISCONNECT_FRACTION
    body = {
        "model": model,
        "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}],
        "temperature": 1.5,
        "max_tokens": rng.randint(8, 128),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first_token_time, finish_reason, is_done = time.perf_counter(), None, None, False
    async with client.stream("POST", "/chat/completions", json=body) as response:
        if response.status_code != 200:
            stats.outcomes[f"status {response.status_code}"] += 1
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
            if first_token_time is None and choice.get("delta", {}).get("content"):
                first_token_time = time.perf_counter() - start
                if disconnects:
                    stats.outcomes["disconnected by the client"] += 1
                    return
            stats.num_tokens += chunk["usage"]["completion_tokens"] if chunk.get("usage") else 0
    if not is_done or finish_reason not in ("stop", "length"):
        stats.outcomes["lost"] += 1
        return
    stats.outcomes["answered"] += 1
    request_time = time.perf_counter() - start
    stats.request_time.append(request_time)
    stats.time_to_first_token.append(request_time if first_token_time is None else first_token_time)


async def run_clients(url: str, args: argparse.Namespace, stats: LoadStats) -> float:
    """Run all clients for the given time. Return the seconds until the last answer is complete."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def run_client(number: int) -> None:
            rng = random.Random(number)
            while time.perf_counter() - start < args.seconds:
                try:
                    await send_request(client, args.model, rng, stats)
                except httpx.HTTPError as error:
                    stats.outcomes[f"lost: {type(error).__name__}"] += 1

        await asyncio.gather(*(run_client(number) for number in range(args.clients)))
        seconds = time.perf_counter() - start
        final_stats = LoadStats()
        await send_request(client, args.model, random.Random(0), final_stats)
        stats.outcomes["answered after the load"] += final_stats.outcomes["answered"]
    return seconds


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[min(int(len(values) * fraction), len(values) - 1)]


def format_report(args: argparse.Namespace, stats: LoadStats, seconds: float, exit_code: int) -> str:
    outcomes = ", ".join(f"{name}: {count}" for name, count in sorted(stats.outcomes.items()))
    times = {"time to first token, s": stats.time_to_first_token, "time per request, s": stats.request_time}
    rows = [
        f"| {name} | {percentile(values, 0.5):.2f} | {percentile(values, 0.95):.2f} | {max(values):.2f} |"
        for name, values in times.items()
    ]
    lines = [
        f"# Serving, {date.today()}",
        "",
        f"`python benchmarks/serving.py --clients {args.clients} --seconds {args.seconds:g} --max-num-seqs "
        f"{args.max_num_seqs}`: {args.model}, {args.clients} concurrent clients,",
        "answers of 8 to 128 tokens, temperature 1.5. Server and clients share the cores.",
        f"{args.environment} before the test.",
        "",
        "| | p50 | p95 | max |",
        "|---|---|---|---|",
        *rows,
        "",
        f"{len(stats.request_time) / seconds:.1f} answers/s, {stats.num_tokens / seconds:.0f} tokens/s in "
        f"{seconds:.0f} s. Requests: {outcomes}. Server after SIGTERM: exit code {exit_code}.",
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
    args.environment = describe_environment("tunekit")
    command = [sys.executable, "-m", "tunekit.cli", "serve", args.model, "--port", "0"]
    command += ["--max-num-seqs", str(args.max_num_seqs)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        match = next(filter(None, map(READY_PATTERN.match, server.stdout)), None)
        assert match, "the server did not start"
        stats = LoadStats()
        seconds = asyncio.run(run_clients(match[1], args, stats))
        server.terminate()
        exit_code = server.wait(60)
    finally:
        server.kill()
    text = format_report(args, stats, seconds, exit_code)
    print(text)
    args.output.write_text(text)


if __name__ == "__main__":
    main()
