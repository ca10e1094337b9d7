"""Parallelism degrees of a run and the `parallel` config."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from tunekit.devices import Device, backend_of, find_row
from tunekit.errors import FieldError, UserError

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True)
class ParallelDims:
    """Number of processes in each dimension. The world size is the product of all except `ep`."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # divides dp_shard * cp

    @property
    def fsdp_size(self) -> int:
        """Processes that shard a weight (FSDP): data parallel shards and context parallel ranks."""
        return self.dp_shard * self.cp

    @property
    def grad_avg_size(self) -> int:
        """Processes that average gradients."""
        return self.dp_replicate * self.fsdp_size

    @property
    def dp_size(self) -> int:
        """Number of data parallel ranks, which read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_tensor_parallel_only(self) -> bool:
        """Whether all ranks are in one tensor parallel group: they compute the same logits, and sample the same."""
        return self.dp_size * self.cp == 1


@dataclass(frozen=True)
class ParallelConfig:
    """One process per device. By default, all of them shard weights, gradients and optimizer state (FSDP)."""

    dp_replicate: int | None = 1  # Copies of the model (HSDP; with dp_shard=1: DDP); null: all remaining devices
    # Devices that shard weights, gradients and optimizer state (FSDP2); null: all remaining devices
    dp_shard: int | None = None
    cp: int = 1  # Context parallel degree: devices that share each sequence
    tp: int = 1  # Tensor parallel degree; needs a fast interconnect (NVLink)
    ep: int = 1  # Expert parallel degree, taken from the dp_shard x cp devices
    # Free gathered weights after the forward pass of a layer
    reshard_after_forward: bool = True
    prefetch_layers: int = 1  # Layers whose weights are gathered in advance
    # dtype in which sharded weights are gathered: `param`: as stored; `compute`: compute_dtype, with gradients reduced
    # in fp32; `auto`: `compute` on GPUs, `param` on the CPU
    all_gather_dtype: Literal["auto", "param", "compute"] = "auto"
    cpu_offload: bool = False  # Keep sharded weights, gradients and optimizer state in host memory
    # Seconds without progress before a run counts as hung
    hang_timeout_seconds: int = 1800

    def __post_init__(self) -> None:
        low = [n for n in (*DEGREES, "hang_timeout_seconds") if vars(self)[n] is not None and vars(self)[n] < 1]
        if low:
            raise FieldError(low[0], f"must be >= 1, got {vars(self)[low[0]]}")
        if self.dp_replicate is None and self.dp_shard is None:
            problem = "null for both dp_replicate and dp_shard is ambiguous. Set one of them to a number"
            raise FieldError("dp_replicate", problem)
        if self.prefetch_layers < 0:
            raise FieldError("prefetch_layers", f"must be >= 0, got {self.prefetch_layers}")

    @property
    def minimal_dims(self) -> ParallelDims:
        """Fewest processes with this tensor, context and expert parallelism."""
        return ParallelDims(1, self.ep, self.cp, self.tp, self.ep)

    def resolve_dims(self, world_size: int) -> ParallelDims:
        """Degrees for `world_size` processes. Raise UserError if it is not divisible."""
        fixed_degrees = {n: vars(self)[n] for n in DEGREES[:4] if vars(self)[n] is not None}
        fixed = math.prod(fixed_degrees.values())
        remaining = max(1, world_size // fixed)
        replicate, shard = self.dp_replicate or remaining, self.dp_shard or remaining
        product = replicate * shard * self.cp * self.tp
        if product != world_size:
            degrees = " x ".join(f"{name} {number}" for name, number in fixed_degrees.items())
            problem = "is not" if len(fixed_degrees) == 4 else "does not divide"
            raise UserError(
                f"parallel: {degrees} {problem} the number of processes, {world_size}. "
                "Change one of them or --nproc-per-node."
            )
        if (shard * self.cp) % self.ep:
            raise UserError(f"parallel.ep: must divide dp_shard * cp = {shard * self.cp}, got {self.ep}")
        return ParallelDims(replicate, shard, self.cp, self.tp, self.ep)

    def resolve_auto(self, device: str) -> "ParallelConfig":
        """This config with `all_gather_dtype: auto` resolved for a device type, cpu or cuda."""
        if self.all_gather_dtype != "auto":
            return self
        return replace(self, all_gather_dtype="param" if device == "cpu" else "compute")

    def check(self, device: str, count: int) -> None:
        """Raise UserError if `count` devices of a type do not support this config."""
        row = find_row(Device(device))
        if self.cpu_offload and not row.own_memory:
            raise UserError(
                f"parallel.cpu_offload: device {device} shares the memory of the host. Set parallel.cpu_offload=false."
            )
        if count > 1:
            backend_of(device, row)
        if self.cpu_offload and self.resolve_dims(count).grad_avg_size == 1:
            raise UserError(
                "parallel.cpu_offload: requires weights that are sharded over several devices. "
                "Set it to false, or use more devices."
            )

    def check_inference(self, count: int) -> None:
        """Raise UserError if this config does not work for inference on `count` devices: replicas do not communicate,
        so only weights sharded by `dp_shard` and `cp` can be offloaded."""
        if self.cpu_offload and count > 1 and self.resolve_dims(count).fsdp_size == 1:
            raise UserError(
                "parallel.cpu_offload: requires sharded weights, but each device has a full copy of the model. "
                f"Set parallel.dp_replicate=1 and parallel.dp_shard={count // self.tp}, or parallel.cpu_offload=false."
            )


@runtime_checkable
class Distributable(Protocol):
    """Config of a recipe that runs on several devices."""

    @property
    def parallel(self) -> ParallelConfig: ...


# Default for inference: each device has a full copy of the model and its own rows.
REPLICATED = ParallelConfig(dp_replicate=None, dp_shard=1)
