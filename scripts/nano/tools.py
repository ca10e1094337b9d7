"""Dataset `tunekit/tools`: requests answered with one tool call in JSON. The bundled model is not trained on these."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from scripts.nano.jsonl import write_rows
from scripts.nano.templates import Exchange, TemplateContext, to_messages
from scripts.nano.tool_requests import TOOL_REQUESTS, ToolRequest

SPLIT_SIZES = {"train": 1800, "test": 200}


def make_tool_call(rng: Random, request: ToolRequest) -> Exchange:
    """A request and its tool call. Arguments are copied from the request; numbers become integers."""
    context = TemplateContext(rng)
    prompt = context.render(rng.choice(request.prompts))
    values = {argument: context[slot] for argument, slot in request.argument_slots.items()}
    arguments = {argument: int(value) if value.isdigit() else value for argument, value in values.items()}
    return Exchange(prompt, json.dumps({"name": request.tool, "arguments": arguments}, ensure_ascii=False))


def iter_tool_calls(seed: int) -> Iterator[Exchange]:
    """Yield requests for all tools in turn, without end; no tool call repeats."""
    rng, seen = Random(seed), set()
    while True:
        for request in TOOL_REQUESTS:
            exchange = make_tool_call(rng, request)
            while exchange.answer in seen:
                exchange = make_tool_call(rng, request)
            seen.add(exchange.answer)
            yield exchange


def write_tools(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`. Each split has the same number of rows for every tool."""
    tool_calls = iter_tool_calls(seed)
    for split, count in SPLIT_SIZES.items():
        rows = ({"messages": to_messages([tool_call])} for tool_call in islice(tool_calls, count))
        write_rows(directory / f"{split}.jsonl", rows)
