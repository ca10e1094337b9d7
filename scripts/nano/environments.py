"""Datasets for environments: prompts with the columns of the environment, and demonstrations for a warm start."""

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice, product
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from jsonschema import Draft202012Validator

from scripts.nano.jsonl import write_rows
from scripts.nano.words import BOYS, COLORS, GIRLS, THINGS
from tunekit.environments.base import Environment, get_tool_schemas
from tunekit.environments.calculator import Calculator
from tunekit.environments.grid_world import MOVES, GridWorld
from tunekit.environments.json_answer import JsonAnswer
from tunekit.environments.key_value_lookup import KeyValueLookup
from tunekit.environments.python_tool import PythonTool
from tunekit.environments.sandbox import SandboxConfig

Row = dict[str, Any]
Cell = tuple[int, int]  # row and column
NUM_DEMONSTRATIONS, SIZES = 64, {"test": 64, "train": 200}
SIDE, NUM_WALLS, NUM_MOVES = 5, 6, 4  # of grids; the goal is NUM_MOVES away, or nearer in demonstrations
CELLS = list(product(range(SIDE), repeat=2))
DIRECTIONS = [signs for signs in product((-1, 0, 1), repeat=2) if any(signs)]
MIN_BLOCKED = 3  # cells of a walk where one of two moves toward the goal is blocked
FEW_NAMES, FEW_THINGS = (GIRLS + BOYS)[::7], THINGS[::5]
CALCULATE, RUN = 'Calculate "{}".', 'Run "print({})".'
EXPRESSION = re.compile(r"\d+ [-+*] \d+")
PEOPLE = ("{name} is {age} years old.", "{name} turned {age} today.", "Name and age: {name}, {age}.")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def iter_expressions(template: str, signs: str, largest: int, rng: Random) -> Iterator[Row]:
    """Requests to compute an expression of two numbers, the first up to `largest`, and the second up to 99."""
    pairs = list(product(range(10, largest + 1), range(10, 100)))
    rng.shuffle(pairs)
    for first, second in pairs:
        sign = rng.choice(signs)
        answer = {"+": first + second, "-": first - second, "*": first * second}[sign]
        yield {"prompt": template.format(f"{first} {sign} {second}"), "answer": str(answer)}


def iter_tables(rng: Random) -> Iterator[Row]:
    """Chains of two lookups for `key_value_lookup`: from a name to a thing, and from the thing to its color."""
    while True:
        names, things, colors = rng.sample(FEW_NAMES, 3), rng.sample(FEW_THINGS, 3), rng.sample(COLORS, 3)
        table = dict(zip((*names, *things), (*things, *colors), strict=True))
        yield {"prompt": f'Look up "{names[0]}", then what you find.', "table": table, "answer": colors[0]}


def iter_grids(rng: Random) -> Iterator[Row]:
    """Grids for `grid_world`: walks that avoid walls and never turn away from the goal reach it in NUM_MOVES moves."""
    for start, goal, walls in iter_layouts(rng):
        if distance(start, goal) == NUM_MOVES and count_blocked(start, goal, walls) >= MIN_BLOCKED:
            yield make_grid(start, goal, walls)


def iter_open_grids(rng: Random) -> Iterator[Row]:
    """Grids with a near goal and no wall on the way, in each of eight directions; twice if two moves lead toward it.

    Column `choice` is the index of the first of these moves.
    """
    near = (layout for layout in iter_layouts(rng) if is_open(*layout))
    for direction in cycle(DIRECTIONS):
        row = next(make_grid(*layout) for layout in near if get_direction(*layout[:2]) == direction)
        for choice in range(sum(map(abs, direction))):
            yield {**row, "choice": choice}


def iter_layouts(rng: Random) -> Iterator[tuple[Cell, Cell, list[Cell]]]:
    """Start, goal and walls of different grids."""
    seen: set[tuple[Cell, ...]] = set()
    while True:
        start, goal, *walls = rng.sample(CELLS, 2 + NUM_WALLS)
        layout = (start, goal, *sorted(walls))
        if layout not in seen:
            seen.add(layout)
            yield start, goal, walls


def make_grid(start: Cell, goal: Cell, walls: list[Cell]) -> Row:
    """A prompt with the rows of a grid."""
    marks = dict.fromkeys(walls, "#") | {start: "S", goal: "G"}
    rows = ("".join(marks.get((y, x), ".") for x in range(SIDE)) for y in range(SIDE))
    return {"prompt": "Walk to the goal.", "grid": "\n".join(rows)}


def is_open(start: Cell, goal: Cell, walls: list[Cell]) -> bool:
    """Whether the goal is nearer than NUM_MOVES, with no wall in the rectangle between start and goal."""
    return distance(start, goal) < NUM_MOVES and all(
        distance(start, wall) + distance(wall, goal) > distance(start, goal) for wall in walls
    )


def get_direction(start: Cell, goal: Cell) -> Cell:
    """Signs of the distances to the goal, down and right."""
    return (goal[0] > start[0]) - (goal[0] < start[0]), (goal[1] > start[1]) - (goal[1] < start[1])


