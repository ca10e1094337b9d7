"""Training state of a run, to resume it: trained weights, optimizer, LR scheduler, RNG states and step.

A directory `state/00000010/` contains all tensors by full name in the format of torch.distributed.checkpoint, which any
parallel layout can read; `progress.pt` with the step, the LR scheduler and the optimizer's param groups; `random-0.pt`
with the RNG states of rank 0; and the marker of a complete directory.

Every rank writes its shards. With background saving, training continues once they are copied to host memory.
"""

import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, cast

import numpy
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import LRScheduler

from tunekit import devices, env_info
from tunekit.checkpoint import atomic, dcp_planner
from tunekit.checkpoint.async_save import AsyncSave, with_own_process_group
from tunekit.checkpoint.dcp_planner import (
    CorruptStateError,
    LocalShard,
    LocalShards,
    WritePlan,
    reshard,
    wrap_read_errors,
)
from tunekit.checkpoint.host_copy import HostCopies
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import ShardSlice, shard_slice, to_local
from tunekit.errors import RunStopped, UserError
from tunekit.optim.container import BLOCK

PROGRESS = "progress.pt"
MAX_HOST_MEMORY_FRACTION = 0.9  # of the available host memory, for copies of a state
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
    """Snapshot of a state that is not written yet."""

    folder: Path
    shards: LocalShards
    plan: WritePlan
    extra_files: Mapping[str, bytes]  # of this rank, by file name
    step_to_keep: int | None  # step of the best state, which is not deleted


@dataclass(frozen=True)
class LoadedState:
    """A state on disk whose checksums were verified. Tensors are not read yet."""

    folder: Path
    metadata: Metadata
    progress: dict[str, Any]
    rng_states: dict[str, Any]


