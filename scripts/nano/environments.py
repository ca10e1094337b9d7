"""Datasets for environments: prompts with the columns of the environment, and demonstrations for a warm start."""

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import islice, permutations, product
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
NUM_DEMONSTRATIONS, SIZES = 64, {"test": 64, "train": 200}
SIDE, MIN_DISTANCE, NUM_MOVES = 3, 2, 4  # of grids; all of their goals are within NUM_MOVES
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
    """Grids for `grid_world`, each with a wall."""
    cells = [(y, x) for y in range(SIDE) for x in range(SIDE)]
    triples = list(permutations(cells, 3))
    rng.shuffle(triples)
    for start, goal, wall in triples:
        if abs(start[0] - goal[0]) + abs(start[1] - goal[1]) >= MIN_DISTANCE:
            marks = {wall: "#", start: "S", goal: "G"}
            lines = ["".join(marks.get((y, x), ".") for x in range(SIDE)) for y in range(SIDE)]
            yield {"prompt": "Walk to the goal.", "grid": "\n".join(lines)}


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
    "calculator": (partial(iter_expressions, CALCULATE, "*", 199), solve_expression),
    "key_value_lookup": (iter_tables, solve_table),
    "grid_world": (iter_grids, walk_grid),
    "json_answer": (iter_people, write_json),
    "python": (partial(iter_expressions, RUN, "*", 199), run_code),
}
DEMONSTRATED = {  # easier tasks than those of the prompts: sums and differences
    "calculator": partial(iter_expressions, CALCULATE, "+-", 99),
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
