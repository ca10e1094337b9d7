"""Writes the data set of a skill that the nano lacks: answering a request with one tool call in JSON.

`python -m tunekit.nano.tools <folder>`
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tunekit.nano.requests import REQUESTS, Request
from tunekit.nano.scene import Exchange, Scene

SPLITS = {"train": 1800, "test": 200}


def call(rng: Random, request: Request) -> Exchange:
    """A request and its call; the arguments stand in the request word for word, numbers as numbers."""
    scene = Scene(rng)
    ask = scene.fill(rng.choice(request.asks))
    drawn = {argument: scene[slot] for argument, slot in request.arguments.items()}
    arguments = {argument: int(word) if word.isdigit() else word for argument, word in drawn.items()}
    return Exchange(ask, json.dumps({"name": request.tool, "arguments": arguments}, ensure_ascii=False))


def calls(seed: int) -> Iterator[Exchange]:
    """Requests in turn from all tools; no two ask for the same call."""
    rng, seen = Random(seed), set()
    while True:
        for request in REQUESTS:
            exchange = call(rng, request)
            while exchange.answer in seen:
                exchange = call(rng, request)
            seen.add(exchange.answer)
            yield exchange


def write(folder: Path, seed: int = 0) -> None:
    """Writes `train.jsonl` and `test.jsonl`, every tool equally often in both."""
    folder.mkdir(parents=True, exist_ok=True)
    source = calls(seed)
    for split, count in SPLITS.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                ask, answer = next(source)
                messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
