"""How good a model is on held-out rows: loss, perplexity, and how many answers are right to the letter.

tune run evaluate nano/tools
tune run evaluate nano/tools model=runs/nano-tools baseline=tunekit/nano data.split=test examples=10
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from tqdm import tqdm

from tunekit import assemble, card
from tunekit.checkpoint.atomic import write_text
from tunekit.data.prepared.documents import Document
from tunekit.data.steps.loader import Loader, load
from tunekit.data.steps.mix import Learnable, streams, title
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError
from tunekit.formats import FP4, NF4, Plain
from tunekit.generate import Sampling, complete
from tunekit.hub import fetch
from tunekit.look import inspection
from tunekit.losses import CrossEntropy, mean
from tunekit.parallel import Run
from tunekit.precision import Precision


@dataclass(frozen=True)
class Evaluate:
    """Which model is asked what. With a baseline, both are, and stand side by side."""

    model: str  # folder of a checkpoint, an adapter or a run; a Hub name; tunekit/nano
    data: Learnable  # held-out rows; the last learnt turn of each is the answer to match
    baseline: str | None = None  # a second model, such as the one before training
    sampling: Sampling = Sampling()
    weights: Plain | NF4 | FP4 = Plain()  # how the weights of both are stored
    precision: Precision = Precision()
    batch: int = 32  # rows in one forward pass
    examples: int = 3  # answers to print
    out: str | None = None  # JSON file for the figures and every answer
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise FieldError("batch", f"must be 1 or more, not {self.batch}")
        if streams(self.data):
            raise FieldError("data", "all rows are asked: it cannot be a stream; `limit` takes the first rows")


RECIPE = Evaluate


class Question(NamedTuple):
    """Tokens up to an answer, and the answer as text."""

    prompt: list[int]
    text: str
    wanted: str


@dataclass(frozen=True)
class Result:
    """Figures of one model; the answers stand in the order of the questions."""

    model: str
    loss: float  # nats per learnt token
    answers: tuple[str, ...]
    right: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond that, a float is infinite


def words(cfg: Evaluate) -> Tokenizer:
    """The tokenizer that rows are written with; no weight is read for it."""
    return assemble.described(cfg.model, fetch.SMALL)[2]


def check(cfg: Evaluate) -> None:
    """Whether the models and the rows are there."""
    for name in filter(None, (cfg.model, cfg.baseline)):
        _, _, tokenizer = assemble.described(name, fetch.SMALL)
        cfg.data.prepare(tokenizer)
    cfg.data.check()


def main(cfg: Evaluate) -> list[Result]:
    """Measure each model and print what was found."""
    with Run(cfg.sampling.seed, cfg.device) as run:
        results, questions = [], []
        for name in filter(None, (cfg.baseline, cfg.model)):
            questions, result = measure(name, cfg, run)
            results.append(result)
    show(questions, results, cfg.examples)
    figures = [asdict(result) | {"perplexity": result.perplexity} for result in results]
    if cfg.out is not None:
        write_text(Path(cfg.out), json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    card.evaluated(Path(cfg.model), title(cfg.data), figures, len(questions))
    return results


def measure(name: str, cfg: Evaluate, run: Run) -> tuple[list[Question], Result]:
    """Questions and figures of one model, which is in memory only in here."""
    model, tokenizer = assemble.opened(name, cfg.precision, run, cfg.weights)
    data = load(cfg.data, tokenizer, cfg.batch, cfg.batch, run)
    data.check(model.spec.vocab)
    if name == cfg.model:
        inspection.remark(cfg, data, tokenizer, run)
    questions, answers = list(asked(data, tokenizer)), []
    for first in tqdm(range(0, len(questions), cfg.batch), "answering", unit="batch", disable=None, leave=False):
        prompts = [question.prompt for question in questions[first : first + cfg.batch]]
        found = complete(model, prompts, cfg.sampling, tokenizer.stops, first)
        answers += [tokenizer.decode(tokens).strip() for tokens in found]
    right = sum(answer == question.wanted for answer, question in zip(answers, questions, strict=True))
    return questions, Result(name, mean(CrossEntropy(), model, data, run), tuple(answers), right)


def asked(data: Loader, tokenizer: Tokenizer) -> Iterator[Question]:
    """The last answer of each row. A row that was cut, or is learnt from its beginning as text is, asks nothing."""
    for document in chain.from_iterable(data.parts):
        first = start_of_answer(document)
        if first > 0 and len(document.tokens) == document.whole:
            prompt, answer = document.tokens[:first].tolist(), document.tokens[first:][document.learnt[first:]].tolist()
            yield Question(prompt, tokenizer.decode(prompt).strip(), tokenizer.decode(answer).strip())


def start_of_answer(document: Document) -> int:
    """Where the last run of learnt tokens begins."""
    learnt = document.learnt.nonzero()[0]
    breaks = (learnt[1:] - learnt[:-1] > 1).nonzero()[0]
    return int(learnt[breaks[-1] + 1] if len(breaks) else learnt[0])


def show(questions: list[Question], results: list[Result], examples: int) -> None:
    """A few answers, then the figures of all."""
    width = max(len(result.model) for result in results)
    width = max(width, len("question"))
    for i, question in enumerate(questions[:examples]):
        lines = {"question": question.text, "wanted": question.wanted}
        for name, text in {**lines, **{result.model: result.answers[i] for result in results}}.items():
            print(f"{name:{width}}  {text}")
        print()
    print(f"{'':{width}}  {'loss':>8}  {'perplexity':>10}  exact match")
    for result in results:
        share = f"{result.right / len(questions):.1%} ({result.right} of {len(questions)})" if questions else "-"
        print(f"{result.model:{width}}  {result.loss:8.4f}  {result.perplexity:10.4g}  {share}")
