"""Datasets for environments: prompts with the columns of the environment, and demonstrations for a warm start."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice, permutations, product
from pathlib import Path
from random import Random
from typing import Any

from scripts.nano.jsonl import write_rows
from scripts.nano.words import BOYS, COLORS, GIRLS, THINGS
from tunekit.environments.base import Environment, get_tool_schemas
from tunekit.environments.calculator import Calculator
from tunekit.environments.grid_world import MOVES, GridWorld
from tunekit.environments.key_value_lookup import KeyValueLookup

Row = dict[str, Any]
SIZES = {"demonstrations": 64, "test": 64, "train": 200}
SIDE, MIN_DISTANCE, NUM_MOVES = 3, 2, 4  # of grids; all of their goals are within NUM_MOVES


def iter_sums(rng: Random) -> Iterator[Row]:
    """Sums and differences of numbers up to 99, for `calculator`."""
    pairs = list(permutations(range(1, 100), 2))
    rng.shuffle(pairs)
    for first, second in pairs:
        sign = rng.choice("+-")
        prompt = rng.choice(("Calculate {}.", "How much is {}?")).format(f"{first} {sign} {second}")
        yield {"prompt": prompt, "answer": str(first + second if sign == "+" else first - second)}


def iter_tables(rng: Random) -> Iterator[Row]:
    """Chains of two lookups for `key_value_lookup`: from a name to a thing, and from the thing to its color."""
    while True:
        names, things, colors = rng.sample(GIRLS + BOYS, 3), rng.sample(THINGS, 3), rng.sample(COLORS, 3)
        table = dict(zip((*names, *things), (*things, *colors), strict=True))
        yield {"prompt": f"Look up {names[0]}, then what you find.", "table": table, "answer": colors[0]}


def iter_grids(rng: Random) -> Iterator[Row]:
    """Grids for `grid_world`, each with a wall."""
    cells = [(y, x) for y in range(SIDE) for x in range(SIDE)]
    triples = list(permutations(cells, 3))
    rng.shuffle(triples)
    for start, goal, wall in triples:
        if abs(start[0] - goal[0]) + abs(start[1] - goal[1]) >= MIN_DISTANCE:
            marks = {wall: "#", start: "S", goal: "G"}
            lines = ["".join(marks.get((y, x), ".") for x in range(SIDE)) for y in range(SIDE)]
            yield {"prompt": "Walk to the goal.", "grid": "\n".join(lines)}


def call(environment: Environment, name: str, **arguments: str) -> list[Row]:
    """A tool call and its result."""
    function = {"name": name, "arguments": arguments}
    result = getattr(environment, name)(**arguments)
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": name, "content": result},
    ]


def solve_sum(row: Row) -> Row:
    """A sum that the tool computes."""
    environment = Calculator()
    expression = re.findall(r"\d+ [+-] \d+", row["prompt"])[0]
    messages = [{"role": "user", "content": row["prompt"]}, *call(environment, "calculate", expression=expression)]
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(environment)}


def solve_table(row: Row) -> Row:
    """Two lookups."""
    environment = KeyValueLookup()
    environment.reset(**row)
    key = row["prompt"].removeprefix("Look up ").split(",")[0]
    messages = [{"role": "user", "content": row["prompt"]}]
    for name in (key, row["table"][key]):
        messages += call(environment, "lookup", key=name)
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(environment)}


def walk_grid(row: Row) -> Row:
    """A shortest walk to the goal."""
    environment = GridWorld()
    text: str | None = row["prompt"] + environment.reset(**row)
    messages = []
    for move in shortest_walk(row):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": move}]
        text = environment.step(move)
    return {"messages": messages}


def shortest_walk(row: Row) -> tuple[str, ...]:
    """The first walk to the goal among the shortest ones."""
    for count in range(NUM_MOVES + 1):
        for walk in product(MOVES, repeat=count):
            environment = GridWorld()
            environment.reset(**row)
            if any(environment.step(move) is None for move in walk):
                return walk
    raise ValueError(f"no walk of {NUM_MOVES} moves: {row['grid']}")


TASKS = {
    "calculator": (iter_sums, solve_sum),
    "key_value_lookup": (iter_tables, solve_table),
    "grid_world": (iter_grids, walk_grid),
}


def write_environment(name: str, directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl`, `test.jsonl` and `demonstrations.jsonl`, which have no task in common."""
    iter_rows, solve = TASKS[name]
    rows = iter_rows(Random(seed))
    for split, count in SIZES.items():
        part = islice(rows, count)
        write_rows(directory / f"{split}.jsonl", map(solve, part) if split == "demonstrations" else part)


WRITERS = {name: partial(write_environment, name) for name in TASKS}
