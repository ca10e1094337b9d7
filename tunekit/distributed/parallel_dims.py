"""How the processes of a run share its work, as a config says it."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from tunekit.devices import Device, backend_of, find_row
from tunekit.errors import FieldError, UserError

COUNTS = ("replicate", "shard", "context", "tensor", "expert")


@dataclass(frozen=True)
class ParallelDims:
    """How many processes there are along each way of sharing. Their product, but for `expert`, is the number of all."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # of those that shard

    @property
    def sharded(self) -> int:
        """Processes over which a weight is divided by rows: those that share a long row share its weights too."""
        return self.shard * self.context

    @property
    def averaged(self) -> int:
        """Processes over which gradients are averaged."""
        return self.replicate * self.sharded

    @property
    def readers(self) -> int:
        """Processes, or groups of them, that read different rows."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class ParallelConfig:
    """One process for each device. Left as it is, all of them share weights, gradients and optimizer (FSDP)."""

    # copies of the whole model, each shared by `shard` devices (HSDP; with shard=1: DDP); none: as many as there can be
    replicate: int | None = 1
    shard: int | None = None  # devices that share weights, gradients and optimizer; none: all that are left
    context: int = 1  # devices that share each row, for long ones
    tensor: int = 1  # devices that share each layer: fast links between them are a must
    expert: int = 1  # of the devices that shard, so many have experts of their own
    reshard: bool = True  # free gathered weights behind each layer, and gather them again in the backward pass
    prefetch: int = 1  # layers whose weights are gathered ahead
    # dtype in which weights are gathered: as they are stored, or as they are computed with; gradients are then reduced
    # in fp32. auto: compute on GPUs, weights on the CPU
    gather: Literal["auto", "weights", "compute"] = "auto"
    offload: bool = False  # weights, gradients and optimizer wait in the memory of the host; for several GPUs
    timeout: int = 1800  # seconds without a step, a saved file or a prepared row after which a run is taken to hang

    def __post_init__(self) -> None:
        low = [n for n in (*COUNTS, "timeout") if vars(self)[n] is not None and vars(self)[n] < 1]
        if low:
            raise FieldError(low[0], f"must be 1 or more, not {vars(self)[low[0]]}")
        if self.replicate is None and self.shard is None:
            raise FieldError("replicate", "either this or `shard` takes what is left: give a number to one of them")
        if self.prefetch < 0:
            raise FieldError("prefetch", f"must not be below 0, not {self.prefetch}")

    @property
    def least(self) -> ParallelDims:
        """As few processes as divide a layer, a row and experts so."""
        return ParallelDims(1, self.expert, self.context, self.tensor, self.expert)

    def sizes(self, count: int) -> ParallelDims:
        """How `count` processes are divided; UserError if they cannot be."""
        given = {n: vars(self)[n] for n in ("replicate", "shard", "context", "tensor") if vars(self)[n] is not None}
        fixed = math.prod(given.values())
        left = max(1, count // fixed)
        replicate, shard = self.replicate or left, self.shard or left
        made = replicate * shard * self.context * self.tensor
        if made != count:
            words = " x ".join(f"{name} {number}" for name, number in given.items())
            how = f"makes {made}" if len(given) == 4 else f"does not divide {count}"
            raise UserError(f"parallel: there are {count} processes, and {words} {how}: change one of them, or --gpus")
        if (shard * self.context) % self.expert:
            raise UserError(
                f"parallel.expert: {self.expert} does not divide the {shard * self.context} processes that shard"
            )
        return ParallelDims(replicate, shard, self.context, self.tensor, self.expert)

    def on(self, device: str) -> "ParallelConfig":
        """The same with `gather` as it is on a kind of device, cpu or cuda."""
        if self.gather != "auto":
            return self
        return replace(self, gather="weights" if device == "cpu" else "compute")

    def check(self, device: str, count: int) -> None:
        """Raise UserError if `count` devices of a type cannot do so."""
        row = find_row(Device(device))
        if self.offload and not row.own_memory:
            raise UserError(
                f"parallel.offload: device {device} has no memory apart from the host's. Set parallel.offload=false."
            )
        if count > 1:
            backend_of(device, row)
        if self.offload and self.sizes(count).averaged == 1:
            raise UserError(
                "parallel.offload: only weights that several devices share can wait on the host, and here none are. "
                "Set it to false, or use more devices."
            )

    def check_inference(self, count: int) -> None:
        """Raise UserError if `count` devices cannot do so with a model that is not trained: copies exchange nothing,
        so that only what `shard` and `context` divide can wait on the host."""
        if self.offload and count > 1 and self.sizes(count).sharded == 1:
            raise UserError(
                "parallel.offload: each device has a whole copy of the model, which cannot wait on the host. "
                f"Set parallel.replicate=1 and parallel.shard={count // self.tensor}, or parallel.offload=false."
            )


COPIES = ParallelConfig(
    replicate=None, shard=1
)  # where nothing is learnt: each device has the whole model, and rows of its own
