"""How the processes of a run share its work, as a config says it."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from tunekit.devices import Device, backend_of, find_row
from tunekit.errors import FieldError, UserError

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True)
class ParallelDims:
    """How many processes there are along each way of sharing. Their product, but for `expert`, is the number of all."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # of those that shard

    @property
    def fsdp_size(self) -> int:
        """Processes over which a weight is divided by rows: those that share a long row share its weights too."""
        return self.dp_shard * self.cp

    @property
    def grad_avg_size(self) -> int:
        """Processes over which gradients are averaged."""
        return self.dp_replicate * self.fsdp_size

    @property
    def dp_size(self) -> int:
        """Processes, or groups of them, that read different rows."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class ParallelConfig:
    """One process for each device. Left as it is, all of them share weights, gradients and optimizer (FSDP)."""

    dp_replicate: int | None = 1  # Copies of the model (HSDP; with dp_shard=1: DDP); null: all remaining devices
    # Devices that shard weights, gradients and optimizer state (FSDP2); null: all remaining devices
    dp_shard: int | None = None
    cp: int = 1  # Context parallel degree: devices that share each sequence
    tp: int = 1  # Tensor parallel degree; needs a fast interconnect (NVLink)
    ep: int = 1  # Expert parallel degree, taken from the dp_shard x cp devices
    # Free gathered weights after the forward pass of a layer
    reshard_after_forward: bool = (
        True  # free gathered weights behind each layer, and gather them again in the backward pass
    )
    prefetch_layers: int = 1  # Layers whose weights are gathered in advance
    # dtype in which weights are gathered: as they are stored, or as they are computed with; gradients are then reduced
    # in fp32. auto: compute on GPUs, weights on the CPU
    all_gather_dtype: Literal["auto", "param", "compute"] = "auto"
    cpu_offload: bool = False  # Keep sharded weights, gradients and optimizer state in host memory
    # Seconds without progress before a run counts as hung
    hang_timeout_seconds: int = (
        1800  # seconds without a step, a saved file or a prepared row after which a run is taken to hang
    )

    def __post_init__(self) -> None:
        low = [n for n in (*DEGREES, "hang_timeout_seconds") if vars(self)[n] is not None and vars(self)[n] < 1]
        if low:
            raise FieldError(low[0], f"must be 1 or more, not {vars(self)[low[0]]}")
        if self.dp_replicate is None and self.dp_shard is None:
            raise FieldError(
                "dp_replicate", "null for both dp_replicate and dp_shard is ambiguous. Set one of them to a number"
            )
        if self.prefetch_layers < 0:
            raise FieldError("prefetch_layers", f"must not be below 0, not {self.prefetch_layers}")

    @property
    def minimal_dims(self) -> ParallelDims:
        """As few processes as divide a layer, a row and experts so."""
        return ParallelDims(1, self.ep, self.cp, self.tp, self.ep)

    def resolve_dims(self, world_size: int) -> ParallelDims:
        """How `count` processes are divided; UserError if they cannot be."""
        fixed_degrees = {n: vars(self)[n] for n in DEGREES[:4] if vars(self)[n] is not None}
        fixed = math.prod(fixed_degrees.values())
        remaining = max(1, world_size // fixed)
        replicate, shard = self.dp_replicate or remaining, self.dp_shard or remaining
        product = replicate * shard * self.cp * self.tp
        if product != world_size:
            degrees = " x ".join(f"{name} {number}" for name, number in fixed_degrees.items())
            problem = f"makes {product}" if len(fixed_degrees) == 4 else f"does not divide {world_size}"
            raise UserError(
                f"parallel: there are {world_size} processes, and {degrees} {problem}: change one of them, or --nproc-per-node"
            )
        if (shard * self.cp) % self.ep:
            raise UserError(f"parallel.ep: {self.ep} does not divide the {shard * self.cp} processes that shard")
        return ParallelDims(replicate, shard, self.cp, self.tp, self.ep)

    def resolve_auto(self, device: str) -> "ParallelConfig":
        """The same with `all_gather_dtype` as it is on a kind of device, cpu or cuda."""
        if self.all_gather_dtype != "auto":
            return self
        return replace(self, all_gather_dtype="param" if device == "cpu" else "compute")

    def check(self, device: str, count: int) -> None:
        """Raise UserError if `count` devices of a type cannot do so."""
        row = find_row(Device(device))
        if self.cpu_offload and not row.own_memory:
            raise UserError(
                f"parallel.cpu_offload: device {device} has no memory apart from the host's. Set "
                "parallel.cpu_offload=false."
            )
        if count > 1:
            backend_of(device, row)
        if self.cpu_offload and self.resolve_dims(count).grad_avg_size == 1:
            raise UserError(
                "parallel.cpu_offload: only weights that several devices share can wait on the host, and here "
                "none are. "
                "Set it to false, or use more devices."
            )

    def check_inference(self, count: int) -> None:
        """Raise UserError if `count` devices cannot do so with a model that is not trained: copies exchange nothing,
        so that only what `dp_shard` and `cp` divide can wait on the host."""
        if self.cpu_offload and count > 1 and self.resolve_dims(count).fsdp_size == 1:
            raise UserError(
                "parallel.cpu_offload: each device has a whole copy of the model, which cannot wait on the host. "
                f"Set parallel.dp_replicate=1 and parallel.dp_shard={count // self.tp}, or parallel.cpu_offload=false."
            )


REPLICATED = ParallelConfig(
    dp_replicate=None, dp_shard=1
)  # where nothing is learnt: each device has the whole model, and rows of its own