class Checkpointer:
    """Saves and restores training states under `folder`, one directory per step, and keeps the newest `keep`.

    Saving and resuming is bitwise exact. All methods must be called on all ranks.

    with Checkpointer(...) as checkpointer:   # waits for a background save on exit
        step = checkpointer.restore()
        checkpointer.save(step)               # raises the error of a previous background save,
        checkpointer.poll()                   # as does polling between two steps
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        keep: int,
        dist: DistributedContext,
        background: bool = False,
        **stateful: Stateful,
    ) -> None:
        """`stateful`: everything else that changes during a run, by its name in the state."""
        assert keep > 0
        self.stateful, self.background = stateful, background
        self.folder, self.model, self.optimizer, self.schedule = folder, model, optimizer, schedule
        self.keep, self.dist, self.writer_dist = keep, dist, with_own_process_group(dist) if background else dist
        self.write_plan: WritePlan | None = None
        self.copies = HostCopies()
        self.async_save: AsyncSave | None = None
        self.step_to_keep: Callable[[], int | None] = lambda: None  # of the best state so far
        self.result_state: Collection[str] = ()  # names of `stateful` that belong to the weights, such as their average

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, RunStopped):
            self.wait()
        elif isinstance(error, UserError):
            with suppress(UserError):  # the first error is raised
                self.wait()

    def save(self, step: int) -> None:
        """Write the state after `step` steps, after waiting for a previous save. Old states are deleted when this one
        is complete."""
        self.dist.heartbeat.record(step, "save")
        self.wait()
        job = self.snapshot(step)
        if self.background and self.has_memory(job):
            self.async_save = AsyncSave(partial(self.write, self.copy_to_host(job)))
            self.async_save.start()
        else:
            self.write(job)

    def poll(self) -> None:
        """Finish a background save if all ranks have written their shards; raise its error. Call between two steps."""
        if self.async_save is None:
            return
        self.async_save.check_alive()
        if all(self.dist.all_gather_objects(not self.async_save.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Block until the background save is complete."""
        save, self.async_save = self.async_save, None
        if save is not None:
            save.finish()

    def snapshot(self, step: int) -> PendingSave:
        """Collect the tensors and plan which rank writes what. Tensors are references, not copies."""
        reshard(self.model)
        optimizer_tensors = self.optimizer_tensors() if self.optimizer.state else {}
        shards = self.trained_tensors() | optimizer_tensors | self.stateful_tensors()
        self.write_plan = dcp_planner.plan_writes(shards, self.dist, self.write_plan)
        progress = {"step": step, "schedule": self.schedule.state_dict(), "groups": self.param_groups()}
        progress["stateful"] = {name: plain_values(item.state_dict()) for name, item in self.stateful.items()}
        files = {PROGRESS: progress} if self.dist.is_main_process else {}
        files |= {rng_file(self.dist): rng_states(self.dist.device)}
        contents = {name: serialize(value) for name, value in files.items()}
        return PendingSave(self.folder / f"{step:08d}", shards, self.write_plan, contents, self.step_to_keep())

    def has_memory(self, job: PendingSave) -> bool:
        """Whether host memory can hold copies of the shards that the ranks of this node write."""
        free, ranks_per_node = env_info.available_memory(), max(1, self.dist.world_size // self.dist.num_nodes)
        required = self.copies.missing_bytes(owned_tensors(job)) * ranks_per_node
        (is_short,) = self.dist.max_over_ranks(float(free is not None and required > MAX_HOST_MEMORY_FRACTION * free))
        if is_short:
            self.background = False
            self.dist.log(
                "warning: async_save: not enough host memory for a copy of the state; training pauses while it is saved"
            )
        return not is_short

    def copy_to_host(self, job: PendingSave) -> PendingSave:
        """Replace the tensors that this rank writes by copies in host memory, which is reused by later saves."""
        copies = {name: self.copies.copy(name, tensor) for name, tensor in owned_tensors(job).items()}
        return replace(job, shards={name: LocalShard(t, job.shards[name].location) for name, t in copies.items()})

    def write(self, job: PendingSave) -> None:
        """Write all shards, then mark the directory as complete. Leaves nothing if a rank fails."""
        partial_dir = atomic.sibling_path(job.folder, atomic.PARTIAL)
        try:
            self.writer_dist.run_on_main(partial(create_state_dir, job))
            result = self.writer_dist.run_on_all(partial(write_local_shards, partial_dir, job))
            results = self.writer_dist.all_gather_objects(result)
            self.writer_dist.run_on_main(partial(self.commit, partial_dir, job, results))
        except UserError:
            if self.dist.is_main_process:
                with suppress(OSError):
                    atomic.remove_partial(job.folder)
            raise

    def commit(self, partial_dir: Path, job: PendingSave, results: list[dcp_planner.ShardWriteResult]) -> None:
        with atomic.wrap_write_errors(job.folder):
            checksums = dcp_planner.write_metadata(partial_dir, job.plan.metadata, results)
            atomic.commit_dir(partial_dir, job.folder, checksums)
            for old in complete_states(self.folder)[: -self.keep]:
                if int(old.name) != job.step_to_keep:
                    atomic.remove_dir(old)

    def restore(self) -> int:
        """Load the newest complete state in place and return its step; 0 if no state exists."""
        self.wait()  # for a background save, when a run rolls back
        states = self.dist.run_on_main(self.clean_up)
        if not states:
            return 0
        self.dist.run_on_all(partial(self.check_files, states))  # all files are verified before one is opened
        state = self.dist.run_on_all(partial(self.open_newest, states))
        with newest_state(states):
            return self.load(state)

    def clean_up(self) -> list[Path]:
        """Remove partial directories of an interrupted save, and return the complete states."""
        for path in (*self.folder.glob(f"*{atomic.PREVIOUS}"), *self.folder.glob(f"*{atomic.PARTIAL}")):
            atomic.remove_partial(path.with_suffix(""))
        return complete_states(self.folder)

    def check_files(self, states: list[Path]) -> None:
        """Raise UserError if a file of the newest state is corrupt. Ranks share the files."""
        with newest_state(states) as folder:
            corrupt = atomic.find_corrupt_file(folder, slice(self.dist.rank, None, self.dist.world_size))
            if corrupt is not None:
                raise CorruptStateError(corrupt)

    def open_newest(self, states: list[Path]) -> LoadedState:
        """Open the newest state, whose files were verified."""
        with newest_state(states) as folder:
            rng_path = folder / rng_file(self.dist)
            rng = read_plain(rng_path) if rng_path.is_file() else {}  # none if there are more ranks now
            return LoadedState(folder, dcp_planner.read_metadata(folder), read_progress(folder), rng)

    def load(self, state: LoadedState) -> int:
        """Load a state in place and return its step. Everything is validated before any tensor changes."""
        reshard(self.model)
        names = state.progress["stateful"].keys()
        if difference := ", ".join(sorted(names ^ self.stateful.keys())):
            reason = f"saved by another recipe or version of tunekit (differs in: {difference})"
            raise UserError(f"{state.folder}: {reason}. Pass --overwrite to restart.")
        with wrap_read_errors(state.folder):
            shards = self.matching_tensors(state.metadata.state_dict_metadata, state.progress["groups"], state.folder)
        dcp_planner.load_shards(state.folder, shards, state.metadata)
        with wrap_read_errors(state.folder / PROGRESS):
            self.load_progress(state.progress, shards)
        with wrap_read_errors(state.folder / rng_file(self.dist)):
            restore_rng_states(state.rng_states, self.dist.device)
        return state.progress["step"]

    def load_weights(self, step: int) -> None:
        """Load the trained weights of the state after `step` steps in place, `result_state`, and nothing else."""
        self.wait()
        folder = self.folder / f"{step:08d}"
        self.dist.run_on_all(partial(self.check_weights, folder))
        reshard(self.model)
        stateful = {name: self.stateful[name] for name in self.result_state}
        shards = self.stateful_tensors(stateful)
        dcp_planner.load_shards(folder, self.trained_tensors() | shards, dcp_planner.read_metadata(folder))
        if stateful:
            load_stateful(stateful, read_progress(folder), shards)

    def check_weights(self, folder: Path) -> None:
        """Raise UserError if this state is missing or has a corrupt file. Ranks share the files."""
        subset = slice(self.dist.rank, None, self.dist.world_size)
        corrupt = atomic.find_corrupt_file(folder, subset) if atomic.is_complete(folder) else folder
        if corrupt is not None:
            remedy = f"Restore {folder}, which has the best weights, or set load_best_model_at_end=false."
            raise UserError(f"{corrupt}: missing, corrupt or truncated. {remedy}")

    def load_progress(self, progress: Mapping[str, Any], shards: LocalShards) -> None:
        """Restore everything but tensors, which were loaded into `shards`."""
        for group, values in zip(self.optimizer.param_groups, progress["groups"], strict=True):
            restore_group(group, values)
        self.schedule.load_state_dict(progress["schedule"])
        load_stateful(self.stateful, progress, shards)

    def trained_tensors(self) -> dict[str, LocalShard]:
        """Trained parameters and all buffers by name, as references that loading fills in place.

        Buffers are saved because some are computed, such as the PiSSA factors, with results that depend on the device.
        """
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        tensors = ((strip_wrappers(name), tensor) for name, tensor in (*trained, *self.model.named_buffers()))
        return {f"model.{name}": LocalShard(to_local(t.detach()), shard_slice(t)) for name, t in tensors}

    def optimizer_tensors(self) -> dict[str, LocalShard]:
        """Optimizer state tensors by name, as references. Allocates them before the first step."""
        if not self.optimizer.state:
            get_optimizer_state_dict(self.model, self.optimizer)
        names: dict[Tensor, str] = {p: strip_wrappers(name) for name, p in self.model.named_parameters()}
        return {
            f"optimizer.{names[parameter]}.{key}": LocalShard(to_local(value), optimizer_state_slice(parameter, value))
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }

    def stateful_tensors(self, stateful: Mapping[str, Stateful] | None = None) -> dict[str, LocalShard]:
        """Tensors in the states of `stateful`, by default of all, as references that loading fills in place."""
        return {
            f"{name}.{key}": LocalShard(to_local(value), shard_slice(value))
            for name, item in (self.stateful if stateful is None else stateful).items()
            for key, value in tensor_values(item.state_dict()).items()
        }

    def param_groups(self) -> list[dict]:
        """Param groups of the optimizer: parameter names and the values that an LR scheduler may change."""
        names = {parameter: strip_wrappers(name) for name, parameter in self.model.named_parameters()}
        return [
            {name: value for name, value in group.items() if isinstance(value, float | tuple | Tensor)}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def matching_tensors(self, saved: dict, groups: list[dict], folder: Path) -> dict[str, LocalShard]:
        """Return the tensors to fill. Raises UserError if the state is from a different model or optimizer."""
        # Parameters without a gradient before the state was saved have no optimizer state.
        saved_parents = {parent_name(name) for name in saved}
        optimizer_shards = self.optimizer_tensors().items()
        optimizer_shards = {name: shard for name, shard in optimizer_shards if parent_name(name) in saved_parents}
        for name, parameter in self.model.named_parameters():
            if f"optimizer.{strip_wrappers(name)}" not in saved_parents:
                self.optimizer.state.pop(parameter, None)
        shards = self.trained_tensors() | optimizer_shards | self.stateful_tensors()
        expected = {name: shard.location.shape for name, shard in shards.items()}
        actual = {n: tuple(meta.size) if isinstance(meta, TensorStorageMetadata) else None for n, meta in saved.items()}
        differing = sorted(n for n in expected.keys() | actual.keys() if expected.get(n) != actual.get(n))
        if differing or [group["params"] for group in groups] != [group["params"] for group in self.param_groups()]:
            shapes = [f"{name}: {actual.get(name)} saved, {expected.get(name)} expected" for name in differing]
            difference = shapes[0] if shapes else "param groups differ"
            reason = f"state of a different model or optimizer ({difference})"
            raise UserError(f"{folder}: {reason}. Pass --overwrite to restart.")
        return shards


def load_stateful(stateful: Mapping[str, Stateful], progress: Mapping[str, Any], shards: LocalShards) -> None:
    """Pass the saved states to their objects. Tensors were loaded into `shards`."""
    for name, item in stateful.items():
        tensors = {key: shards[f"{name}.{key}"].tensor for key in tensor_values(item.state_dict())}
        item.load_state_dict(progress["stateful"][name] | tensors)


def tensor_values(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}


def plain_values(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def optimizer_state_slice(weight: Tensor, value: Tensor) -> ShardSlice:
    """Location of an optimizer state tensor: elementwise like its weight, one value per block of a row, or a scalar."""
    assert isinstance(value, Tensor), "optimizer state must be tensors"
    if not value.ndim:
        return ShardSlice((), ())
    location = shard_slice(weight)
    if to_local(value).shape == to_local(weight).shape:
        return location
    assert value.ndim == weight.ndim + 1, "state must be elementwise or per block"
    shape = len(value), *location.shape[:-1], math.ceil(location.shape[-1] / BLOCK)
    return ShardSlice(shape, (0, *location.offset[:-1], location.offset[-1] // BLOCK))


def owned_tensors(job: PendingSave) -> dict[str, Tensor]:
    """Tensors that this rank writes, by name."""
    return {item.index.fqn: job.shards[item.index.fqn].tensor for item in job.plan.local.items}


def create_state_dir(job: PendingSave) -> None:
    """Check the free disk space and create the partial directory of a state."""
    atomic.check_free_space(job.folder, job.plan.num_bytes + 2**20)
    with atomic.wrap_write_errors(job.folder):
        atomic.remove_partial(job.folder)
        atomic.sibling_path(job.folder, atomic.PARTIAL).mkdir(parents=True)


def write_local_shards(partial_dir: Path, job: PendingSave) -> dcp_planner.ShardWriteResult:
    """Write the shards of this rank."""
    with atomic.wrap_write_errors(job.folder):
        return dcp_planner.write_shards(partial_dir, job.shards, job.plan.local, job.extra_files)


@contextmanager
def newest_state(states: list[Path]) -> Iterator[Path]:
    """Yield the newest state. A corrupt file becomes a UserError that says how to resume from the previous state."""
    try:
        yield states[-1]
    except CorruptStateError as error:
        previous = f"step {int(states[-2].name)}" if len(states) > 1 else "the start"
        raise UserError(f"{error}. Delete the directory {states[-1]} to resume from {previous}.") from error


def complete_states(folder: Path) -> list[Path]:
    """Complete states in a directory, oldest first."""
    return sorted(state for state in folder.glob("[0-9]" * 8) if atomic.is_complete(state))


def strip_wrappers(name: str) -> str:
    """Parameter name without the wrappers of torch.compile and activation checkpointing, which may change on resume."""
    return ".".join(component for component in name.split(".") if component not in WRAPPERS)


def parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def serialize(values: dict) -> bytes:
    """Plain values as the bytes of a torch.save file."""
    stream = BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


def read_plain(file: Path) -> dict:
    with wrap_read_errors(file):
        return {**torch.load(file, map_location="cpu", weights_only=True)}


def read_progress(folder: Path) -> dict:
    """Read the step, the LR scheduler, the param groups and the stateful objects of a state."""
    progress = read_plain(folder / PROGRESS)
    with wrap_read_errors(folder / PROGRESS):
        if progress["step"] != int(folder.name):
            raise ValueError(f"unexpected step {progress['step']}")
        return progress | {"stateful": {**progress.get("stateful", {})}}


def restore_group(group: dict, values: dict) -> None:
    for name, value in values.items():
        if name == "params":
            continue
        if isinstance(group[name], Tensor):
            group[name].copy_(value)
        elif isinstance(group[name], tuple):
            group[name] = tuple(to_float(saved) for saved, _ in zip(value, group[name], strict=True))
        else:
            group[name] = to_float(value)


def to_float(value: Any) -> float:
    if not abs(number := float(value)) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{number} is not a finite fp32 number")
    return number


def rng_file(dist: DistributedContext) -> str:
    return f"random-{dist.rank}.pt"


def rng_states(device: torch.device) -> dict:
    """States of all random number generators that this process has used."""
    states: dict = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        states["device"] = devices.get_rng_state(device)
    if "numpy.random" in sys.modules:  # imported on first use
        kind, key, *position = cast("tuple", numpy.random.get_state())  # a dict only with legacy=False
        states["numpy"] = (kind, key.tolist(), *position)
    return states


def restore_rng_states(states: dict, device: torch.device) -> None:
    setters = {
        "torch": torch.set_rng_state,
        "python": random.setstate,
        "device": lambda value: devices.set_rng_state(device, value),
        "numpy": lambda value: numpy.random.set_state(value),
    }
    for name, value in states.items():
        setters[name](value)
