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

from tunekit.config.choices import kind_name
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.preference_data import PreferenceData
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.losses.dpo import (
    AOT,
    DPO,
    IPO,
    AOTUnpaired,
    APODown,
    APOZero,
    BCOPair,
    DiscoPOP,
    EXOPair,
    Hinge,
    NCAPair,
    Robust,
    Sigmoid,
    SigmoidNorm,
    SPPOHard,
)
from tunekit.losses.metric_sums import MetricSums
from tunekit.losses.preference_base import PreferenceLoss
from tunekit.losses.preference_objective import PreferenceObjective
from tunekit.losses.reference_free import CPO, ORPO, AlphaPO, SFTTerm, SimPO
from tunekit.losses.unpaired import BCO, KTO, APOZeroUnpaired
from tunekit.memory.config import TrainOptimizer
from tunekit.models.decoder import Decoder
from tunekit.training import config as training
from tunekit.training.config import Job, Method, Taken, TrainConfig
from tunekit.training.reference_model import (
    AutoReference,
    CopiedReference,
    DisableAdapterReference,
    PrecomputedReference,
    RunningMean,
)

OfPairs = (
    DPO | Sigmoid | SigmoidNorm | Hinge | IPO | Robust | EXOPair | NCAPair | BCOPair | SPPOHard | AOT
    | AOTUnpaired | APOZero | APODown | DiscoPOP | SFTTerm | CPO | SimPO | AlphaPO | ORPO
)  # fmt: skip
OfMarks = KTO | BCO | APOZeroUnpaired


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(TrainConfig):
    """Everything this recipe can be told: what every training can, what is minimised, and against which reference."""

    data: PreferenceData  # pairs of answers, or answers with marks
    eval_data: PreferenceData | None = None  # held-out rows
    loss: tuple[OfPairs | OfMarks, ...] = (DPO(),)  # what is minimised: one term, or several that are added up
    # Reference model; `auto`: the cheapest that works
    reference: AutoReference | DisableAdapterReference | CopiedReference | PrecomputedReference = AutoReference()
    ld_alpha: float = 1.0  # LD-DPO: weight of the tokens beyond the shorter answer (arXiv:2409.06411)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.loss:
            raise FieldError("loss", "name at least one term")
        if not 0 <= self.ld_alpha <= 1:
            raise FieldError("ld_alpha", f"a weight from 0 to 1, not {self.ld_alpha}")
        others = [kind_of(term) for term in self.loss if term.docs_per_item == 1 or not term.needs_reference]
        if self.ld_alpha < 1 and others:
            raise FieldError(
                "ld_alpha", f"is for pairs that are compared with a reference, and {others[0]} does not do so"
            )
        self.reference.check(self, PreferenceObjective(self.loss, self.ld_alpha))


RECIPE = PreferenceConfig


def kind_of(term: PreferenceLoss) -> str:
    """The `kind` of a loss."""
    return kind_name(type(term))


def words(cfg: PreferenceConfig) -> Tokenizer:
    """The tokenizer that rows are written with."""
    return training.get_tokenizer(cfg)


def check(cfg: PreferenceConfig) -> None:
    """What can be known without reading weights."""
    training.check_training(cfg)
    held = None if cfg.eval_data is None else MixtureBase.from_config(cfg.eval_data).resolve()
    check_terms(cfg.loss, MixtureBase.from_config(cfg.data).resolve(), held)


def check_terms(loss: Sequence[PreferenceLoss], data: MixtureBase, held: MixtureBase | None) -> None:
    """UserError if the terms, or the figures, compare pairs and rows are single answers."""
    if data.docs_per_row == 1 and (paired := [kind_of(term) for term in loss if term.docs_per_item == 2]):
        raise UserError(f"loss: {paired[0]} compares pairs, and these rows are single answers: use kto, bco or pairs")
    if held is not None and held.docs_per_row < data.docs_per_row:
        raise UserError("eval_data: these rows are single answers, and those of `data` are pairs: make both alike")


def main(cfg: PreferenceConfig, overwrite: bool = False) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    training.run(cfg, Method("preference", forward_backward, evaluate, beside), overwrite)


def beside(job: Job) -> dict[str, Any]:
    """The objective for these rows, its reference, and what BCO remembers."""
    goal = PreferenceObjective(job.cfg.loss, job.cfg.ld_alpha, job.data.mixture.docs_per_row == 2)
    check_terms(goal.terms, job.data.mixture, job.held and job.held.mixture)
    for data in filter(None, (job.data, job.held)):
        if any(term.needs_mismatched for term in goal.terms):
            data.add_mismatched()
        if job.model.shares_prefixes(data.mixture.max_length) and data.share_prefixes() and data is job.data:
            found = data.summary
            job.run.log(f"data: prompts are computed once: {found.tokens:,} tokens, packed into {found.num_packed_rows:,} rows")
    return {"goal": replace(goal, judges=job.cfg.reference.open(job, goal)), "shift": RunningMean()}


def forward_backward(
    model: Decoder,
    batches: list[Batch],
    cfg: PreferenceConfig,
    update: TrainOptimizer,
    run: DistributedContext,
    goal: PreferenceObjective,
    shift: RunningMean,
) -> Taken:
    """One optimizer step. Chosen and rejected answers go through the model side by side."""
    tally, judge = MetricSums(), goal.reference.train
    parts = goal.prepare_batches(batches, judge, run)
    step = goal.step_totals(model, parts, judge, run, shift.take)
    for i, part in enumerate(parts, start=1):
        run.set_gradient_sync(model, enabled=i == len(parts))
        found = goal.compute_logps(model, part)
        loss = goal.loss(found, step)
        (loss * run.grad_scale).backward()  # sharding averages gradients over the ranks
        tally.add(goal.metric_sums(found, loss, step))
        step = step.after(found)
    figures = goal.to_metrics(tally.means(run, 1))
    loss = figures.pop("loss")
    return Taken(loss, update(loss), figures)


@torch.no_grad()
def evaluate(
    model: Decoder,
    held: DataLoader,
    cfg: PreferenceConfig,
    run: DistributedContext,
    goal: PreferenceObjective,
    shift: RunningMean,
) -> dict[str, float]:
    """The loss and all figures of held-out rows."""
    training, tally, judge = model.training, MetricSums(), goal.reference.eval
    model.eval()
    for number in tqdm(range(held.num_steps(1)), "validating", disable=not run.is_main_process or None, leave=False):
        parts = goal.prepare_batches(held[number], judge, run)
        step = goal.step_totals(model, parts, judge, run, shift.mean)
        for part in parts:
            found = goal.compute_logps(model, part)
            tally.add(goal.metric_sums(found, goal.loss(found, step), step))
            step = step.after(found)
    model.train(training)
    return {name: float(value) for name, value in goal.to_metrics(tally.means(run, 1)).items()}
