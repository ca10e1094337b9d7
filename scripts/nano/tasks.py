"""Evaluation tasks `nano/facts`, `nano/copying` and `nano/stories`: questions as in the training text.

Some facts also occur in the training text, because some kinds have few questions (sums of small numbers, capitals).
Stories and texts to copy do not.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

from scripts.nano import copying, facts
from scripts.nano.chats import make_story_comprehension
from scripts.nano.jsonl import write_rows
from scripts.nano.templates import Exchange, TemplateContext, sample_weighted, to_messages

NUM_ROWS = 200
SEED = 1000  # the training text has seed 0
TASKS: dict[str, Callable[[Random], list[Exchange]]] = {
    "facts": lambda rng: [sample_weighted(rng, facts.TASK_WEIGHTS)(TemplateContext(rng))],
    "copying": lambda rng: [sample_weighted(rng, copying.TASK_WEIGHTS)(TemplateContext(rng))],
    "stories": make_story_comprehension,
}


def iter_unique_conversations(make_conversation: Callable[[Random], list[Exchange]]) -> Iterator[list[Exchange]]:
    """Yield conversations without end; none repeats."""
    rng, seen = Random(SEED), set()
    while True:
        exchanges = make_conversation(rng)
        if tuple(exchanges) not in seen:
            seen.add(tuple(exchanges))
            yield exchanges


def write_tasks(directory: Path) -> None:
    """Write one JSONL file per task."""
    for name, make_conversation in TASKS.items():
        rows = islice(iter_unique_conversations(make_conversation), NUM_ROWS)
        write_rows(directory / f"{name}.jsonl", ({"messages": to_messages(row)} for row in rows))
