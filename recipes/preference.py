"""Learning from preferences, full or with adapters: DPO and its kin, SimPO, ORPO, KTO, and sums of them.

tune run preference nano/dpo
tune run preference llama3_2/1b_dpo_lora loss.beta=0.05
tune run preference qwen3/1_7b_orpo_lora data.source=mine.jsonl
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from tunekit import training
from tunekit.config.choices import kind_name
from tunekit.data.steps.batch import Batch
from tunekit.data.steps.compared import Comparable
from tunekit.data.steps.loader import Loader
from tunekit.data.steps.mix import Mixed
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError
from tunekit.losses.comparison import Loss
from tunekit.losses.likely import CPO, ORPO, SFT, AlphaPO, SimPO
from tunekit.losses.marks import BCO, KTO, APO_Zero_Unpaired
from tunekit.losses.objective import Objective
from tunekit.losses.pairs import (
    AOT,
    DPO,
    IPO,
    AOT_Unpaired,
    APO_Down,
    APO_Zero,
    BCO_Pair,
    DiscoPOP,
    EXO_Pair,
    Hinge,
    NCA_Pair,
    Robust,
    Sigmoid,
    Sigmoid_Norm,
    SPPO_Hard,
)
from tunekit.losses.tally import Tally
from tunekit.memory import Update
from tunekit.models.decoder import Decoder
from tunekit.parallel.run import Run
from tunekit.reference import Cached, Copy, Initial, Off, Shift
from tunekit.training import Job, Method, Taken, Training

OfPairs = (
    DPO | Sigmoid | Sigmoid_Norm | Hinge | IPO | Robust | EXO_Pair | NCA_Pair | BCO_Pair | SPPO_Hard | AOT
    | AOT_Unpaired | APO_Zero | APO_Down | DiscoPOP | SFT | CPO | SimPO | AlphaPO | ORPO
)  # fmt: skip
OfMarks = KTO | BCO | APO_Zero_Unpaired


@dataclass(frozen=True, kw_only=True)
class Preference(Training):
    """Everything this recipe can be told: what every training can, what is minimised, and against which reference."""

    data: Comparable  # pairs of answers, or answers with marks
    validation: Comparable | None = None  # held-out rows
    loss: tuple[OfPairs | OfMarks, ...] = (DPO(),)  # what is minimised: one term, or several that are added up
    reference: Initial | Off | Copy | Cached = Initial()  # where losses compare with the model that training began with
    tail: float = 1.0  # LD-DPO: weight of the tokens by which an answer is longer than the other one

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.loss:
            raise FieldError("loss", "name at least one term")
        if not 0 <= self.tail <= 1:
            raise FieldError("tail", f"a weight from 0 to 1, not {self.tail}")
        others = [name(term) for term in self.loss if term.each == 1 or not term.compares]
        if self.tail < 1 and others:
            raise FieldError("tail", f"is for pairs that are compared with a reference, and {others[0]} does not do so")
        self.reference.check(self, Objective(self.loss, self.tail))


RECIPE = Preference


def name(term: Loss) -> str:
    """The `kind` of a loss."""
    return kind_name(type(term))


def words(cfg: Preference) -> Tokenizer:
    """The tokenizer that rows are written with."""
    return training.words(cfg)


def check(cfg: Preference) -> None:
    """What can be known without reading weights."""
    training.check(cfg)
    held = None if cfg.validation is None else Mixed.of(cfg.validation).settled()
    insist(cfg.loss, Mixed.of(cfg.data).settled(), held)


def insist(loss: Sequence[Loss], data: Mixed, held: Mixed | None) -> None:
    """UserError if the terms, or the figures, compare pairs and rows are single answers."""
    if data.each == 1 and (paired := [name(term) for term in loss if term.each == 2]):
        raise UserError(f"loss: {paired[0]} compares pairs, and these rows are single answers: use kto, bco or pairs")
    if held is not None and held.each < data.each:
        raise UserError("validation: these rows are single answers, and those of `data` are pairs: make both alike")


def main(cfg: Preference, fresh: bool = False) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    training.run(cfg, Method("preference", train_step, validate, beside), fresh)


def beside(job: Job) -> dict[str, Any]:
    """The objective for these rows, its reference, and what BCO remembers."""
    goal = Objective(job.cfg.loss, job.cfg.tail, job.data.mix.each == 2)
    insist(goal.terms, job.data.mix, job.held and job.held.mix)
    for data in filter(None, (job.data, job.held)):
        if any(term.others for term in goal.terms):
            data.cross()
        if job.model.shares_prefixes(data.mix.length) and data.share() and data is job.data:
            found = data.report
            job.run.tell(f"data: prompts are computed once: {found.tokens:,} tokens, packed into {found.packed:,} rows")
    return {"goal": replace(goal, judges=job.cfg.reference.open(job, goal)), "shift": Shift()}


def train_step(
    model: Decoder, batches: list[Batch], cfg: Preference, update: Update, run: Run, goal: Objective, shift: Shift
) -> Taken:
    """One optimizer step. Chosen and rejected answers go through the model side by side."""
    tally, judge = Tally(), goal.judges.data
    parts = goal.parts(batches, judge, run)
    step = goal.begin(model, parts, judge, run, shift.take)
    for i, part in enumerate(parts, start=1):
        run.sync_gradients(model, on=i == len(parts))
        found = goal.answers(model, part)
        loss = goal.loss(found, step)
        (loss * run.averaged).backward()  # sharding averages gradients over the ranks
        tally.add(goal.figures(found, loss, step))
        step = step.behind(found)
    figures = goal.shown(tally.means(run, 1))
    loss = figures.pop("loss")
    return Taken(loss, update(loss), figures)


@torch.no_grad()
def validate(
    model: Decoder, held: Loader, cfg: Preference, run: Run, goal: Objective, shift: Shift
) -> dict[str, float]:
    """The loss and all figures of held-out rows."""
    training, tally, judge = model.training, Tally(), goal.judges.held
    model.eval()
    for number in tqdm(range(held.steps(1)), "validating", disable=not run.is_main or None, leave=False):
        parts = goal.parts(held[number], judge, run)
        step = goal.begin(model, parts, judge, run, shift.mean)
        for part in parts:
            found = goal.answers(model, part)
            tally.add(goal.figures(found, goal.loss(found, step), step))
            step = step.behind(found)
    model.train(training)
    return {name: float(value) for name, value in goal.shown(tally.means(run, 1)).items()}
