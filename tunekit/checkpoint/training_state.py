"""The resumable state of a run: trained weights, optimizer, schedule, random numbers and the step.

A folder `state/00000010/` holds the tensors by full name, as torch.distributed.checkpoint writes them so that any
layout can read them; `progress.pt` with the step, the schedule and the numbers of the optimizer's groups;
`random-0.pt` with the random number generators of rank 0; and the mark that says that all of it is there.

Every rank writes its pieces. In the background, training goes on as soon as they are copied to the host.
"""

import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Protocol, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import LRScheduler

from tunekit import devices, env_info
from tunekit.checkpoint import atomic, dcp_planner
from tunekit.checkpoint.dcp_planner import CorruptStateError, LocalShard, Pieces, WritePlan, reshard
from tunekit.checkpoint.host_copy import HostCopies
from tunekit.distributed.context import PATIENT, DistributedContext
from tunekit.distributed.sharding import ShardSlice, shard_slice, to_local
from tunekit.errors import RunStopped, UserError
from tunekit.optim.container import BLOCK

PROGRESS = "progress.pt"
SPARE = 0.9  # of the available host memory that copies of a state may take
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


class Stateful(Protocol):
    """An object whose state belongs to a run, as in torch.distributed.checkpoint.

    `state_dict` returns plain values and tensors, the tensors by reference: restoring fills them in place and passes
    the complete state to `load_state_dict`.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


@dataclass(frozen=True)
class PendingSave:
    """A state as it was at one step: what is left to do is to write it."""

    folder: Path
    pieces: Pieces
    shares: WritePlan
    rest: Mapping[str, bytes]  # small files of this rank


@dataclass(frozen=True)
class LoadedState:
    """A state on the disk that was found to be sound."""

    folder: Path
    metadata: Metadata
    progress: dict[str, Any]
    generators: dict[str, Any]


class Checkpointer:
    """The newest `keep` states of a run under `folder`, one folder a step. Saving and restoring change no number.

    with State(...) as state:   # leaving it waits for what is being written
        done = state.restore()
        state.save(step)        # what an earlier one could not write is told here,
        state.look()            # or between two steps, on all ranks at the same
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        keep: int,
        run: DistributedContext,
        background: bool = False,
        **stateful: Stateful,
    ) -> None:
        """`stateful`: everything else that changes during a run, by its name in the state."""
        assert keep > 0
        self.stateful, self.background = stateful, background
        self.folder, self.model, self.optimizer, self.schedule = folder, model, optimizer, schedule
        self.keep, self.run, self.line = keep, run, with_own_process_group(run) if background else run
        self.shares: WritePlan | None = None
        self.copies = HostCopies()
        self.writing: AsyncSave | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, RunStopped):
            self.wait()
        elif isinstance(error, UserError):
            with suppress(UserError):  # one is enough
                self.wait()

    def save(self, step: int) -> None:
        """Write the state after `step` steps, once an earlier one is written. Those that are not kept go only when
        this one is whole."""
        self.run.beats.beat(step, "save")
        self.wait()
        job = self.taken(step)
        if self.background and self.has_memory(job):
            self.writing = AsyncSave(partial(self.write, self.staged(job)))
            self.writing.start()
        else:
            self.write(job)

    def look(self) -> None:
        """Between two steps: whether all ranks have written what they began to write. If one could not, it is told."""
        if self.writing is None:
            return
        self.writing.sound()
        if all(self.run.gather(not self.writing.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Until all is written that was begun."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.end()

    def taken(self, step: int) -> PendingSave:
        """What there is to write, and who writes what. Tensors are still those that are trained."""
        reshard(self.model)
        held = self.weights() | (self.moments() if self.optimizer.state else {}) | self.stateful_tensors()
        self.shares = dcp_planner.plan_writes(held, self.run, self.shares)
        progress = {"step": step, "schedule": self.schedule.state_dict(), "groups": self.groups()}
        progress["stateful"] = {name: plain_values(obj.state_dict()) for name, obj in self.stateful.items()}
        rest = {PROGRESS: progress} if self.run.is_main else {}
        rest |= {generators_file(self.run): generators(self.run.device)}
        return PendingSave(
            self.folder / f"{step:08d}", held, self.shares, {name: packed(v) for name, v in rest.items()}
        )

    def has_memory(self, job: PendingSave) -> bool:
        """Whether the host has memory for copies of what the ranks of this machine write."""
        free, missing = (
            env_info.available_memory(),
            self.copies.missing(own(job)) * max(1, self.run.size // self.run.hosts),
        )
        (lacks,) = self.run.most(float(free is not None and missing > SPARE * free))
        if lacks:
            self.background = False
            self.run.tell(
                "async_save: not enough host memory for a copy of the state; training waits while it is saved"
            )
        return not lacks

    def staged(self, job: PendingSave) -> PendingSave:
        """The same with copies on the host of what this rank writes. Their memory is used again."""
        copies = {name: LocalShard(self.copies.copy(name, t), job.pieces[name].box) for name, t in own(job).items()}
        return replace(job, pieces=copies)

    def write(self, job: PendingSave) -> None:
        """All ranks write their share, and the main process marks the whole when all have. Or nothing is there."""
        place = atomic.sibling_path(job.folder, atomic.PARTIAL)
        try:
            self.line.shared(partial(create_state_dir, job))
            written = self.line.together(partial(write_local_shards, place, job))
            found = self.line.gather(written)
            self.line.shared(partial(self.end, place, job, found))
        except UserError:
            if self.run.is_main:
                with suppress(OSError):
                    atomic.remove_partial(job.folder)
            raise

    def end(self, place: Path, job: PendingSave, written: list[dcp_planner.ShardWriteResult]) -> None:
        with atomic.wrap_write_errors(job.folder):
            atomic.commit_dir(place, job.folder, dcp_planner.write_metadata(place, job.shares.metadata, written))
            for old in complete_states(self.folder)[: -self.keep]:
                atomic.remove_dir(old)

    def restore(self) -> int:
        """Load the newest whole state in place and return how many steps it has behind it; 0 if there is none."""
        self.wait()  # in the course of a run, one may be on its way
        states = self.run.shared(self.tidied)
        if not states:
            return 0
        self.run.together(partial(self.sound, states))  # a file is opened only when no rank has found one damaged
        return self.load(self.run.together(partial(self.opened, states)))

    def tidied(self) -> list[Path]:
        """The whole states, when it is cleared up behind a writer that was cut off."""
        for left in (*self.folder.glob(f"*{atomic.PREVIOUS}"), *self.folder.glob(f"*{atomic.PARTIAL}")):
            atomic.remove_partial(left.with_suffix(""))
        return complete_states(self.folder)

    def sound(self, states: list[Path]) -> None:
        """UserError if the newest state is not as it was written. Each rank looks at some of its files."""
        with newest_state(states) as folder:
            damaged = atomic.find_corrupt_file(folder, slice(self.run.rank, None, self.run.size))
            if damaged is not None:
                raise CorruptStateError(damaged)

    def opened(self, states: list[Path]) -> LoadedState:
        """The newest state, which was found to be sound."""
        with newest_state(states) as folder:
            drawn = folder / generators_file(self.run)
            random_states = read_plain(drawn) if drawn.is_file() else {}  # a rank that is new in this layout has none
            return LoadedState(folder, dcp_planner.read_metadata(folder), read_plain(folder / PROGRESS), random_states)

    def load(self, there: LoadedState) -> int:
        """Everything is checked before the first number of the model changes."""
        reshard(self.model)
        names = there.progress.get("stateful", {}).keys()
        if names != self.stateful.keys():
            unknown = ", ".join(sorted(names ^ self.stateful.keys()))
            raise UserError(
                f"{there.folder}: this state is of another recipe or version of tunekit (differs in: {unknown}). "
                "Pass --overwrite to start over."
            )
        held = self.fitting(there.metadata.state_dict_metadata, there.progress["groups"], there.folder)
        dcp_planner.load_shards(there.folder, held, there.metadata)
        for group, values in zip(self.optimizer.param_groups, there.progress["groups"], strict=True):
            restore_group(group, values)
        self.schedule.load_state_dict(there.progress["schedule"])
        tensors = {name: shard.tensor for name, shard in held.items()}
        for name, obj in self.stateful.items():
            own = {key: tensors[f"{name}.{key}"] for key in tensor_values(obj.state_dict())}
            obj.load_state_dict(there.progress["stateful"][name] | own)
        restore_generators(there.generators, self.run.device)
        return there.progress["step"]

    def weights(self) -> dict[str, LocalShard]:
        """What is trained, and what was fixed when training began, by name. References: loading fills them in place.

        A buffer such as the start of PiSSA is computed, and comes out otherwise with other threads or another device.
        """
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        named = (*trained, *self.model.named_buffers())
        return {f"model.{bare(name)}": LocalShard(to_local(t.detach()), shard_slice(t)) for name, t in named}

    def moments(self) -> dict[str, LocalShard]:
        """What the optimizer keeps for each weight, by name. References too; allocated if it took no step yet."""
        if not self.optimizer.state:
            get_optimizer_state_dict(self.model, self.optimizer)
        names: dict[Tensor, str] = {parameter: bare(name) for name, parameter in self.model.named_parameters()}
        return {
            f"optimizer.{names[weight]}.{key}": LocalShard(to_local(value), optimizer_state_slice(weight, value))
            for weight, values in self.optimizer.state.items()
            for key, value in values.items()
        }

    def stateful_tensors(self) -> dict[str, LocalShard]:
        """The tensors in the states of `stateful`, by name. References, which loading fills in place."""
        return {
            f"{name}.{key}": LocalShard(to_local(value), shard_slice(value))
            for name, obj in self.stateful.items()
            for key, value in tensor_values(obj.state_dict()).items()
        }

    def groups(self) -> list[dict]:
        """The optimizer's groups: the names of their parameters, and the numbers that a schedule may move."""
        names = {parameter: bare(name) for name, parameter in self.model.named_parameters()}
        return [
            {name: value for name, value in group.items() if isinstance(value, float | tuple | Tensor)}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def fitting(self, disk: dict, groups: list[dict], folder: Path) -> dict[str, LocalShard]:
        """The tensors to fill, once it is sure that the state is one of this model and this optimizer."""
        # What had no gradient before the state was saved has nothing kept for it.
        kept = {owner(name) for name in disk}
        moments = {name: piece for name, piece in self.moments().items() if owner(name) in kept}
        for name, parameter in self.model.named_parameters():
            if f"optimizer.{bare(name)}" not in kept:
                self.optimizer.state.pop(parameter, None)
        held = self.weights() | moments | self.stateful_tensors()
        here = {name: piece.box.shape for name, piece in held.items()}
        there = {n: tuple(m.size) if isinstance(m, TensorStorageMetadata) else None for n, m in disk.items()}
        odd = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
        if odd or [g["params"] for g in groups] != [g["params"] for g in self.groups()]:
            what = f"{odd[0]}: {there.get(odd[0])} there, {here.get(odd[0])} here" if odd else "other parameter groups"
            raise UserError(
                f"{folder} is the state of another model or optimizer ({what}): start over with --overwrite"
            )
        return held


def tensor_values(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}


def plain_values(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


class AsyncSave(Thread):
    """Writes while others train. It may speak with its like on other ranks, but on a line of their own."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(daemon=True)  # a process that is to end at once does not wait
        self.write, self.error, self.through = write, None, False

    def run(self) -> None:
        try:
            self.write()
        except UserError as error:
            self.error = error
        self.through = True

    def sound(self) -> None:
        assert self.is_alive() or self.through, "a state was not written, for the reason above"

    def end(self) -> None:
        """Wait; what could not be written is an error here."""
        self.join()
        self.sound()
        if self.error is not None:
            raise self.error


def with_own_process_group(run: DistributedContext) -> DistributedContext:
    """The same ranks with a line of their own, for a thread that speaks beside the others."""
    other = copy(run)
    if run.patient is not None:
        other.patient = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=PATIENT))
    return other


def optimizer_state_slice(weight: Tensor, value: Tensor) -> ShardSlice:
    """Where what an optimizer keeps lies in the whole: numbers like the weight's, one for each block of a row, or one
    for all."""
    assert isinstance(value, Tensor), "optimizers keep tensors"
    if not value.ndim:
        return ShardSlice((), ())
    box = shard_slice(weight)
    if to_local(value).shape == to_local(weight).shape:
        return box
    assert value.ndim == weight.ndim + 1, "neither a number for each of the weight nor one for each block"
    shape = len(value), *box.shape[:-1], math.ceil(box.shape[-1] / BLOCK)
    return ShardSlice(shape, (0, *box.offset[:-1], box.offset[-1] // BLOCK))


def own(job: PendingSave) -> dict[str, Tensor]:
    """Tensors that this rank writes, by name."""
    return {item.index.fqn: job.pieces[item.index.fqn].tensor for item in job.shares.own.items}


def create_state_dir(job: PendingSave) -> None:
    """Make room for a state."""
    atomic.check_free_space(job.folder, job.shares.size + 2**20)
    with atomic.wrap_write_errors(job.folder):
        atomic.remove_partial(job.folder)
        atomic.sibling_path(job.folder, atomic.PARTIAL).mkdir(parents=True)


def write_local_shards(place: Path, job: PendingSave) -> dcp_planner.ShardWriteResult:
    """Write what is for this rank to write."""
    with atomic.wrap_write_errors(job.folder):
        return dcp_planner.write_shards(place, job.pieces, job.shares.own, job.rest)


@contextmanager
def newest_state(states: list[Path]) -> Iterator[Path]:
    """The newest state. What cannot be read of it is a UserError that says how to go on without it."""
    try:
        yield states[-1]
    except CorruptStateError as error:
        back = f"step {int(states[-2].name)}" if len(states) > 1 else "the start"
        raise UserError(f"{error}; delete the folder {states[-1]} to go on from {back}") from error


def complete_states(folder: Path) -> list[Path]:
    """The whole states in a folder, oldest first."""
    return sorted(state for state in folder.glob("[0-9]" * 8) if atomic.is_complete(state))


def bare(name: str) -> str:
    """The name of a parameter without the wrappers of compilation and recompute: a state fits with and without them."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def packed(values: dict) -> bytes:
    """Plain values as a file holds them."""
    stream = BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


def read_plain(file: Path) -> dict:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptStateError(file) from error


def restore_group(group: dict, values: dict) -> None:
    for name, value in values.items():
        if name == "params":
            continue
        if isinstance(group[name], Tensor):
            group[name].copy_(value)
        else:
            group[name] = value


def generators_file(run) -> str:
    return f"random-{run.rank}.pt"


def generators(device: torch.device) -> dict:
    """The state of every random number generator that this process has used."""
    found: dict = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        found["device"] = devices.get_rng_state(device)
    if "numpy.random" in sys.modules:  # numpy loads it when it is first used
        kind, words, *rest = cast("tuple", numpy.random.get_state())  # a dict only if asked for one
        found["numpy"] = (kind, words.tolist(), *rest)
    return found


def restore_generators(found: dict, device: torch.device) -> None:
    setters = {
        "torch": torch.set_rng_state,
        "python": random.setstate,
        "device": lambda value: devices.set_rng_state(device, value),
        "numpy": lambda value: numpy.random.set_state(value),
    }
    for name, value in found.items():
        setters[name](value)
