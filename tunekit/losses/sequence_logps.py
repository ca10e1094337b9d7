"""Log-probabilities of whole answers, which are what methods of preference compare."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.doc_flags import DocFlags
from tunekit.kernels.cross_entropy import token_logps, token_logps_and_entropies
from tunekit.models.decoder import Decoder, Head


@dataclass(frozen=True)
class SequenceLogps:
    """D answers, chosen and rejected in turn where rows are pairs. All tensors are (D,)."""

    logps: Tensor  # log-probabilities of their learnt tokens, added up
    tokens: Tensor  # how many these are
    entropies: Tensor  # of what was expected at each of them, in nats, added up; no gradient
    texts: Tensor  # log-probabilities of chosen rows, prompt and answer; of the answer where nobody asked for more
    lengths: Tensor  # tokens of these
    good: Tensor  # whether an answer is one to learn: chosen, or marked as good
    reference: Tensor  # their log-probabilities by the reference; 0 where there is none

    def __getitem__(self, at: slice) -> "SequenceLogps":
        return SequenceLogps(**{name: value[at] for name, value in vars(self).items()})

    @property
    def pairs(self) -> tuple["SequenceLogps", "SequenceLogps"]:
        """The chosen answers and the rejected ones."""
        return self[::2], self[1::2]

    @property
    def ratios(self) -> Tensor:
        """log π(y|x) / π_ref(y|x)."""
        return self.logps - self.reference

    @property
    def rates(self) -> Tensor:
        """Log-probability of a token of each answer."""
        return self.logps / self.tokens.clamp(min=1)

    def beside(self, reference: Tensor) -> "SequenceLogps":
        return replace(self, reference=reference)

    def detached(self) -> "SequenceLogps":
        return SequenceLogps(**{name: value.detach() for name, value in vars(self).items()})


@torch.no_grad()
def frozen_logps(model: Decoder, batch: Batch, tail: float = 1.0) -> Tensor:
    """Log-probabilities of the documents of a batch (D,), by a model that is only asked."""
    training = model.training
    model.eval()
    found = sequence_logps(model, batch, tail=tail, entropies=False).logps
    model.train(training)
    return found


def sequence_logps(
    model: Decoder, batch: Batch, texts: bool = False, tail: float = 1.0, entropies: bool = True
) -> SequenceLogps:
    """What the model makes of the documents of a batch. Logits are never whole.

    `texts`: of prompts too, where an answer is chosen. `tail` is the weight of the tokens by which an answer is longer
    than the other one of its pair (LD-DPO, arXiv:2409.06411). Entropies cost some time, and are 0 without.
    """
    good, counts = is_desirable(batch), target_counts(batch)
    targets = batch.full_targets if texts else batch.targets
    own = (batch.targets != IGNORE).float()
    weights = own if tail == 1 else own * length_weights(batch, counts, tail)
    targets, owner, own, weights = (
        model.rows.keep(whole, value).flatten()
        for whole, value in ((targets, IGNORE), (document_ids(batch), -1), (own, 0), (weights, 0))
    )
    count = batch.num_full_targets if texts else batch.learnt
    if count is None or targets.numel() != batch.targets.numel():
        count = int((targets != IGNORE).sum())
    rows = (targets != IGNORE).nonzero_static(size=count).squeeze(1)

    def read(hidden: Tensor, head: Head) -> Tensor:
        """Three sums for each document, (3, D)."""
        told = hidden.flatten(0, 1), targets, head, rows
        logps, surprise = token_logps_and_entropies(*told) if entropies else (token_logps(*told), weights.new_zeros(1))
        each = torch.stack([logps * weights[rows], surprise * own[rows], logps])
        return each.new_zeros(3, len(good)).index_add(1, owner[rows], each)

    where = batch.tokens, batch.positions, batch.layout
    found = model.rows.sum(model(*where, read=read, part=True))
    lengths = sum_per_document(batch, (batch.full_targets != IGNORE).float()) if texts else counts
    return SequenceLogps(found[0], counts, found[1].detach(), found[2], lengths, good, torch.zeros_like(counts))


def document_ids(batch: Batch) -> Tensor:
    assert batch.owner is not None, "rows of documents that are compared"
    return batch.owner


def is_desirable(batch: Batch) -> Tensor:
    """Whether each answer is good, (D,)."""
    assert batch.signs is not None, "rows of documents that are compared"
    return (batch.signs & DocFlags.GOOD) != 0


def target_counts(batch: Batch) -> Tensor:
    """Learnt tokens of each document, (D,) fp32."""
    return sum_per_document(batch, (batch.targets != IGNORE).float())


def sum_per_document(batch: Batch, values: Tensor) -> Tensor:
    """(B, S) added up over each document, (D,)."""
    count, owner = len(is_desirable(batch)), document_ids(batch)
    owner = owner.where(owner >= 0, count).flatten()  # what is padding goes behind the last, and away
    return values.new_zeros(count + 1).index_add(0, owner, values.flatten())[:count]


def length_weights(batch: Batch, counts: Tensor, weight: float) -> Tensor:
    """Weights (B, S) of learnt tokens: those beyond the length of the shorter answer of a pair have another."""
    nth = (batch.targets != IGNORE).flatten().cumsum(0).view_as(batch.targets)  # counts of all documents before, too
    shorter = counts.view(-1, 2).amin(1).repeat_interleave(2)
    last = torch.cat([counts.cumsum(0) - counts + shorter, counts.new_zeros(1)])
    return torch.where(nth <= last[document_ids(batch)], 1.0, weight)
