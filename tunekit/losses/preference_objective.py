"""Terms of preference that are minimised together: what they make of a step, and what people want to see of it."""

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

Judge = Callable[[Batch], Tensor]  # log-probabilities (D,) of the documents of a batch, by a reference
Part = tuple[Batch, Tensor]  # a micro-batch on its device, and what the reference makes of it


def zero_reference(batch: Batch) -> Tensor:
    """Where nothing is compared with a reference."""
    return torch.zeros(len(is_desirable(batch)), device=batch.tokens.device)


class ReferenceLogps(NamedTuple):
    """Log-probabilities by the reference: of rows to learn from, and of held-out ones."""

    data: Judge = zero_reference
    held: Judge = zero_reference


@dataclass(frozen=True)
class PreferenceObjective:
    """A sum of terms. The first says what an answer is worth, where people look at rewards."""

    terms: tuple[PreferenceLoss, ...]
    tail: float = 1.0  # weight of the tokens by which an answer is longer than the other one
    paired: bool = True  # whether answers come in pairs
    judges: ReferenceLogps = ReferenceLogps()

    def parts(self, batches: list[Batch], judge: Judge, run: DistributedContext) -> list[Part]:
        """The micro-batches of a step, each with what a reference makes of it."""
        there = [batch.to(run.device) for batch in batches]
        return [(batch, judge(batch)) for batch in there]

    def answers(self, model: Decoder, part: Part) -> SequenceLogps:
        batch, reference = part
        return sequence_logps(model, batch, any(term.texts for term in self.terms), self.tail).beside(reference)

    def begin(
        self,
        model: Decoder,
        parts: list[Part],
        judge: Judge,
        run: DistributedContext,
        shift: Callable[[Tensor], Tensor],
    ) -> StepTotals:
        """What losses must know of a whole step before they see any of it. `shift` makes a mean of log-ratios."""
        tally = MetricSums()
        for batch, _ in parts:
            tally.add(batch_totals(batch))
        totals = tally.means(run, 1)
        none = torch.zeros_like(totals["answers"])  # on the device of the answers: figures are stacked with theirs
        step = StepTotals(totals["answers"], totals["tokens"], totals["lengths"], kl=none, shift=none)
        if any(term.others for term in self.terms):
            step = replace(step, kl=mismatched_kl(model, parts, judge, run))
        if any(term.whole for term in self.terms):
            whole, first = self.seen(model, parts, run)
            step = replace(step, whole=whole, first=first, shift=shift(whole.ratios))
        return step

    @torch.no_grad()
    def seen(self, model: Decoder, parts: list[Part], run: DistributedContext) -> tuple[SequenceLogps, int]:
        """All answers of a step, and where those of this rank begin. Dropout falls as it will once they are learnt."""
        with fork_rng(run.device):
            found = concat_logps([self.answers(model, part) for part in parts])
        if run.size == 1:  # a gather goes through the host, which would wait for the device
            return found, 0
        shared = run.sizes.cp * run.sizes.tp  # ranks that have the same rows
        ranks = run.gather({name: value.cpu() for name, value in vars(found).items()})[::shared]
        first = sum(len(rank["logps"]) for rank in ranks[: run.reader])
        return concat_logps(
            [SequenceLogps(**{name: x.to(run.device) for name, x in rank.items()}) for rank in ranks]
        ), first

    def loss(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """The part that these answers have in the loss of a step."""
        return torch.stack([term.mean(answers, step) for term in self.terms]).sum()

    def figures(self, answers: SequenceLogps, loss: Tensor, step: StepTotals) -> dict[str, Tensor]:
        """Sums that come together to what `shown` tells."""
        answers = answers.detached()
        good, rewards = answers.good.float(), self.terms[0].rewards(answers)
        more = (rewards[::2] > rewards[1::2]).float().sum() if self.paired else rewards.new_zeros(())
        return {
            "loss": loss.detach() * step.answers,
            "answers": rewards.new_full((), len(rewards)),
            "good": good.sum(),
            "right": more,
            "chosen": (rewards * good).sum(),
            "rejected": (rewards * (1 - good)).sum(),
            "logps chosen": (answers.logps * good).sum(),
            "logps rejected": (answers.logps * (1 - good)).sum(),
            "entropy": answers.entropies.sum(),
            "tokens": answers.tokens.sum(),
            "kl": step.kl * len(rewards),
        }

    def shown(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The loss, and means under the names that people know. A mean of nothing is NaN."""
        count, good = sums["answers"], sums["good"]
        bad = count - good
        found = {
            "loss": sums["loss"] / count,
            "rewards/chosen": sums["chosen"] / good,
            "rewards/rejected": sums["rejected"] / bad,
            "rewards/margins": sums["chosen"] / good - sums["rejected"] / bad,
            "logps/chosen": sums["logps chosen"] / good,
            "logps/rejected": sums["logps rejected"] / bad,
            "entropy": sums["entropy"] / sums["tokens"],
        }
        found |= {"rewards/accuracies": sums["right"] / good} if self.paired else {}
        return found | ({"kl": sums["kl"] / count} if any(term.others for term in self.terms) else {})

    def judged(self, model: Decoder) -> Judge:
        """Log-probabilities by a model as it is whenever it is asked."""
        return partial(frozen_logps, model, tail=self.tail)


def batch_totals(batch: Batch) -> dict[str, Tensor]:
    """Answers of a batch, and tokens of those that are good."""
    good, texts = is_desirable(batch).float(), (batch.full_targets >= 0).float()
    return {
        "answers": good.new_full((), len(good)),
        "tokens": (target_counts(batch) * good).sum(),
        "lengths": (sum_per_document(batch, texts) * good).sum(),
    }


def mismatched_kl(model: Decoder, parts: list[Part], judge: Judge, run: DistributedContext) -> Tensor:
    """How far the model is from its reference, by answers that do not belong to their prompts (KTO's z)."""
    tally = MetricSums()
    for batch, _ in parts:
        assert batch.others is not None, "a loader that crosses answers"
        ratios = frozen_logps(model, batch.others) - judge(batch.others)
        tally.add({"ratios": ratios.sum(), "answers": ratios.new_full((), len(ratios))})
    sums = tally.means(run, 1)
    return (sums["ratios"] / sums["answers"]).clamp(min=0)


def concat_logps(parts: list[SequenceLogps]) -> SequenceLogps:
    return SequenceLogps(**{name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])})
