"""Weighted sum of preference losses, with the totals of a step and the metrics to log."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tunekit.data.dataloader.batch import Batch
from tunekit.devices import fork_rng
from tunekit.distributed.context import DistributedContext
from tunekit.losses.metric_sums import MetricSums
from tunekit.losses.preference_base import PreferenceLoss, StepTotals
from tunekit.losses.sequence_logps import (
    SequenceLogps,
    frozen_logps,
    is_desirable,
    sequence_logps,
    sum_per_document,
    target_counts,
)
from tunekit.models.decoder import Decoder

RefLogpsFn = Callable[[Batch], Tensor]  # log-probabilities (D,) of the documents of a batch under the reference
MicroBatch = tuple[Batch, Tensor]  # a batch on the device, and its log-probabilities (D,) under the reference


def zero_reference(batch: Batch) -> Tensor:
    """Zeros (D,) for losses without a reference."""
    return torch.zeros(len(is_desirable(batch)), device=batch.tokens.device)


class ReferenceLogps(NamedTuple):
    """Functions that return log-probabilities under the reference, for training and evaluation batches."""

    train: RefLogpsFn = zero_reference
    eval: RefLogpsFn = zero_reference


@dataclass(frozen=True)
class PreferenceObjective:
    """Sum of terms. Logged rewards are those of the first term."""

    terms: tuple[PreferenceLoss, ...]
    ld_alpha: float = 1.0  # weight of the tokens beyond the length of the shorter answer
    is_paired: bool = True  # answers come in pairs
    reference: ReferenceLogps = ReferenceLogps()

    def prepare_batches(
        self, batches: list[Batch], ref_logps_fn: RefLogpsFn, run: DistributedContext
    ) -> list[MicroBatch]:
        """Move the micro-batches of a step to the device and compute their log-probabilities under the reference."""
        on_device = [batch.to(run.device) for batch in batches]
        return [(batch, ref_logps_fn(batch)) for batch in on_device]

    def compute_logps(self, model: Decoder, micro_batch: MicroBatch) -> SequenceLogps:
        batch, ref_logps = micro_batch
        full = any(term.needs_prompt_logps for term in self.terms)
        return sequence_logps(model, batch, full, self.ld_alpha).with_reference(ref_logps)

    def step_totals(
        self,
        model: Decoder,
        micro_batches: list[MicroBatch],
        ref_logps_fn: RefLogpsFn,
        run: DistributedContext,
        mean_fn: Callable[[Tensor], Tensor],
    ) -> StepTotals:
        """Totals of a step, before any loss is computed. `mean_fn` updates the running mean of log-ratios."""
        sums = MetricSums()
        for batch, _ in micro_batches:
            sums.add(batch_totals(batch))
        totals = sums.means(run, 1)
        zero = torch.zeros_like(totals["answers"])  # on the device of the answers: metrics are stacked with theirs
        step = StepTotals(totals["answers"], totals["tokens"], totals["lengths"], kl=zero, mean_log_ratio=zero)
        if any(term.needs_mismatched for term in self.terms):
            step = replace(step, kl=mismatched_kl(model, micro_batches, ref_logps_fn, run))
        if any(term.needs_full_step for term in self.terms):
            answers, offset = self.gather_answers(model, micro_batches, run)
            step = replace(step, all_answers=answers, offset=offset, mean_log_ratio=mean_fn(answers.log_ratios))
        return step

    @torch.no_grad()
    def gather_answers(
        self, model: Decoder, micro_batches: list[MicroBatch], run: DistributedContext
    ) -> tuple[SequenceLogps, int]:
        """All answers of a step, and the index of the first one of this rank. Uses the dropout masks of the step."""
        with fork_rng(run.device):
            local = concat_logps([self.compute_logps(model, micro_batch) for micro_batch in micro_batches])
        if run.world_size == 1:  # gathering objects copies to the host, which would synchronize with the device
            return local, 0
        ranks_per_row = run.dims.cp * run.dims.tp  # CP and TP ranks read the same rows
        ranks = run.all_gather_objects({name: value.cpu() for name, value in vars(local).items()})[::ranks_per_row]
        offset = sum(len(rank["logps"]) for rank in ranks[: run.dp_rank])
        shards = [SequenceLogps(**{name: x.to(run.device) for name, x in rank.items()}) for rank in ranks]
        return concat_logps(shards), offset

    def loss(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """Contribution of these answers to the loss of the step."""
        return torch.stack([term.mean(answers, step) for term in self.terms]).sum()

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

    def logps_fn(self, model: Decoder) -> RefLogpsFn:
        """Function that returns log-probabilities under the current weights of a model."""
        return partial(frozen_logps, model, ld_alpha=self.ld_alpha)


def batch_totals(batch: Batch) -> dict[str, Tensor]:
    """Number of answers of a batch, and number of tokens of its desirable answers."""
    desirable, full_mask = is_desirable(batch).float(), (batch.full_targets >= 0).float()
    return {
        "answers": desirable.new_full((), len(desirable)),
        "tokens": (target_counts(batch) * desirable).sum(),
        "lengths": (sum_per_document(batch, full_mask) * desirable).sum(),
    }


def mismatched_kl(
    model: Decoder, micro_batches: list[MicroBatch], ref_logps_fn: RefLogpsFn, run: DistributedContext
) -> Tensor:
    """Estimate of the KL divergence from the reference (KTO's z), from answers paired with other prompts. Scalar."""
    sums = MetricSums()
    for batch, _ in micro_batches:
        assert batch.mismatched is not None, "the data loader does not add mismatched answers"
        log_ratios = frozen_logps(model, batch.mismatched) - ref_logps_fn(batch.mismatched)
        sums.add({"log_ratios": log_ratios.sum(), "answers": log_ratios.new_full((), len(log_ratios))})
    totals = sums.means(run, 1)
    return (totals["log_ratios"] / totals["answers"]).clamp(min=0)


def concat_logps(shards: list[SequenceLogps]) -> SequenceLogps:
    return SequenceLogps(**{name: torch.cat([vars(shard)[name] for shard in shards]) for name in vars(shards[0])})
