"""Losses are sums over learnt tokens: the recipe alone knows how many a step has, over all micro-batches and ranks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tunekit.data.batch import IGNORE, Batch
from tunekit.data.loader import Loader
from tunekit.errors import FieldError
from tunekit.kernels.cross_entropy import chunked_loss
from tunekit.models.decoder import Decoder
from tunekit.parallel import Run


@dataclass(frozen=True)
class CrossEntropy:
    """Negative log-likelihood of the learnt tokens, in nats."""

    smoothing: float = 0.0  # share of the target that is spread over the whole vocabulary
    z_loss: float = 0.0  # weight of the squared log-normalizer, which keeps logits from drifting

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise FieldError("smoothing", f"a share between 0 and 1, not {self.smoothing}")

    def __call__(self, model: Decoder, batch: Batch) -> Tensor:
        """Sum over the learnt tokens of a batch."""
        targets = batch.targets.flatten()
        learnt = (targets != IGNORE).nonzero().squeeze(1)

        def read(hidden: Tensor, head: nn.Module) -> Tensor:
            return chunked_loss(hidden.flatten(0, 1)[learnt], targets[learnt], head, model.spec.vocab, self.measure)

        return model(batch.tokens, batch.positions, batch.offsets, read=read)

    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.smoothing)
        return loss + self.z_loss * logits.logsumexp(-1).square().sum() if self.z_loss else loss


@torch.no_grad()
def mean(loss: CrossEntropy, model: Decoder, data: Loader, run: Run) -> float:
    """Loss of a learnt token, over all rows and ranks, in nats."""
    training, total, tokens = model.training, torch.zeros((), device=run.device), 0
    model.eval()
    for step in tqdm(range(data.steps_per_epoch), "validating", disable=not run.is_main or None, leave=False):
        for batch in data[step]:
            total += loss(model, batch.to(run.device))
            tokens += batch.learnt
    model.train(training)
    return float(run.sum(total)) / run.total(tokens)
