"""Answers to prompts, many at once: from the command line or from a file.

tune run generate nano/generate 'prompts=["What is 3 plus 4?"]'
tune run generate nano/generate source=questions.jsonl out=answers.jsonl sampling.temperature=0.7
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tunekit import assemble
from tunekit.checkpoint.atomic import write_text
from tunekit.data.chat.manner import manner
from tunekit.data.chat.messages import conversation
from tunekit.data.rows import named
from tunekit.data.sources.source import find, open_source
from tunekit.data.sources.table import insist
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.errors import FieldError, UserError
from tunekit.formats import FP4, NF4, Float8, Plain
from tunekit.generate import Sampling, answers
from tunekit.hub import fetch
from tunekit.parallel.choice import COPIES, Parallel
from tunekit.parallel.run import Run
from tunekit.precision import Precision


@dataclass(frozen=True)
class Generate:
    """Which model is asked what, and how it chooses its words."""

    model: str  # folder of a checkpoint, an adapter or a run; a Hub name; tunekit/nano
    prompts: tuple[str, ...] = ()  # what a user says
    source: str | None = None  # rows with `messages` (up to what is to be answered) or `prompt`
    split: str = "train"  # of the source
    system: str | None = None  # what the system message says
    raw: bool = False  # go on from the prompt as it stands, without the chat template
    sampling: Sampling = Sampling()
    weights: Plain | NF4 | FP4 | Float8 = Plain()  # how its weights are stored
    precision: Precision = Precision()
    batch: int = 16  # prompts that are answered at once
    out: str | None = None  # JSONL file with a prompt and an answer a line; None: print them
    parallel: Parallel = COPIES  # how several devices share the prompts, or the weights
    device: DeviceChoice = "auto"  # auto: the first of cuda, xpu, mps that torch finds, else cpu

    def __post_init__(self) -> None:
        if not self.prompts and self.source is None:
            raise FieldError("prompts", "nothing to answer: give prompts, or a source with rows of them")
        if self.batch < 1:
            raise FieldError("batch", f"must be 1 or more, not {self.batch}")


RECIPE = Generate


def check(cfg: Generate) -> None:
    """Whether the model and the rows are there."""
    source, adapter, _ = assemble.described(cfg.model, fetch.SMALL)
    assemble.divisible(source, cfg.weights, adapter, cfg.parallel)
    if cfg.source is not None:
        find(cfg.source, cfg.split)


def main(cfg: Generate) -> None:
    """Answer all prompts, in their order."""
    with Run(cfg.sampling.seed, cfg.device, cfg.parallel) as run:
        model, tokenizer = assemble.opened(cfg.model, cfg.precision, run, cfg.weights)
        texts = list(asked(cfg))
        prompts = [ids(text, tokenizer, cfg) for text in texts]
        found = answers(model, prompts, cfg.sampling, tokenizer.stops, cfg.batch, run)
        pairs = zip(texts, found, strict=True)
        lines = [{"prompt": text, "answer": tokenizer.decode(answer)} for text, answer in pairs]
        run.shared(partial(tell, cfg, lines))


def asked(cfg: Generate) -> Iterator[str | list]:
    """Prompts as text, or as conversations."""
    yield from cfg.prompts
    for row in map(insist, open_source(cfg.source, cfg.split, None).rows) if cfg.source is not None else ():
        found = row.fields.get("messages", row.fields.get("prompt"))
        if not isinstance(found, str | list) or not found:
            raise UserError(f"{row.where}: neither 'messages' nor 'prompt' to answer")
        yield found if isinstance(found, str) else named(row, conversation, found, "messages")


def ids(prompt: str | list, tokenizer: Tokenizer, cfg: Generate) -> list[int]:
    """The tokens to go on from."""
    if isinstance(prompt, str) and cfg.raw:
        return tokenizer.encode(prompt, special=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    system = [{"role": "system", "content": cfg.system}] if cfg.system else []
    messages = [*system, *messages]
    return tokenizer.prompt(manner(tokenizer.template(), tokenizer).fit(messages))


def tell(cfg: Generate, lines: list[dict]) -> None:
    if cfg.out is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text(Path(cfg.out), text)
        print(f"{len(lines)} answers in {cfg.out}")
        return
    for line in lines:
        prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
        print(f"> {prompt}\n{line['answer']}\n")
