"""Figures of a step: added up over its micro-batches, then over all ranks in one exchange."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tunekit.distributed.context import DistributedContext


class MetricSums:
    """Sums by name. Every rank adds the same names, in whatever order."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """More of each, as numbers of a tensor without dimensions."""
        for name, value in values.items():
            there = self.sums.get(name)
            self.sums[name] = value.detach().float() if there is None else there + value.detach()

    def means(self, run: DistributedContext, count: float) -> dict[str, Tensor]:
        """The sums of all ranks over `count`. Ranks that share rows have added the same, which counts once."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        found = run.sum(torch.stack([self.sums[name] for name in names])) / (count * run.sizes.cp)
        return dict(zip(names, found.unbind(), strict=True))
