"""Dataset `tunekit/retrieval`: questions, the fact that answers each, and a similar fact that does not."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from scripts.nano.jsonl import write_rows
from scripts.nano.scene import Scene

SPLITS = {"train": 1200, "test": 200}


class Fact(NamedTuple):
    """Questions about a fact, the fact, and the slots of which the hard negative changes one."""

    questions: tuple[str, ...]
    fact: str
    changes: tuple[str, ...]


FACTS = (
    Fact(
        ("Where is the {color} {thing} of {name}?", "Where does {name} keep a {color} {thing}?"),
        "{name} put the {color} {thing} in the {room}.",
        ("name", "color", "thing"),
    ),
    Fact(
        ("When will {name} see {name2}?", "At which time does {name} meet {name2}?"),
        "{name} has a meeting with {name2} on {day} at {time}.",
        ("name", "name2"),
    ),
    Fact(
        ("What is the job of {name} from {city}?", "Which work does {name} do in {city}?"),
        "{name} is a {job} and lives in {city}.",
        ("name", "city"),
    ),
    Fact(
        ("How much does the {trait} {thing} in {city} cost?", "What is the price of a {trait} {thing} in {city}?"),
        "In {city}, you can buy a {trait} {thing} for {amount} coins.",
        ("city", "trait", "thing"),
    ),
    Fact(
        ("What does the {animal} of {name} eat?", "Which food does {name} give to the {animal}?"),
        "The {animal} that {name} has likes {food}.",
        ("animal", "name"),
    ),
)


def iter_rows(seed: int) -> Iterator[dict[str, str]]:
    """Rows of each kind of fact in turn, without end. All questions and facts differ."""
    rng, previous = Random(seed), set()
    while True:
        for fact in FACTS:
            scene = Scene(rng)
            row = {"query": scene.fill(rng.choice(fact.questions)), "positive": scene.fill(fact.fact)}
            changed = rng.choice(fact.changes)
            scene[changed] = Scene(rng, **scene)[f"{changed}9"]  # another word for the slot
            row["negative"] = scene.fill(fact.fact)
            if previous.isdisjoint(row.values()):
                previous |= {*row.values()}
                yield row


def write_retrieval(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    rows = iter_rows(seed)
    for split, count in SPLITS.items():
        write_rows(directory / f"{split}.jsonl", islice(rows, count))
