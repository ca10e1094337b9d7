"""Log-probabilities of complete answers, the input of preference losses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.kernels.cross_entropy import token_logps, token_logps_and_entropies
from tunekit.losses.cross_entropy import local_targets
from tunekit.models.decoder import Decoder, Head


@dataclass(frozen=True)
class SequenceLogps:
    """Sums over the tokens of D answers; in pairs, chosen and rejected answers alternate. All tensors are (D,)."""

    logps: Tensor  # log-probability of the target tokens
    num_tokens: Tensor  # number of target tokens
    entropies: Tensor  # entropy of the predictions at the target tokens, in nats; no gradient
    full_logps: Tensor  # log-probability of prompt and answer if requested with `full`, else of the answer
    is_desirable: Tensor  # bool: chosen, or labeled as desirable
    ref_logps: Tensor  # log-probability under the reference model; 0 without a reference

    def __getitem__(self, index: slice) -> "SequenceLogps":
        return SequenceLogps(**{name: value[index] for name, value in vars(self).items()})

    @property
    def pairs(self) -> tuple["SequenceLogps", "SequenceLogps"]:
        """The chosen and the rejected answers."""
        return self[::2], self[1::2]

    @property
    def log_ratios(self) -> Tensor:
        """log π(y|x) / π_ref(y|x)."""
        return self.logps - self.ref_logps

    @property
    def mean_logps(self) -> Tensor:
        """Mean log-probability per target token of each answer."""
        return self.logps / self.num_tokens.clamp(min=1)

    def detach(self) -> "SequenceLogps":
        return SequenceLogps(**{name: value.detach() for name, value in vars(self).items()})


@torch.no_grad()
def frozen_logps(model: Decoder, batch: Batch, ld_alpha: float = 1.0) -> Tensor:
    """Log-probability (D,) of each document of a batch, in eval mode and without gradients."""
    training = model.training
    model.eval()
    logps = sequence_logps(model, batch, ld_alpha=ld_alpha, entropies=False).logps
    model.train(training)
    return logps


def sequence_logps(
    model: Decoder, batch: Batch, full: bool = False, ld_alpha: float = 1.0, entropies: bool = True
) -> SequenceLogps:
    """Log-probabilities and entropies of the documents of a batch. Logits are computed in chunks.

    `full` includes the prompts of chosen rows. `ld_alpha` is the weight of the tokens beyond the length of the shorter
    answer of a pair (LD-DPO, arXiv:2409.06411). With `entropies=False`, which saves time, entropies are 0.
    """
    batch.require_equal_weights()
    desirable, counts = batch.documents.is_desirable, target_counts(batch)
    answer_mask = (batch.targets != IGNORE).float()
    weights = answer_mask if ld_alpha == 1 else answer_mask * length_weights(batch, counts, ld_alpha)
    doc_ids, answer_mask, weights = (
        model.cp_sharding.local_tokens(tensor, fill).flatten()
        for tensor, fill in ((batch.documents.ids, -1), (answer_mask, 0), (weights, 0))
    )
    targets, rows = local_targets(model, batch, full)

    def read(hidden: Tensor, head: Head) -> Tensor:
        """Sums over each document, (3, D): weighted logps of the answer, its entropies, logps of all targets."""
        args = hidden.flatten(0, 1), targets, head, rows
        logps, entropy = token_logps_and_entropies(*args) if entropies else (token_logps(*args), weights.new_zeros(1))
        values = torch.stack([logps * weights[rows], entropy * answer_mask[rows], logps])
        return values.new_zeros(3, len(desirable)).index_add(1, doc_ids[rows], values)

    inputs = batch.tokens, batch.positions, batch.layout
    sums = model.cp_sharding.all_reduce_sum(model(*inputs, head_fn=read, sharded=True))
    return SequenceLogps(sums[0], counts, sums[1].detach(), sums[2], desirable, torch.zeros_like(counts))


def target_counts(batch: Batch) -> Tensor:
    """Number of target tokens of each document, (D,) fp32."""
    return sum_per_document(batch, (batch.targets != IGNORE).float())


def sum_per_document(batch: Batch, values: Tensor) -> Tensor:
    """Sum of values (B, S) over the tokens of each document, (D,)."""
    count, doc_ids = len(batch.documents.is_desirable), batch.documents.ids
    doc_ids = doc_ids.where(doc_ids >= 0, count).flatten()  # padding adds to an extra entry, which is dropped
    return values.new_zeros(count + 1).index_add(0, doc_ids, values.flatten())[:count]


def length_weights(batch: Batch, counts: Tensor, weight: float) -> Tensor:
    """Weights (B, S) of target tokens: `weight` beyond the length of the shorter answer of a pair, 1 before."""
    nth = (batch.targets != IGNORE).flatten().cumsum(0).view_as(batch.targets)  # includes all previous documents
    shorter = counts.view(-1, 2).amin(1).repeat_interleave(2)
    last = torch.cat([counts.cumsum(0) - counts + shorter, counts.new_zeros(1)])
    return torch.where(nth <= last[batch.documents.ids], 1.0, weight)
