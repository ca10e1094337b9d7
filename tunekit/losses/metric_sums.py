"""Metrics of a step or an evaluation, summed over its micro-batches and then over all ranks in one all-reduce."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder


class MetricSums:
    """Sums by name. All ranks must add the same names; the order does not matter."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add scalar tensors to the sums."""
        for name, value in values.items():
            total = self.sums.get(name)
            self.sums[name] = value.detach().float() if total is None else total + value.detach()

    def means(self, dist: DistributedContext, count: float) -> dict[str, Tensor]:
        """Sums over all ranks, divided by `count`. CP ranks have added the same rows, so these are counted once."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        means = dist.all_reduce_sum(torch.stack([self.sums[name] for name in names])) / (count * dist.dims.cp)
        return dict(zip(names, means.unbind(), strict=True))


def eval_steps(model: Decoder, data: DataLoader, dist: DistributedContext) -> Iterator[list[Batch]]:
    """Micro-batches of each step of an evaluation. The model is in eval mode until the last step is done."""
    was_training = model.training
    model.eval()
    steps = range(data.num_steps(1))
    for step in tqdm(steps, "evaluating", disable=not dist.is_main_process or None, leave=False):
        dist.heartbeat.record(dist.step, "validate")
        yield data[step]
    model.train(was_training)
