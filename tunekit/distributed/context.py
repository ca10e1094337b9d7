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
MEETINGS = count()  # of the same processes, which have one store of what they tell each other
LATER = 60  # seconds
# For tests on a machine with one GPU: with RANK=0, WORLD_SIZE=1 and the rest that torchrun sets, a single process forms
# a process group too, and its model is sharded over it.
ONE_RANK = "TUNEKIT_ONE_RANK_GROUP"
PATIENT = timedelta(days=30)  # for those who wait while one process reads, writes or sends something large


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
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.sizes = self.parallel.sizes(self.size)
        self.place = rank_coords(self.rank, self.sizes)
        self.device = devices.select(device)
        self.joins = self.size > 1 or ONE_RANK in os.environ  # whether there is a process group
        if self.size > 1 or not self.joins:
            self.parallel.check(self.device.type, self.size)
        self.beats = HeartbeatWriter.open()  # what whoever has started us sees of us
        self.asked: signal.Signals | None = None  # of this process, at any moment
        self.agreed: signal.Signals | None = None  # by all, between two steps
        self.mesh: DeviceMesh | None = None  # replicate x shard x tensor, context being part of shard
        self.rows: DeviceMesh | None = None  # readers x context x tensor
        self.experts: DeviceMesh | None = None  # replicate x shard x expert x tensor, shard without expert
        self.sums: DeviceMesh | None = None  # averaged x tensor
        self.patient: dist.ProcessGroup | None = None  # of all, on the host
        self.accumulates = True  # whether gradients are exchanged once a step, and not in each pass
        self.step = 0  # that is taken now

    @classmethod
    def alone(cls) -> "DistributedContext":
        """A process that asks no other, on the CPU, even where the environment says that it is one of several."""
        run = cls(device="cpu")
        run.rank, run.size, run.sizes, run.place, run.joins = 0, 1, ParallelDims(), RankCoords(), False
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
        if self.joins:
            self.join()
        if (warning := devices.untested_warning(devices.capabilities(self.device))) is not None:
            self.tell(warning)
        return self

    def join(self) -> None:
        """Meet the other processes."""
        backend = devices.backend_of(self.device.type, devices.capabilities(self.device))
        bound = None if self.device.type == "cpu" else self.device
        # Whoever has started us is the first to say who hangs, with `parallel.hang_timeout_seconds`, and where.
        timeout = timedelta(seconds=self.parallel.hang_timeout_seconds + LATER)
        dist.init_process_group(
            backend,
            store=PrefixStore(f"run{next(MEETINGS)}", get_store(timeout)),
            timeout=timeout,
            rank=self.rank,
            world_size=self.size,
            device_id=bound,
        )
        self.patient = cast("dist.ProcessGroup", dist.new_group(None, PATIENT, "gloo", group_desc="host"))
        flight_recorder.serve(partial(recorded, self.device), self.rank)
        sizes = self.sizes
        mesh = partial(build_mesh, self.device.type, timeout=timeout, own=[])
        self.mesh = mesh((sizes.dp_replicate, sizes.sharded, sizes.tp), ("replicate", "shard", "tensor"))
        self.sums = mesh((sizes.averaged, sizes.tp), ("sum", "other"))
        if sizes.cp > 1:
            self.rows = mesh((sizes.readers, sizes.cp, sizes.tp), ("reader", "context", "other"))
        if sizes.ep > 1:
            by = sizes.dp_replicate, sizes.sharded // sizes.ep, sizes.ep, sizes.tp
            self.experts = mesh(by, ("replicate", "shard", "expert", "other"))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        devices.set_numerics(self.numerics)
        # After an error others may be in the middle of an exchange, for which taking leave would wait.
        if kind in (None, RunStopped) and self.joins:
            dist.barrier(self.patient)
            dist.destroy_process_group()

    @property
    def is_single(self) -> bool:
        """Whether there is no process group, so that collectives have nothing to do."""
        return self.size == 1 and self.patient is None

    @property
    def stopping(self) -> signal.Signals | None:
        """The signal that asks to end, once all ranks know of it: they look at the same moment of each step."""
        return self.asked if self.is_single else self.agreed

    # What all say to each other

    def tell(self, text: str) -> None:
        """A line for people, once for all processes. It stands above a bar, if one is drawn."""
        if self.is_main:
            tqdm.write(text, file=sys.stderr)

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    @property
    def hosts(self) -> int:
        """Machines. Where nobody has told how many there are, each has as many processes as this one."""
        told = os.environ.get("GROUP_WORLD_SIZE")
        return max(1, self.size // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if told is None else int(told))

    @property
    def reader(self) -> int:
        """Which rows are for this rank, of those for `sizes.readers`."""
        return self.rank // (self.sizes.cp * self.sizes.tp)

    def total(self, count: int) -> int:
        """The sum over all readers of a number that the host knows."""
        return self.totals(count)[0]

    def totals(self, *counts: int) -> list[int]:
        """Sums over all readers. Signals travel with them, so that all hear of one at the same moment."""
        if self.is_single:
            return [*counts]
        asked = [self.asked == number for number in SIGNALS]
        sums = torch.tensor([*counts, *asked], dtype=torch.int64)
        dist.all_reduce(sums, group=self.patient)
        for number, heard in zip(SIGNALS, sums[len(counts) :].tolist(), strict=True):
            self.agreed = number if heard else self.agreed
        return [count // (self.sizes.cp * self.sizes.tp) for count in sums[: len(counts)].tolist()]

    def most(self, *values: float) -> list[float]:
        """The largest of each number that the host knows on any rank."""
        if self.is_single:
            return [*values]
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.patient)
        return found.tolist()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks that have seen different tokens."""
        if self.sums is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.sums.get_group("sum"))
        return value

    def largest(self, value: Tensor) -> Tensor:
        """The largest of each number over all ranks that have seen different tokens."""
        if self.sums is not None:
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.sums.get_group("sum"))
        return value

    @property
    def averaged(self) -> int:
        """By how much sharding makes gradients smaller: it averages them over ranks, and they are to be added up."""
        return self.sizes.averaged

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Whether the next backward pass is the last of a step, in which gradients are added up over the ranks.

        Until then each rank would keep whole gradients: where that is much, every pass adds up.
        """
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(on or not self.accumulates)

    def over_all(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        if not self.is_single:
            dist.all_reduce(value)
        return value

    def gather(self, value: T) -> list[T]:
        """What each rank has, in the order of ranks, for all of them."""
        if self.is_single:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.patient)
        return found

    def shared(self, make: Callable[[], T]) -> T:
        """What the main process makes, for all of them; the others wait. Its UserError is one of all."""
        if self.is_single:
            return make()
        found: list[Any] = [None, None]
        if self.is_main:
            try:
                found[0] = make()
            except UserError as error:
                found[1] = error
        dist.broadcast_object_list(found, src=0, group=self.patient)
        if found[1] is not None:
            raise found[1]
        return found[0]

    def together(self, make: Callable[[], T]) -> T:
        """What each process makes, once all are through with it. The UserError of one is one of all."""
        made, wrong = None, None
        try:
            made = make()
        except UserError as error:
            wrong = error
        for error in self.gather(wrong):
            if error is not None:
                raise error
        return made  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all, however long one of them takes."""
        if not self.is_single:
            dist.barrier(self.patient)

    def begin_step(self, step: int) -> None:
        """A step begins: it can be seen from outside, and draws its own random numbers."""
        self.step = step
        self.beats.beat(step, "step")
        self.seed_step(step)

    def seed_step(self, step: int) -> None:
        """Randomness of a step (dropout) depends on (seed, step, reader) alone, so a resumed run draws the same.

        Ranks that share the same tokens draw the same; those with other parts of a row draw others.
        """
        rank = self.rank // self.sizes.tp
        torch.manual_seed(random.Random(f"{self.seed} {step} {rank}").getrandbits(63))


def rank_coords(rank: int, sizes: ParallelDims) -> RankCoords:
    """Where a rank is."""
    rest, tensor = divmod(rank, sizes.tp)
    replicate, shard = divmod(rest, sizes.sharded)
    return RankCoords(replicate, shard, shard % sizes.cp, tensor)


def recorded(device: torch.device) -> dict[str, bytes]:
    """What the flight recorders of this process hold, by backend. Builds of torch without one have no such function."""
    names = {"gloo": "_dump_fr_trace"} | ({"nccl": "_dump_nccl_trace"} if device.type == "cuda" else {})
    return {backend: vars(c10d)[name]() for backend, name in names.items() if name in vars(c10d)}
