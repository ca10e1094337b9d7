"""Where it runs. On one process every collective here is the identity, so recipes never ask how many there are."""

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from tunekit import devices
from tunekit.distributed import flight_recorder
from tunekit.distributed.attention_setup import configure_attention
from tunekit.distributed.heartbeat import HeartbeatWriter
from tunekit.distributed.mesh import build_mesh
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.distributed.rendezvous_store import get_store
from tunekit.errors import RunStopped, UserError
from tunekit.kernels.malloc import retain_freed_memory

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GROUP_NUMBERS = count()  # of the same processes, which have one store of what they tell each other
TIMEOUT_MARGIN = 60  # seconds
# For tests on a machine with one GPU: with RANK=0, WORLD_SIZE=1 and the rest that torchrun sets, a single process forms
# a process group too, and its model is sharded over it.
ONE_RANK = "TUNEKIT_ONE_RANK_GROUP"
HOST_TIMEOUT = timedelta(days=30)  # for those who wait while one process reads, writes or sends something large


@dataclass(frozen=True)
class RankCoords:
    """Where this process is among all, along each way of sharing."""

    replicate: int = 0
    shard: int = 0  # of those that share the weights, with `context` counted in
    context: int = 0
    tensor: int = 0


class DistributedContext:
    """Device, rank and random state of this process, for as long as the `with` block lasts.

    Who we are is said by the environment, as torchrun sets it (RANK, WORLD_SIZE, LOCAL_RANK); without it there is one
    process. Ranks lie as replicate x shard x context x tensor, the last ones side by side.
    """

    def __init__(
        self, seed: int = 0, device: str = "auto", parallel: ParallelConfig | None = None, deterministic: bool = False
    ) -> None:
        self.seed, self.parallel, self.deterministic = seed, parallel or ParallelConfig(), deterministic
        self.numerics = devices.read_numerics()  # restored at the end
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.dims = self.parallel.resolve_dims(self.world_size)
        self.coords = rank_coords(self.rank, self.dims)
        self.device = devices.select(device)
        self.has_process_group = self.world_size > 1 or ONE_RANK in os.environ  # whether there is a process group
        if self.world_size > 1 or not self.has_process_group:
            self.parallel.check(self.device.type, self.world_size)
        self.heartbeat = HeartbeatWriter.open()  # what whoever has started us sees of us
        self.requested_signal: signal.Signals | None = None  # of this process, at any moment
        self.agreed_signal: signal.Signals | None = None  # by all, between two steps
        self.mesh: DeviceMesh | None = None  # replicate x shard x tensor, context being part of shard
        self.cp_mesh: DeviceMesh | None = None  # readers x context x tensor
        self.ep_mesh: DeviceMesh | None = None  # replicate x shard x expert x tensor, shard without expert
        self.grad_mesh: DeviceMesh | None = None  # averaged x tensor
        self.host_group: dist.ProcessGroup | None = None  # of all, on the host
        self.delays_gradient_sync = True  # whether gradients are exchanged once a step, and not in each pass
        self.step = 0  # that is taken now

    @classmethod
    def single_process(cls) -> "DistributedContext":
        """A process that asks no other, on the CPU, even where the environment says that it is one of several."""
        run = cls(device="cpu")
        run.rank, run.world_size, run.dims, run.coords, run.has_process_group = (
            0,
            1,
            ParallelDims(),
            RankCoords(),
            False,
        )
        return run

    def __enter__(self) -> "DistributedContext":
        self.numerics = devices.read_numerics()
        if self.deterministic:  # before anything runs on the device
            devices.use_deterministic_algorithms()
        torch.manual_seed(self.seed)
        if self.device.type == "cpu":
            retain_freed_memory()
        else:
            devices.activate(self.device)
        configure_attention(self.device)
        if self.has_process_group:
            self.init_process_group()
        if (warning := devices.untested_warning(devices.capabilities(self.device))) is not None:
            self.log(warning)
        return self

    def init_process_group(self) -> None:
        """Meet the other processes."""
        backend = devices.backend_of(self.device.type, devices.capabilities(self.device))
        device_id = None if self.device.type == "cpu" else self.device
        # Whoever has started us is the first to say who hangs, with `parallel.hang_timeout_seconds`, and where.
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
        flight_recorder.serve(partial(dump_flight_recorders, self.device), self.rank)
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
        # After an error others may be in the middle of an exchange, for which taking leave would wait.
        if kind in (None, RunStopped) and self.has_process_group:
            dist.barrier(self.host_group)
            dist.destroy_process_group()

    @property
    def is_single(self) -> bool:
        """Whether there is no process group, so that collectives have nothing to do."""
        return self.world_size == 1 and self.host_group is None

    @property
    def stopping(self) -> signal.Signals | None:
        """The signal that asks to end, once all ranks know of it: they look at the same moment of each step."""
        return self.requested_signal if self.is_single else self.agreed_signal

    # What all say to each other

    def log(self, message: str) -> None:
        """A line for people, once for all processes. It stands above a bar, if one is drawn."""
        if self.is_main_process:
            tqdm.write(message, file=sys.stderr)

    @property
    def is_main_process(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Machines. Where nobody has told how many there are, each has as many processes as this one."""
        group_world_size = os.environ.get("GROUP_WORLD_SIZE")
        return max(
            1,
            self.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            if group_world_size is None
            else int(group_world_size),
        )

    @property
    def dp_rank(self) -> int:
        """Which rows are for this rank, of those for `sizes.readers`."""
        return self.rank // (self.dims.cp * self.dims.tp)

    def sum_counts(self, count: int) -> int:
        """The sum over all readers of a number that the host knows."""
        return self.sum_each_count(count)[0]

    def sum_each_count(self, *counts: int) -> list[int]:
        """Sums over all readers. Signals travel with them, so that all hear of one at the same moment."""
        if self.is_single:
            return [*counts]
        flags = [self.requested_signal == number for number in SIGNALS]
        sums = torch.tensor([*counts, *flags], dtype=torch.int64)
        dist.all_reduce(sums, group=self.host_group)
        for number, is_set in zip(SIGNALS, sums[len(counts) :].tolist(), strict=True):
            self.agreed_signal = number if is_set else self.agreed_signal
        return [count // (self.dims.cp * self.dims.tp) for count in sums[: len(counts)].tolist()]

    def max_over_ranks(self, *values: float) -> list[float]:
        """The largest of each number that the host knows on any rank."""
        if self.is_single:
            return [*values]
        maxima = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.host_group)
        return maxima.tolist()

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks that have seen different tokens."""
        if self.grad_mesh is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.grad_mesh.get_group("sum"))
        return value

    def all_reduce_max(self, value: Tensor) -> Tensor:
        """The largest of each number over all ranks that have seen different tokens."""
        if self.grad_mesh is not None:
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.grad_mesh.get_group("sum"))
        return value

    @property
    def grad_scale(self) -> int:
        """By how much sharding makes gradients smaller: it averages them over ranks, and they are to be added up."""
        return self.dims.grad_avg_size

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Whether the next backward pass is the last of a step, in which gradients are added up over the ranks.

        Until then each rank would keep whole gradients: where that is much, every pass adds up.
        """
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(enabled or not self.delays_gradient_sync)

    def all_reduce_world(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        if not self.is_single:
            dist.all_reduce(value)
        return value

    def all_gather_objects(self, value: T) -> list[T]:
        """What each rank has, in the order of ranks, for all of them."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def run_on_main(self, fn: Callable[[], T]) -> T:
        """What the main process makes, for all of them; the others wait. Its UserError is one of all."""
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
        """What each process makes, once all are through with it. The UserError of one is one of all."""
        result, own_error = None, None
        try:
            result = fn()
        except UserError as error:
            own_error = error
        for error in self.all_gather_objects(own_error):
            if error is not None:
                raise error
        return result  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all, however long one of them takes."""
        if not self.is_single:
            dist.barrier(self.host_group)

    def begin_step(self, step: int) -> None:
        """A step begins: it can be seen from outside, and draws its own random numbers."""
        self.step = step
        self.heartbeat.beat(step, "step")
        self.seed_step(step)

    def seed_step(self, step: int) -> None:
        """Randomness of a step (dropout) depends on (seed, step, reader) alone, so a resumed run draws the same.

        Ranks that share the same tokens draw the same; those with other parts of a row draw others.
        """
        rank = self.rank // self.dims.tp
        torch.manual_seed(random.Random(f"{self.seed} {step} {rank}").getrandbits(63))


def rank_coords(rank: int, dims: ParallelDims) -> RankCoords:
    """Where a rank is."""
    dp_rank, tensor = divmod(rank, dims.tp)
    replicate, shard = divmod(dp_rank, dims.fsdp_size)
    return RankCoords(replicate, shard, shard % dims.cp, tensor)


def dump_flight_recorders(device: torch.device) -> dict[str, bytes]:
    """What the flight recorders of this process hold, by backend. Builds of torch without one have no such function."""
    names = {"gloo": "_dump_fr_trace"} | ({"nccl": "_dump_nccl_trace"} if device.type == "cuda" else {})
    return {backend: vars(c10d)[name]() for backend, name in names.items() if name in vars(c10d)}
