"""Dataset `tunekit/retrieval`: questions, the fact that answers each, and a similar fact that does not."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from scripts.nano.jsonl import write_rows
from scripts.nano.templates import TemplateContext

SPLIT_SIZES = {"train": 1200, "test": 200}


class FactTemplate(NamedTuple):
    """Questions about a fact, the statement of the fact, and the slots of which the hard negative changes one."""

    questions: tuple[str, ...]
    statement: str
    changed_slots: tuple[str, ...]


FACT_TEMPLATES = (
    FactTemplate(
        ("Where is the {color} {thing} of {name}?", "Where does {name} keep a {color} {thing}?"),
        "{name} put the {color} {thing} in the {room}.",
        ("name", "color", "thing"),
    ),
    FactTemplate(
        ("When will {name} see {name2}?", "At which time does {name} meet {name2}?"),
        "{name} has a meeting with {name2} on {day} at {time}.",
        ("name", "name2"),
    ),
    FactTemplate(
        ("What is the job of {name} from {city}?", "Which work does {name} do in {city}?"),
        "{name} is a {job} and lives in {city}.",
        ("name", "city"),
    ),
    FactTemplate(
        ("How much does the {trait} {thing} in {city} cost?", "What is the price of a {trait} {thing} in {city}?"),
        "In {city}, you can buy a {trait} {thing} for {amount} coins.",
        ("city", "trait", "thing"),
    ),
    FactTemplate(
        ("What does the {animal} of {name} eat?", "Which food does {name} give to the {animal}?"),
        "The {animal} that {name} has likes {food}.",
        ("animal", "name"),
    ),
)


def iter_rows(seed: int) -> Iterator[dict[str, str]]:
    """Yield rows of all kinds of facts in turn, without end; no question or fact repeats."""
    rng, seen = Random(seed), set()
    while True:
        for fact in FACT_TEMPLATES:
            context = TemplateContext(rng)
            row = {"query": context.render(rng.choice(fact.questions)), "positive": context.render(fact.statement)}
            slot = rng.choice(fact.changed_slots)
            context[slot] = TemplateContext(rng, **context)[f"{slot}9"]  # another value for the slot
            row["negative"] = context.render(fact.statement)
            if seen.isdisjoint(row.values()):
                seen |= {*row.values()}
                yield row


def write_retrieval(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    rows = iter_rows(seed)
    for split, count in SPLIT_SIZES.items():
        write_rows(directory / f"{split}.jsonl", islice(rows, count))