def distance(cell: Cell, goal: Cell) -> int:
    """Moves to the goal without walls."""
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


def moves_toward(cell: Cell, goal: Cell) -> dict[str, Cell]:
    """Moves that bring the goal nearer, and the cells that they lead to."""
    cells = {move: (cell[0] + down, cell[1] + right) for move, (down, right) in MOVES.items()}
    return {move: next_cell for move, next_cell in cells.items() if distance(next_cell, goal) < distance(cell, goal)}


def count_blocked(cell: Cell, goal: Cell, walls: list[Cell]) -> float:
    """Fewest cells with a blocked move toward the goal, over all walks of such moves; -inf: a walk gets stuck."""
    if cell == goal:
        return 0
    cells = moves_toward(cell, goal).values()
    free = [next_cell for next_cell in cells if next_cell not in walls]
    return min((count_blocked(c, goal, walls) for c in free), default=-inf) + (len(free) < len(cells))


def iter_people(rng: Random) -> Iterator[Row]:
    """Sentences with a name and an age, for `json_answer`."""
    pairs = list(product(FEW_NAMES, range(1, 100)))
    rng.shuffle(pairs)
    for name, age in pairs:
        yield {
            "prompt": rng.choice(PEOPLE).format(name=name, age=age),
            "answer": json.dumps({"name": name, "age": age}),
        }


def call(environment: Environment, name: str, **arguments: str) -> list[Row]:
    """A tool call and its result."""
    return call_messages(name, arguments, getattr(environment, name)(**arguments))


def call_messages(name: str, arguments: dict[str, str], result: str) -> list[Row]:
    """Messages of a tool call and its result."""
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": name, "content": result},
    ]


def solve_expression(row: Row) -> Row:
    """An expression that the tool computes."""
    environment = Calculator()
    expression = re.findall(EXPRESSION, row["prompt"])[0]
    messages = [{"role": "user", "content": row["prompt"]}, *call(environment, "calculate", expression=expression)]
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(environment)}


def solve_table(row: Row) -> Row:
    """Two lookups."""
    environment = KeyValueLookup()
    environment.reset(**row)
    key = row["prompt"].split('"')[1]
    messages = [{"role": "user", "content": row["prompt"]}]
    for name in (key, row["table"][key]):
        messages += call(environment, "lookup", key=name)
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(environment)}


def write_json(row: Row) -> Row:
    """The object that the sentence describes."""
    environment = JsonAnswer(Draft202012Validator(SCHEMA), max_attempts=1)
    prompt = row["prompt"] + environment.reset(**row)
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["answer"]}]}


def run_code(row: Row) -> Row:
    """The program of the prompt, and what it prints."""
    code = f"print({re.findall(EXPRESSION, row['prompt'])[0]})"
    calls = call_messages("python", {"code": code}, row["answer"])  # what the program prints
    messages = [{"role": "user", "content": row["prompt"]}, *calls]
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(PythonTool(SandboxConfig()))}


def walk_grid(row: Row) -> Row:
    """A shortest walk to the goal, with alternating choices where two moves lead toward it."""
    environment, choice = GridWorld("text"), row.get("choice", 0)
    text: str | None = row["prompt"] + environment.reset(**row)
    messages = []
    while text is not None:
        cells = moves_toward(environment.position, environment.goal).items()
        moves = [move for move, (y, x) in cells if environment.grid[y][x] != "#"]
        move, choice = moves[choice % len(moves)], choice + 1
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": move}]
        text = environment.step(move)
    return {"messages": messages}


TASKS = {
    "calculator": (partial(iter_expressions, CALCULATE, "*", 199), solve_expression),
    "key_value_lookup": (iter_tables, solve_table),
    "grid_world": (iter_grids, walk_grid),
    "json_answer": (iter_people, write_json),
    "python": (partial(iter_expressions, RUN, "*", 199), run_code),
}
DEMONSTRATED = {  # easier tasks than those of the prompts: sums and differences, near goals without walls on the way
    "calculator": partial(iter_expressions, CALCULATE, "+-", 99),
    "grid_world": iter_open_grids,
    "python": partial(iter_expressions, RUN, "+-", 99),
}


def write_environment(name: str, directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl`, `test.jsonl` and `demonstrations.jsonl`, which have no task in common."""
    iter_rows, solve = TASKS[name]
    rng = Random(seed)
    rows = iter_rows(rng)
    demonstrated = DEMONSTRATED[name](rng) if name in DEMONSTRATED else rows
    write_rows(directory / "demonstrations.jsonl", map(solve, islice(demonstrated, NUM_DEMONSTRATIONS)))
    for split, count in SIZES.items():
        write_rows(directory / f"{split}.jsonl", islice(rows, count))


def write_json_answer(directory: Path) -> None:
    """Write the rows and the schema that their answers follow."""
    write_environment("json_answer", directory)
    (directory / "schema.json").write_text(json.dumps(SCHEMA, indent=2) + "\n", encoding="utf-8")


WRITERS = {name: partial(write_environment, name) for name in TASKS} | {"json_answer": write_json_answer}
