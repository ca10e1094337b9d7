"""Evaluation tasks `nano/facts`, `nano/copying` and `nano/stories`: questions as in the training text.

Some facts also occur in the training text, because there are few of their kind (sums of small numbers, capitals).
Stories and texts to copy are new.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

from scripts.nano import copying, facts
from scripts.nano.chats import make_reading
from scripts.nano.jsonl import write_rows
from scripts.nano.scene import Exchange, Scene, choose_weighted, to_messages

NUM_ROWS = 200
SEED = 1000  # the training text has seed 0
TASKS: dict[str, Callable[[Random], list[Exchange]]] = {
    "facts": lambda rng: [choose_weighted(rng, facts.TASKS)(Scene(rng))],
    "copying": lambda rng: [choose_weighted(rng, copying.TASKS)(Scene(rng))],
    "stories": make_reading,
}


def iter_unique(make: Callable[[Random], list[Exchange]]) -> Iterator[list[Exchange]]:
    """Conversations without end. All of them differ."""
    rng, previous = Random(SEED), set()
    while True:
        exchanges = make(rng)
        if tuple(exchanges) not in previous:
            previous.add(tuple(exchanges))
            yield exchanges


def write_tasks(directory: Path) -> None:
    """Write one JSONL file per task."""
    for name, make in TASKS.items():
        rows = islice(iter_unique(make), NUM_ROWS)
        write_rows(directory / f"{name}.jsonl", ({"messages": to_messages(row)} for row in rows))
