"""Dataset `tunekit/tools`: requests answered with one tool call in JSON, a skill that the bundled model lacks."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from scripts.nano.jsonl import write_rows
from scripts.nano.requests import REQUESTS, Request
from scripts.nano.scene import Exchange, Scene, to_messages

SPLITS = {"train": 1800, "test": 200}


def make_call(rng: Random, request: Request) -> Exchange:
    """A request and its tool call. Arguments are copied from the request; digits become integers."""
    scene = Scene(rng)
    prompt = scene.fill(rng.choice(request.prompts))
    values = {argument: scene[slot] for argument, slot in request.arguments.items()}
    arguments = {argument: int(value) if value.isdigit() else value for argument, value in values.items()}
    return Exchange(prompt, json.dumps({"name": request.tool, "arguments": arguments}, ensure_ascii=False))


def iter_calls(seed: int) -> Iterator[Exchange]:
    """Requests for each tool in turn, without end. All tool calls differ."""
    rng, previous = Random(seed), set()
    while True:
        for request in REQUESTS:
            exchange = make_call(rng, request)
            while exchange.answer in previous:
                exchange = make_call(rng, request)
            previous.add(exchange.answer)
            yield exchange


def write_tools(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`. Each split has the same number of rows for every tool."""
    calls = iter_calls(seed)
    for split, count in SPLITS.items():
        write_rows(directory / f"{split}.jsonl", ({"messages": to_messages([call])} for call in islice(calls, count)))
