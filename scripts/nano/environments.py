"""Datasets for environments: prompts with the columns of the environment, and demonstrations for SFT before RL."""

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
from scripts.nano.word_lists import COLORS, FEMALE_NAMES, MALE_NAMES, THINGS
from tunekit.environments.base import Environment, get_tool_schemas
from tunekit.environments.calculator import Calculator
from tunekit.environments.grid_world import MOVES, GridWorld
from tunekit.environments.json_answer import JsonAnswer
from tunekit.environments.key_value_lookup import KeyValueLookup
from tunekit.environments.python_tool import PythonTool
from tunekit.environments.sandbox import SandboxConfig

Row = dict[str, Any]
Cell = tuple[int, int]  # row and column
NUM_DEMONSTRATIONS = 64
SPLIT_SIZES = {"test": 64, "train": 200}
GRID_SIZE, NUM_WALLS = 5, 6
NUM_MOVES = 4  # distance of the goal; demonstrations have smaller distances
CELLS = list(product(range(GRID_SIZE), repeat=2))
DIRECTIONS = [signs for signs in product((-1, 0, 1), repeat=2) if any(signs)]
MIN_BLOCKED_CELLS = 3  # cells of a shortest walk where a wall blocks one of two moves toward the goal
NAME_SUBSET, THING_SUBSET = (FEMALE_NAMES + MALE_NAMES)[::7], THINGS[::5]
CALCULATOR_PROMPT, PYTHON_PROMPT = 'Calculate "{}".', 'Run "print({})".'
EXPRESSION_PATTERN = re.compile(r"\d+ [-+*] \d+")
PERSON_PROMPTS = ("{name} is {age} years old.", "{name} turned {age} today.", "Name and age: {name}, {age}.")
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def iter_expressions(template: str, operators: str, max_first: int, rng: Random) -> Iterator[Row]:
    """Prompts with an expression of two numbers. The first is from 10 to `max_first`, the second from 10 to 99."""
    pairs = list(product(range(10, max_first + 1), range(10, 100)))
    rng.shuffle(pairs)
    for first, second in pairs:
        operator = rng.choice(operators)
        answer = {"+": first + second, "-": first - second, "*": first * second}[operator]
        yield {"prompt": template.format(f"{first} {operator} {second}"), "answer": str(answer)}


def iter_lookup_chains(rng: Random) -> Iterator[Row]:
    """Tables for `key_value_lookup`: a name is mapped to a thing, and the thing to its color."""
    while True:
        names, things, colors = rng.sample(NAME_SUBSET, 3), rng.sample(THING_SUBSET, 3), rng.sample(COLORS, 3)
        table = dict(zip((*names, *things), (*things, *colors), strict=True))
        yield {"prompt": f'Look up "{names[0]}", then what you find.', "table": table, "answer": colors[0]}


def iter_grids(rng: Random) -> Iterator[Row]:
    """Grids for `grid_world`. Walks that avoid walls and always reduce the distance need NUM_MOVES moves."""
    for start, goal, walls in iter_layouts(rng):
        if get_distance(start, goal) == NUM_MOVES and count_blocked_cells(start, goal, walls) >= MIN_BLOCKED_CELLS:
            yield make_grid_row(start, goal, walls)


def iter_open_grids(rng: Random) -> Iterator[Row]:
    """Grids with a goal that is nearer than NUM_MOVES, in each of eight directions, without walls between.

    Diagonal directions, where two moves lead toward the goal, occur twice. Column `choice` is the index of the first
    move.
    """
    open_layouts = (layout for layout in iter_layouts(rng) if has_open_path(*layout))
    for direction in cycle(DIRECTIONS):
        row = next(make_grid_row(*layout) for layout in open_layouts if get_direction(*layout[:2]) == direction)
        for choice in range(sum(map(abs, direction))):
            yield {**row, "choice": choice}


def iter_layouts(rng: Random) -> Iterator[tuple[Cell, Cell, list[Cell]]]:
    """Start, goal and walls of grids without duplicates."""
    seen: set[tuple[Cell, ...]] = set()
    while True:
        start, goal, *walls = rng.sample(CELLS, 2 + NUM_WALLS)
        layout = (start, goal, *sorted(walls))
        if layout not in seen:
            seen.add(layout)
            yield start, goal, walls


def make_grid_row(start: Cell, goal: Cell, walls: list[Cell]) -> Row:
    """A prompt with a grid as text."""
    symbols = dict.fromkeys(walls, "#") | {start: "S", goal: "G"}
    rows = ("".join(symbols.get((y, x), ".") for x in range(GRID_SIZE)) for y in range(GRID_SIZE))
    return {"prompt": "Walk to the goal.", "grid": "\n".join(rows)}


def has_open_path(start: Cell, goal: Cell, walls: list[Cell]) -> bool:
    """Whether the goal is nearer than NUM_MOVES, without a wall in the rectangle between start and goal."""
    return get_distance(start, goal) < NUM_MOVES and all(
        get_distance(start, wall) + get_distance(wall, goal) > get_distance(start, goal) for wall in walls
    )


def get_direction(start: Cell, goal: Cell) -> Cell:
    """Signs of the vertical and the horizontal distance to the goal."""
    return (goal[0] > start[0]) - (goal[0] < start[0]), (goal[1] > start[1]) - (goal[1] < start[1])


def get_distance(cell: Cell, goal: Cell) -> int:
    """Number of moves to the goal without walls."""
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


