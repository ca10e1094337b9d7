"""How good a model is: loss and answers on held-out rows, tasks by name, and whether it differs from another model.

tune run evaluate nano/tools
tune run evaluate nano/tools model=runs/nano-tools baseline=tunekit/nano data.split=test examples=10
tune run evaluate nano/known tasks=[nano,arc_easy] limit=100
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from tunekit import assemble, card
from tunekit.checkpoint.atomic import can_write, write_text
from tunekit.checkpoint.score import insist_on_text
from tunekit.data.steps.loader import load
from tunekit.data.steps.mix import Learnable, streams, title
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.errors import FieldError
from tunekit.evaluation.compare import changes
from tunekit.evaluation.figures import Result
from tunekit.evaluation.questions import Asker, Question, placed
from tunekit.evaluation.table import table
from tunekit.evaluation.tasks import Tasks
from tunekit.formats import FP4, NF4, Float8, Plain
from tunekit.generate import Sampling
from tunekit.hub import fetch
from tunekit.look import inspection
from tunekit.parallel.choice import COPIES, Parallel
from tunekit.parallel.run import Run
from tunekit.precision import Precision


@dataclass(frozen=True)
class Evaluate:
    """Which model is asked what. With a baseline, both are, and stand side by side."""

    model: str  # folder of a checkpoint, an adapter or a run; a Hub name; tunekit/nano
    data: Learnable | None = None  # held-out rows; the last learnt turn of each is the answer to match
    tasks: tuple[str, ...] = ()  # nano, nano/facts, ...; or tasks of lm-evaluation-harness: [arc_easy, hellaswag]
    shots: int | None = None  # examples in front of a question of the harness; none: as many as its task says
    include: str | None = None  # a folder with tasks of your own, as the harness reads them: its code is run
    chat: bool = False  # write the questions of the harness with the model's chat template
    limit: int | None = None  # take the first rows only, of `data` and of each task
    baseline: str | None = None  # a second model, such as the one before training
    sampling: Sampling = Sampling()
    weights: Plain | NF4 | FP4 | Float8 = Plain()  # how the weights of both are stored
    precision: Precision = Precision()
    batch: int = 32  # rows in one forward pass
    examples: int = 3  # answers to print
    out: str | None = None  # JSON file for the figures, every answer, and which rows were won and lost
    parallel: Parallel = COPIES  # how several devices share the rows, or the weights
    device: DeviceChoice = "auto"  # auto: the first of cuda, xpu, mps that torch finds, else cpu

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise FieldError("batch", f"must be 1 or more, not {self.batch}")
        if self.data is None and not self.tasks:
            raise FieldError("data", "nothing to ask: give rows, or tasks by name")
        if self.data is not None and streams(self.data):
            raise FieldError("data", "all rows are asked: it cannot be a stream; `limit` takes the first rows")
        assert self.named is not None  # its own checks

    @property
    def named(self) -> Tasks:
        return Tasks(self.tasks, self.shots, self.include, self.limit, self.chat)


RECIPE = Evaluate


def words(cfg: Evaluate) -> Tokenizer:
    """The tokenizer that rows are written with; no weight is read for it."""
    return assemble.described(cfg.model, fetch.SMALL)[2]


def check(cfg: Evaluate) -> None:
    """Whether the models, the rows and the tasks are there."""
    for name in filter(None, (cfg.model, cfg.baseline)):
        source, adapter, tokenizer = assemble.described(name, fetch.SMALL)
        insist_on_text(source, name)
        assemble.divisible(source, cfg.weights, adapter, cfg.parallel)
        if cfg.data is not None:
            cfg.data.prepare(tokenizer)
    if cfg.data is not None:
        cfg.data.check()
    cfg.named.check()


def main(cfg: Evaluate) -> list[Result]:
    """Measure each model and print what was found."""
    with Run(cfg.sampling.seed, cfg.device, cfg.parallel) as run:
        if cfg.out is not None:
            run.shared(partial(can_write, Path(cfg.out)))
        results, questions = [], []
        for name in filter(None, (cfg.baseline, cfg.model)):
            questions, result = measure(name, cfg, run)
            results.append(result)
        run.shared(partial(tell, cfg, questions, results))
    return results


def measure(name: str, cfg: Evaluate, run: Run) -> tuple[list[Question], Result]:
    """Questions of the rows, and all figures of one model, which is in memory only in here."""
    tasks = cfg.named.opened()  # before weights are read: some rows are far away
    model, tokenizer = assemble.opened(name, cfg.precision, run, cfg.weights)
    asker = Asker(model, tokenizer, cfg.sampling, cfg.batch, run)
    questions, found = [], []
    if cfg.data is not None:
        data = load(cfg.data, tokenizer, cfg.batch, cfg.batch, run)
        data.check(model.spec.vocab)
        if name == cfg.model:
            inspection.remark(cfg, data, tokenizer, run)
        questions, made = asker(title(cfg.data), islice(placed(data.parts), cfg.limit))
        found.append(made)
    return questions, Result(name, (*found, *cfg.named.ask(asker, name, tasks)))


def tell(cfg: Evaluate, questions: list[Question], results: list[Result]) -> None:
    """Print what was found, and put it into a file and onto the model's card."""
    changed = changes(results[0], results[-1], cfg.sampling.seed) if cfg.baseline is not None else []
    show(questions, results, cfg.examples)
    print(table(results, changed))
    if cfg.out is not None:
        content = {"models": [one.written() for one in results], "changes": [asdict(change) for change in changed]}
        write_text(Path(cfg.out), json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if cfg.data is not None:
        figures = [
            {"model": one.model, "loss": one.loss, "perplexity": one.perplexity, "right": one.right} for one in results
        ]
        card.evaluated(Path(cfg.model), title(cfg.data), figures, len(questions))


def show(questions: list[Question], results: list[Result], examples: int) -> None:
    """A few answers."""
    width = max(len(name) for name in ("question", *(result.model for result in results)))
    for i, question in enumerate(questions[:examples]):
        lines = {"question": question.text, "wanted": question.wanted}
        for name, text in {**lines, **{result.model: result.answers[i] for result in results}}.items():
            print(f"{name:{width}}  {text}")
        print()
