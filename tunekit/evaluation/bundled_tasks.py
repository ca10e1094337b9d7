"""Tasks of what the nano knows: questions by the makers of its corpus, from seeds of their own.

What has few questions (sums of small numbers, capitals) was learnt in part; stories, copies and calls are new.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.evaluation.generation_eval import Placed
from tunekit.nano import chats, copying, facts
from tunekit.nano.scene import Exchange, Scene
from tunekit.nano.tools import SPLITS, calls

ROWS, SEED = 200, 1000  # of each task; the corpus comes from seed 0
LENGTH = 1024  # tokens of the longest row: what the nano was made for


def fact(rng: Random) -> list[Exchange]:
    """A question whose answer is true."""
    return [drawn(rng, facts.TASKS)]


def copy(rng: Random) -> list[Exchange]:
    """A question whose answer stands in it."""
    return [drawn(rng, copying.TASKS)]


def drawn(rng: Random, tasks: dict[Callable[[Scene], Exchange], int]) -> Exchange:
    (ask,) = rng.choices(tuple(tasks), tuple(tasks.values()))
    return ask(Scene(rng))


def talks(make: Callable[[Random], list[Exchange]]) -> Iterator[list[Exchange]]:
    """Conversations without end, no two alike."""
    rng, seen = Random(SEED), set()
    while True:
        turns = make(rng)
        if tuple(turns) not in seen:
            seen.add(tuple(turns))
            yield turns


TASKS: dict[str, Callable[[], Iterator[list[Exchange]]]] = {
    "nano/facts": lambda: talks(fact),
    "nano/copying": lambda: talks(copy),
    "nano/stories": lambda: talks(chats.reading),
    "nano/tools": lambda: ([exchange] for exchange in islice(calls(0), SPLITS["train"], None)),
}


def task_documents(task: str, tokenizer: Tokenizer, limit: int | None) -> list[Placed]:
    """The rows of a task as a model's template writes them, the same ones each time."""
    rows = [
        Row(f"{task} row {number}", {"messages": messages(turns)})
        for number, turns in enumerate(islice(TASKS[task](), limit or ROWS), start=1)
    ]
    choice = ChatDataset(task, length=LENGTH)
    found: list[Placed] = []
    for row, made in zip(rows, choice.encode(choice.prepare(tokenizer), rows), strict=True):
        if not isinstance(made, list):
            raise UserError(f"tasks: {task} cannot be asked: {made}")
        found += [(row.where, document) for document in made]
    return found


def messages(turns: list[Exchange]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