def get_moves_toward(cell: Cell, goal: Cell) -> dict[str, Cell]:
    """Moves that reduce the distance to the goal, and the cells that they lead to."""
    cells = {move: (cell[0] + down, cell[1] + right) for move, (down, right) in MOVES.items()}
    return {
        move: next_cell for move, next_cell in cells.items() if get_distance(next_cell, goal) < get_distance(cell, goal)
    }


def count_blocked_cells(cell: Cell, goal: Cell, walls: list[Cell]) -> float:
    """Minimum number of cells with a blocked move toward the goal over all walks; -inf if a walk ends at walls."""
    if cell == goal:
        return 0
    cells = get_moves_toward(cell, goal).values()
    open_cells = [next_cell for next_cell in cells if next_cell not in walls]
    return min((count_blocked_cells(c, goal, walls) for c in open_cells), default=-inf) + (len(open_cells) < len(cells))


def iter_people(rng: Random) -> Iterator[Row]:
    """Sentences with a name and an age, for `json_answer`."""
    pairs = list(product(NAME_SUBSET, range(1, 100)))
    rng.shuffle(pairs)
    for name, age in pairs:
        yield {
            "prompt": rng.choice(PERSON_PROMPTS).format(name=name, age=age),
            "answer": json.dumps({"name": name, "age": age}),
        }


def call_tool(environment: Environment, name: str, **arguments: str) -> list[Row]:
    """Call a method of the environment. Returns the messages of the tool call and its result."""
    return build_tool_messages(name, arguments, getattr(environment, name)(**arguments))


def build_tool_messages(name: str, arguments: dict[str, str], result: str) -> list[Row]:
    """Messages of a tool call and its result."""
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": name, "content": result},
    ]


def demonstrate_calculation(row: Row) -> Row:
    """Messages with a call of the calculator."""
    environment = Calculator()
    expression = re.findall(EXPRESSION_PATTERN, row["prompt"])[0]
    messages = [{"role": "user", "content": row["prompt"]}, *call_tool(environment, "calculate", expression=expression)]
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(environment)}


def demonstrate_lookups(row: Row) -> Row:
    """Messages with two lookups."""
    environment = KeyValueLookup()
    environment.reset(**row)
    key = row["prompt"].split('"')[1]
    messages = [{"role": "user", "content": row["prompt"]}]
    for name in (key, row["table"][key]):
        messages += call_tool(environment, "lookup", key=name)
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(environment)}


def demonstrate_json_answer(row: Row) -> Row:
    """Messages with the JSON object that the prompt describes."""
    environment = JsonAnswer(Draft202012Validator(PERSON_SCHEMA), max_attempts=1)
    prompt = row["prompt"] + environment.reset(**row)
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["answer"]}]}


def demonstrate_python(row: Row) -> Row:
    """Messages with a call of the Python tool. The program is not executed, because the answer is its output."""
    code = f"print({re.findall(EXPRESSION_PATTERN, row['prompt'])[0]})"
    calls = build_tool_messages("python", {"code": code}, row["answer"])
    messages = [{"role": "user", "content": row["prompt"]}, *calls]
    messages += [{"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "tools": get_tool_schemas(PythonTool(SandboxConfig()))}


def demonstrate_grid_walk(row: Row) -> Row:
    """Messages with a shortest walk to the goal. Alternates the choice where two moves lead toward it."""
    environment, choice = GridWorld("text"), row.get("choice", 0)
    text: str | None = row["prompt"] + environment.reset(**row)
    messages = []
    while text is not None:
        cells = get_moves_toward(environment.position, environment.goal).items()
        moves = [move for move, (y, x) in cells if environment.grid[y][x] != "#"]
        move, choice = moves[choice % len(moves)], choice + 1
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": move}]
        text = environment.step(move)
    return {"messages": messages}


GENERATORS = {  # of rows; of a demonstration from a row
    "calculator": (partial(iter_expressions, CALCULATOR_PROMPT, "*", 199), demonstrate_calculation),
    "key_value_lookup": (iter_lookup_chains, demonstrate_lookups),
    "grid_world": (iter_grids, demonstrate_grid_walk),
    "json_answer": (iter_people, demonstrate_json_answer),
    "python": (partial(iter_expressions, PYTHON_PROMPT, "*", 199), demonstrate_python),
}
DEMONSTRATION_GENERATORS = {  # easier rows: sums and differences instead of products, near goals without walls between
    "calculator": partial(iter_expressions, CALCULATOR_PROMPT, "+-", 99),
    "grid_world": iter_open_grids,
    "python": partial(iter_expressions, PYTHON_PROMPT, "+-", 99),
}


def write_environment(name: str, directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl`, `test.jsonl` and `demonstrations.jsonl`. No two of them have a row in common."""
    iter_rows, demonstrate = GENERATORS[name]
    rng = Random(seed)
    rows = iter_rows(rng)
    demonstration_rows = DEMONSTRATION_GENERATORS[name](rng) if name in DEMONSTRATION_GENERATORS else rows
    write_rows(directory / "demonstrations.jsonl", map(demonstrate, islice(demonstration_rows, NUM_DEMONSTRATIONS)))
    for split, count in SPLIT_SIZES.items():
        write_rows(directory / f"{split}.jsonl", islice(rows, count))


def write_json_answer(directory: Path) -> None:
    """Write the rows and the JSON schema of their answers."""
    write_environment("json_answer", directory)
    (directory / "schema.json").write_text(json.dumps(PERSON_SCHEMA, indent=2) + "\n", encoding="utf-8")


DATASET_WRITERS = {name: partial(write_environment, name) for name in GENERATORS} | {"json_answer": write_json_answer}
