"""Weighted sum of preference losses, with the totals of a step, the metrics to log, and the evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit.config.choices import kind_name
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.devices import fork_rng
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError, check_range
from tunekit.losses.metric_sums import MetricSums, eval_steps
from tunekit.losses.preference_base import PreferenceLoss, StepTotals
from tunekit.losses.router_losses import RouterLosses
from tunekit.losses.sequence_logps import (
    SequenceLogps,
    frozen_logps,
    sequence_logps,
    sum_per_document,
    target_counts,
)
from tunekit.models.decoder import Decoder

RefLogpsFn = Callable[[Batch], Tensor]  # log-probabilities (D,) of the documents of a batch under the reference
MicroBatch = tuple[Batch, Tensor]  # a batch on the device, and its log-probabilities (D,) under the reference


def zero_reference(batch: Batch) -> Tensor:
    """Zeros (D,) for losses without a reference."""
    return torch.zeros(len(batch.documents.is_desirable), device=batch.tokens.device)


class ReferenceLogps(NamedTuple):
    """Functions that return log-probabilities under the reference, for training and evaluation batches."""

    train: RefLogpsFn = zero_reference
    eval: RefLogpsFn = zero_reference


class RunningMean:
    """Mean of all log-ratios so far: the reward shift of BCO (arXiv:2404.04656)."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(2, dtype=torch.float64)

    def take(self, ratios: Tensor) -> Tensor:
        """The mean after adding the log-ratios (D,) of one step, which are ignored if one is not finite."""
        total, count = (x.to(ratios.device, non_blocking=True) for x in (self.total, self.count))
        step_total = ratios.double().sum()
        self.total = torch.where(step_total.isfinite(), total + step_total, total)
        self.count = torch.where(step_total.isfinite(), count + len(ratios), count)
        return self.mean(ratios)

    def mean(self, ratios: Tensor) -> Tensor:
        """The mean so far, in the dtype and on the device of `ratios`."""
        return (self.total / self.count.clamp(min=1)).to(ratios)

    def state_dict(self) -> dict[str, Any]:
        return {"total": float(self.total), "count": int(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = torch.tensor([state["total"], state["count"]], dtype=torch.float64)


@dataclass(frozen=True)
class PreferenceObjective:
    """Sum of terms. Logged rewards are those of the first term."""

    terms: tuple[PreferenceLoss, ...]
    ld_alpha: float = 1.0  # weight of the tokens beyond the length of the shorter answer
    is_paired: bool = True  # answers come in pairs
    reference: ReferenceLogps = ReferenceLogps()
    running_mean: RunningMean = field(default_factory=RunningMean)  # of log-ratios, for BCO
    routers: RouterLosses = RouterLosses()

    def __post_init__(self) -> None:
        if not self.terms:
            raise FieldError("loss", "must have at least one loss, got none")
        check_range(self, "ld_alpha", ge=0, le=1)
        unsupported = [term for term in self.terms if term.docs_per_item == 1 or not term.needs_reference]
        if self.ld_alpha < 1 and unsupported:
            kind = kind_name(type(unsupported[0]))
            raise FieldError("ld_alpha", f"needs losses of pairs with a reference, got {kind}. Set ld_alpha=1.")

    def check_data(self, data: DatasetConfig | MixtureBase, eval_data: DatasetConfig | MixtureBase | None) -> None:
        """Raise UserError if a loss needs pairs and the rows are single answers."""
        docs_per_row = MixtureBase.from_config(data).resolve().docs_per_row
        paired = [kind_name(type(term)) for term in self.terms if term.docs_per_item == 2]
        if docs_per_row == 1 and paired:
            raise UserError(
                f"loss: {paired[0]} needs preference pairs, but data has unpaired rows. Set loss=kto or loss=bco, or "
                "use a dataset with chosen and rejected."
            )
        if eval_data is not None and MixtureBase.from_config(eval_data).resolve().docs_per_row < docs_per_row:
            raise UserError(
                "eval_data: has unpaired rows, but data has preference pairs. Use the same format for both."
            )

    def prepare_data(
        self, model: Decoder, data: DataLoader, eval_data: DataLoader | None, dist: DistributedContext
    ) -> "PreferenceObjective":
        """This objective for the format of the rows. Prepares the model and the loaders for its losses."""
        self.routers.prepare(model)
        self.check_data(data.mixture, eval_data and eval_data.mixture)
        for loader in filter(None, (data, eval_data)):
            if any(term.needs_mismatched for term in self.terms):
                loader.add_mismatched()
            if model.shares_prefixes(loader.mixture.max_length) and loader.share_prefixes() and loader is data:
                tokens, rows = loader.summary.tokens, loader.summary.num_packed_rows
                dist.log(f"data: shared prompts are computed once: {tokens:,} tokens in {rows:,} rows")
        return replace(self, is_paired=data.mixture.docs_per_row == 2)

    def compute_logps(self, model: Decoder, micro_batch: MicroBatch) -> SequenceLogps:
        batch, ref_logps = micro_batch
        self.routers.begin_pass(model, batch)
        full = any(term.needs_prompt_logps for term in self.terms)
        return replace(sequence_logps(model, batch, full, self.ld_alpha), ref_logps=ref_logps)

    def begin_step(
        self, model: Decoder, batches: list[Batch], dist: DistributedContext, training: bool = True
    ) -> tuple[list[MicroBatch], StepTotals]:
        """Micro-batches of a step on the device, and its totals, before any loss is computed.

        In training, the log-ratios of the step are added to the running mean.
        """
        ref_logps_fn = self.reference.train if training else self.reference.eval
        micro_batches = [(batch, ref_logps_fn(batch)) for batch in [batch.to(dist.device) for batch in batches]]
        sums = MetricSums()
        for batch, _ in micro_batches:
            sums.add(batch_totals(batch))
        totals = sums.means(dist, 1)
        zero = torch.zeros_like(totals["answers"])  # on the device of the answers: metrics are stacked with theirs
        step = StepTotals(totals["answers"], totals["tokens"], totals["lengths"], kl=zero, mean_log_ratio=zero)
        if any(term.needs_mismatched for term in self.terms):
            step = replace(step, kl=mismatched_kl(model, micro_batches, ref_logps_fn, dist))
        if any(term.needs_full_step for term in self.terms):
            answers, offset = self.gather_answers(model, micro_batches, dist)
            mean_fn = self.running_mean.take if training else self.running_mean.mean
            step = replace(step, all_answers=answers, offset=offset, mean_log_ratio=mean_fn(answers.log_ratios))
        return micro_batches, step

    @torch.no_grad()
    def gather_answers(
        self, model: Decoder, micro_batches: list[MicroBatch], dist: DistributedContext
    ) -> tuple[SequenceLogps, int]:
        """All answers of a step, and the index of the first one of this rank. Uses the dropout masks of the step."""
        with fork_rng(dist.device):
            local = concat_logps([self.compute_logps(model, micro_batch) for micro_batch in micro_batches])
        if dist.world_size == 1:  # gathering objects copies to the host, which would synchronize with the device
            return local, 0
        ranks_per_row = dist.dims.cp * dist.dims.tp  # CP and TP ranks read the same rows
        ranks = dist.all_gather_objects({name: value.cpu() for name, value in vars(local).items()})[::ranks_per_row]
        offset = sum(len(rank["logps"]) for rank in ranks[: dist.dp_rank])
        shards = [SequenceLogps(**{name: x.to(dist.device) for name, x in rank.items()}) for rank in ranks]
        return concat_logps(shards), offset

    def loss(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """Contribution of these answers to the loss of the step."""
        return torch.stack([term.mean(answers, step) for term in self.terms]).sum()

    def router_loss(self, model: Decoder, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """Contribution of the routers in the pass that computed these answers; 0 without router losses."""
        stats, count = model.router_stats, len(answers.logps)
        if stats is None:
            return answers.logps.new_zeros(())
        return self.routers.router_loss(model, stats, count) * (count / step.num_answers)

    def metric_sums(self, answers: SequenceLogps, loss: Tensor, step: StepTotals) -> dict[str, Tensor]:
        """Sums over the answers, from which `to_metrics` computes the metrics of a step."""
        answers = answers.detach()
        desirable, rewards = answers.is_desirable.float(), self.terms[0].rewards(answers)
        num_correct = (rewards[::2] > rewards[1::2]).float().sum() if self.is_paired else rewards.new_zeros(())
        return {
            "loss": loss.detach() * step.num_answers,
            "answers": rewards.new_full((), len(rewards)),
            "desirable": desirable.sum(),
            "correct": num_correct,
            "chosen": (rewards * desirable).sum(),
            "rejected": (rewards * (1 - desirable)).sum(),
            "logps chosen": (answers.logps * desirable).sum(),
            "logps rejected": (answers.logps * (1 - desirable)).sum(),
            "entropy": answers.entropies.sum(),
            "tokens": answers.num_tokens.sum(),
            "kl": step.kl * len(rewards),
        }

    def to_metrics(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss and mean metrics under TRL's names. The mean of an empty set is NaN."""
        count, num_chosen = sums["answers"], sums["desirable"]
        num_rejected = count - num_chosen
        metrics = {
            "loss": sums["loss"] / count,
            "rewards/chosen": sums["chosen"] / num_chosen,
            "rewards/rejected": sums["rejected"] / num_rejected,
            "rewards/margins": sums["chosen"] / num_chosen - sums["rejected"] / num_rejected,
            "logps/chosen": sums["logps chosen"] / num_chosen,
            "logps/rejected": sums["logps rejected"] / num_rejected,
            "entropy": sums["entropy"] / sums["tokens"],
        }
        metrics |= {"rewards/accuracies": sums["correct"] / num_chosen} if self.is_paired else {}
        return metrics | ({"kl": sums["kl"] / count} if any(term.needs_mismatched for term in self.terms) else {})

    @torch.no_grad()
    def evaluate(self, model: Decoder, data: DataLoader | None, dist: DistributedContext) -> dict[str, float]:
        """Loss and all other metrics of the held-out rows, if there are any."""
        if data is None:
            return {}
        sums = MetricSums()
        for batches in eval_steps(model, data, dist):
            micro_batches, state = self.begin_step(model, batches, dist, training=False)
            for micro_batch in micro_batches:
                logps = self.compute_logps(model, micro_batch)
                sums.add(self.metric_sums(logps, self.loss(logps, state), state))
                state = state.after(logps)
        return {name: float(value) for name, value in self.to_metrics(sums.means(dist, 1)).items()}

    def logps_fn(self, model: Decoder) -> RefLogpsFn:
        """Function that returns log-probabilities under the current weights of a model."""
        return partial(frozen_logps, model, ld_alpha=self.ld_alpha)


def batch_totals(batch: Batch) -> dict[str, Tensor]:
    """Number of answers of a batch, and number of tokens of its desirable answers."""
    desirable, full_mask = batch.documents.is_desirable.float(), (batch.targets_with_prompts >= 0).float()
    return {
        "answers": desirable.new_full((), len(desirable)),
        "tokens": (target_counts(batch) * desirable).sum(),
        "lengths": (sum_per_document(batch, full_mask) * desirable).sum(),
    }


def mismatched_kl(
    model: Decoder, micro_batches: list[MicroBatch], ref_logps_fn: RefLogpsFn, dist: DistributedContext
) -> Tensor:
    """Estimate of the KL divergence from the reference (KTO's z), from answers paired with other prompts. Scalar."""
    sums = MetricSums()
    for batch, _ in micro_batches:
        mismatched = batch.documents.mismatched
        assert mismatched is not None, "the data loader does not add mismatched answers"
        log_ratios = frozen_logps(model, mismatched) - ref_logps_fn(mismatched)
        sums.add({"log_ratios": log_ratios.sum(), "answers": log_ratios.new_full((), len(log_ratios))})
    totals = sums.means(dist, 1)
    return (totals["log_ratios"] / totals["answers"]).clamp(min=0)


def concat_logps(shards: list[SequenceLogps]) -> SequenceLogps:
    return SequenceLogps(**{name: torch.cat([vars(shard)[name] for shard in shards]) for name in vars(shards[0])})
