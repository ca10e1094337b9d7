"""Losses are sums over learnt tokens: the recipe alone knows how many a step has, over all micro-batches and ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.kernels import fake_mode
from tunekit.kernels.cross_entropy import ChunkLoss, CrossEntropyTerms, CustomChunkLoss, linear_cross_entropy
from tunekit.models.decoder import Decoder, Head


@dataclass(frozen=True)
class CrossEntropy:
    """Negative log-likelihood of the learnt tokens, in nats."""

    label_smoothing: float = 0.0  # share of the target that is spread over the whole vocabulary
    z_loss: float = 0.0  # weight of the squared log-normalizer, which keeps logits from drifting

    # A class that derives from this may say what fp32 logits (n, vocab) and targets (n,) sum up to instead.
    measure: ClassVar[Callable[..., Tensor] | None] = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise FieldError("label_smoothing", f"a share between 0 and 1, not {self.label_smoothing}")

    def __call__(self, model: Decoder, batch: Batch) -> Tensor:
        """Sum over the learnt tokens of a batch."""
        targets, rows = local_targets(model, batch)

        def read(hidden: Tensor, head: Head) -> Tensor:
            return linear_cross_entropy(hidden.flatten(0, 1), targets, head, self.step(head), rows)

        return model(batch.tokens, batch.positions, batch.layout, read=read, part=True)

    def step(self, head: Head) -> ChunkLoss:
        """What is made of the logits of a chunk."""
        if self.measure is not None:
            return CustomChunkLoss(self.measure, head.finish, head.share)
        return CrossEntropyTerms(head.scale, head.softcap, self.label_smoothing, self.z_loss, head.share)


def local_targets(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Targets (N,) of the tokens that are here, and which of them count."""
    targets = model.rows.keep(batch.targets, IGNORE).flatten()
    counts, all_here = targets != IGNORE, targets.numel() == batch.targets.numel()
    count = batch.learnt if all_here else fake_mode.count_true(counts)  # where rows are whole no GPU is asked how many
    return targets, counts.nonzero_static(size=count).squeeze(1)


@torch.no_grad()
def eval_loss(
    loss: Callable[[Decoder, Batch], Tensor], model: Decoder, data: DataLoader, run: DistributedContext
) -> float:
    """Loss of a learnt token, over all rows and ranks, in nats."""
    training, total, tokens = model.training, torch.zeros((), device=run.device), 0
    model.eval()
    for step in tqdm(range(data.steps(1)), "validating", disable=not run.is_main or None, leave=False):
        for batch in data[step]:
            total += loss(model, batch.to(run.device))
            tokens += batch.learnt
    model.train(training)
    return float(run.sum(total)) / run.total(tokens)
