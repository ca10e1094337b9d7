"""Device, rank, process groups and collectives of a run. With one process, all collectives are the identity."""

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm

from tunekit import devices
from tunekit.config.secrets import message_text
from tunekit.distributed import flight_recorder, worker_env
from tunekit.distributed.attention_setup import configure_attention
from tunekit.distributed.heartbeat import HeartbeatWriter
from tunekit.distributed.loss_scaler import LossScaler
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.distributed.signals import STOP_SIGNALS
from tunekit.errors import RunStopped, UserError
from tunekit.kernels.malloc import retain_freed_memory

T = TypeVar("T")

GROUP_NUMBERS = count()  # prefixes of process groups that share one store
TIMEOUT_MARGIN = 60  # seconds
# For checks with one GPU: with RANK=0, WORLD_SIZE=1 and the other variables of torchrun, a single process creates a
# process group too, and its model is sharded over it.
ONE_RANK = "TUNEKIT_ONE_RANK_GROUP"
HOST_TIMEOUT = timedelta(days=30)  # ranks wait while one of them reads, writes or uploads large files


@dataclass(frozen=True)
class RankCoords:
    """Index of this rank in each mesh dimension."""

    replicate: int = 0
    context: int = 0
    tensor: int = 0


class DistributedContext:
    """Device, rank and random state of this process while the `with` block is active.

    Reads RANK, WORLD_SIZE and LOCAL_RANK as set by torchrun; without them there is one process. Ranks are ordered
    dp_replicate x dp_shard x cp x tp, the last dimension varying fastest.
    """

    def __init__(
        self, seed: int = 0, device: str = "auto", parallel: ParallelConfig | None = None, deterministic: bool = False
    ) -> None:
        self.seed, self.parallel, self.deterministic = seed, parallel or ParallelConfig(), deterministic
        self.numerics = devices.read_numerics()  # restored on exit
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.dims = self.parallel.resolve_dims(self.world_size)
        self.coords = rank_coords(self.rank, self.dims)
        self.device = devices.select_device(device)
        self.has_process_group = self.world_size > 1 or ONE_RANK in os.environ  # whether there is a process group
        if self.world_size > 1 or not self.has_process_group:
            self.parallel.check(self.device.type, self.world_size)
        self.heartbeat = HeartbeatWriter.open()  # read by the launcher
        self.requested_signal: signal.Signals | None = None  # received by this process
        self.agreed_signal: signal.Signals | None = None  # known to all ranks
        self.mesh: DeviceMesh | None = None  # replicate x shard x tensor; shard includes context
        self.cp_mesh: DeviceMesh | None = None  # dp x context x tensor
        self.ep_mesh: DeviceMesh | None = None  # replicate x shard x expert x tensor; shard excludes expert
        self.grad_mesh: DeviceMesh | None = None  # ranks that average gradients x tensor
        self.host_group: dist.ProcessGroup | None = None  # gloo group of all ranks
        self.delays_gradient_sync = True  # reduce gradients once per step instead of in each pass
        self.step = 0  # current step
        self.loss_scaler = LossScaler()

    @classmethod
    def single_process(cls) -> "DistributedContext":
        """Context of a single CPU process, even if the environment has several ranks."""
        context = cls(device="cpu")
        context.rank, context.world_size, context.has_process_group = 0, 1, False
        context.dims, context.coords = ParallelDims(), RankCoords()
        return context

    def __enter__(self) -> "DistributedContext":
        self.numerics = devices.read_numerics()
        if self.deterministic:  # must precede all device operations
            devices.use_deterministic_algorithms()
        torch.manual_seed(self.seed)
        if self.device.type == "cpu":
            retain_freed_memory()
        else:
            devices.activate_device(self.device)
        configure_attention(self.device)
        if self.has_process_group:
            self.init_process_group()
        if (warning := devices.untested_warning(devices.device_capabilities(self.device))) is not None:
            self.log(warning)
        return self

    def init_process_group(self) -> None:
        """Create the process groups and meshes."""
        backend = devices.backend_of(self.device.type, devices.device_capabilities(self.device))
        device_id = None if self.device.type == "cpu" else self.device
        # The launcher reports hangs first, after `parallel.hang_timeout_seconds`, with the rank and its stack.
        timeout = timedelta(seconds=self.parallel.hang_timeout_seconds + TIMEOUT_MARGIN)
        dist.init_process_group(
            backend,
            store=PrefixStore(f"run{next(GROUP_NUMBERS)}", get_store(timeout)),
            timeout=timeout,
            rank=self.rank,
            world_size=self.world_size,
            device_id=device_id,
        )
        self.host_group = cast("dist.ProcessGroup", dist.new_group(None, HOST_TIMEOUT, "gloo", group_desc="host"))
        flight_recorder.serve_dumps(partial(dump_flight_recorders, self.device), self.rank)
        dims = self.dims
        make_mesh = partial(build_mesh, self.device.type, timeout=timeout, self_group=[])
        self.mesh = make_mesh((dims.dp_replicate, dims.fsdp_size, dims.tp), ("replicate", "shard", "tensor"))
        self.grad_mesh = make_mesh((dims.grad_avg_size, dims.tp), ("sum", "other"))
        if dims.cp > 1:
            self.cp_mesh = make_mesh((dims.dp_size, dims.cp, dims.tp), ("reader", "context", "other"))
        if dims.ep > 1:
            ep_sizes = dims.dp_replicate, dims.fsdp_size // dims.ep, dims.ep, dims.tp
            self.ep_mesh = make_mesh(ep_sizes, ("replicate", "shard", "expert", "other"))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        devices.set_numerics(self.numerics)
        # After an error, other ranks may be inside a collective, and a barrier would hang.
        if kind in (None, RunStopped) and self.has_process_group:
            dist.barrier(self.host_group)
            dist.destroy_process_group()

    @property
    def is_single(self) -> bool:
        """Whether there is no process group."""
        return self.world_size == 1 and self.host_group is None

    @property
    def stopping(self) -> signal.Signals | None:
        """Signal that requests a stop, once all ranks know of it: they agree in the collective of each step."""
        return self.requested_signal if self.is_single else self.agreed_signal

    # Collectives

    def log(self, message: str) -> None:
        """Print a line on the main process, above a progress bar if there is one."""
        if self.is_main_process:
            tqdm.write(message_text(message), file=sys.stderr)

    @property
    def is_main_process(self) -> bool:
        """Whether this process logs and writes for all ranks."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes. Without GROUP_WORLD_SIZE, all nodes have LOCAL_WORLD_SIZE processes."""
        default = self.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(1, int(os.environ.get("GROUP_WORLD_SIZE", default)))

    @property
    def dp_rank(self) -> int:
        """Data parallel rank, of `dims.dp_size`: selects the rows of this rank."""
        return self.rank // (self.dims.cp * self.dims.tp)

    def sum_counts(self, count: int) -> int:
        """Sum of a host integer over data parallel ranks."""
        return self.sum_each_count(count)[0]

    def sum_each_count(self, *counts: int) -> list[int]:
        """Sums of host integers over data parallel ranks."""
        return [int(total) for total in self.sum_numbers(*counts)]

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Sums of host numbers over data parallel ranks; integers are exact.

        Also agrees on stop signals, in the same collective.
        """
        if self.is_single:
            return [*numbers]
        flags = [self.requested_signal == number for number in STOP_SIGNALS]
        sums = torch.tensor([*numbers, *flags], dtype=torch.float64)
        dist.all_reduce(sums, group=self.host_group)
        for number, is_set in zip(STOP_SIGNALS, sums[len(numbers) :].tolist(), strict=True):
            self.agreed_signal = number if is_set else self.agreed_signal
        return [total / (self.dims.cp * self.dims.tp) for total in sums[: len(numbers)].tolist()]

    def max_over_ranks(self, *values: float) -> list[float]:
        """Maximum of each host number over all ranks."""
        if self.is_single:
            return [*values]
        maxima = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.host_group)
        return maxima.tolist()

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks with different tokens."""
        return self.all_reduce(value, dist.ReduceOp.SUM)

    def all_reduce_max(self, value: Tensor) -> Tensor:
        """Elementwise maximum over all ranks with different tokens."""
        return self.all_reduce(value, dist.ReduceOp.MAX)

    def all_reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.grad_mesh is not None:
            value = value.clone()
            dist.all_reduce(value, operation, group=self.grad_mesh.get_group("sum"))
        return value

    @property
    def grad_scale(self) -> float:
        """Factor of the loss: FSDP averages gradients over ranks, this turns the average into a sum.

        In fp16, it also keeps gradients in the range of the dtype, until the optimizer unscales them.
        """
        return self.dims.grad_avg_size * self.loss_scaler.scale

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Set whether the next backward pass reduces gradients over ranks: in the last micro-batch of a step.

        Until then each rank keeps full gradients. If these are large, every backward pass reduces them.
        """
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(enabled or not self.delays_gradient_sync)

    def all_reduce_world(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if not self.is_single:
            dist.all_reduce(value)
        return value

    def all_gather_objects(self, value: T) -> list[T]:
        """List with the object of each rank, in rank order."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def run_on_main(self, fn: Callable[[], T]) -> T:
        """Result of `fn` on the main process, broadcast to all ranks. Its UserError is raised on all of them."""
        if self.is_single:
            return fn()
        outcome: list[Any] = [None, None]
        if self.is_main_process:
            try:
                outcome[0] = fn()
            except UserError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.host_group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def run_on_all(self, fn: Callable[[], T]) -> T:
        """Local result of `fn`, after all ranks have called it. A UserError on one rank is raised on all of them."""
        results: list[T] = []  # kept here: `gather_results` would send them to all ranks
        self.gather_results(lambda: results.append(fn()))
        return results[0]

    def gather_results(self, fn: Callable[[], T]) -> list[T]:
        """Results of `fn` on all ranks, in rank order. A UserError on one rank is raised on all of them."""
        result, own_error = None, None
        try:
            result = fn()
        except UserError as error:
            own_error = error
        outcomes = self.all_gather_objects((result, own_error))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all ranks, without a short timeout."""
        if not self.is_single:
            dist.barrier(self.host_group)

    def begin_step(self, step: int) -> None:
        """Report a step to the heartbeat, and seed its random numbers."""
        self.step = step
        self.heartbeat.record(step, "step")
        self.seed_step(step)

    def seed_step(self, step: int, micro_batch: int = 0) -> None:
        """Seed random numbers (dropout) by (seed, step, rank), so that a resumed run draws the same.

        `micro_batch` seeds a micro-batch that runs forward twice.

        Tensor parallel ranks, which share tokens, draw the same; context parallel ranks draw different numbers.
        """
        rank = self.rank // self.dims.tp
        key = f"{self.seed} {step} {rank}" + (f" {micro_batch}" if micro_batch else "")
        torch.manual_seed(random.Random(key).getrandbits(63))


def rank_coords(rank: int, dims: ParallelDims) -> RankCoords:
    """Mesh coordinates of a rank."""
    dp_rank, tensor = divmod(rank, dims.tp)
    replicate, shard = divmod(dp_rank, dims.fsdp_size)
    return RankCoords(replicate, shard % dims.cp, tensor)


def dump_flight_recorders(device: torch.device) -> dict[str, bytes]:
    """Flight recorder contents of this process, by backend. Builds of torch without a recorder lack these functions."""
    names = {"gloo": "_dump_fr_trace"} | ({"nccl": "_dump_nccl_trace"} if device.type == "cuda" else {})
    return {backend: vars(c10d)[name]() for backend, name in names.items() if name in vars(c10d)}


def build_mesh(
    device: str, sizes: Sequence[int], names: tuple[str, ...], timeout: timedelta, self_group: list[dist.ProcessGroup]
) -> DeviceMesh:
    """Mesh over all ranks, with one process group per dimension. Dimensions of size 1 share `self_group`, which is
    created for the first of them, because NCCL splits a communicator for each group.

    `init_device_mesh` would use torch's default timeout, and split the gloo backend with options of NCCL, which warns.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes)
    groups = []
    for dim, name in enumerate(names):
        if sizes[dim] == 1 and dist.get_world_size() > 1:
            self_group[:] = self_group or [mesh_group(ranks, dim, "own", timeout)]
            groups += self_group
        else:
            groups.append(mesh_group(ranks, dim, f"mesh_{name}", timeout))
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def mesh_group(ranks: Tensor, dim: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Process group of this rank along one mesh dimension. All ranks create all groups in the same order."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    if len(rows) == 1:  # all ranks: the default group
        return cast("dist.ProcessGroup", dist.group.WORLD)
    groups = [dist.new_group(row, timeout, group_desc=name) for row in rows]
    group = next(group for row, group in zip(rows, groups, strict=True) if dist.get_rank() in row)
    return cast("dist.ProcessGroup", group)


@cache
def get_store(timeout: timedelta) -> Store:
    """Store shared by all ranks of the environment, one per process.

    Rank 0 of `tune run` inherits a listening socket, so that no other process can take the port.
    """
    if not worker_env.is_tune_worker():
        return next(rendezvous("env://", timeout=timeout))[0]
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listener = os.environ.get(worker_env.LISTENER)
    listener_fd = None if listener is None else int(listener)
    return TCPStore(os.environ["MASTER_ADDR"], port, size, rank == 0, timeout, master_listen_fd=listener_fd)
