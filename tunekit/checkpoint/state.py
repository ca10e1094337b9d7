"""The resumable state of a run: trained weights, optimizer, schedule, random numbers and the step.

A folder `state/00000010/` holds the tensors by full name, as torch.distributed.checkpoint writes them so that any
layout can read them; `progress.pt` with the step, the schedule and the numbers of the optimizer's groups;
`random-0.pt` with the random number generators of rank 0; and the mark that says that all of it is there.
"""

import pickle
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tunekit.checkpoint import atomic
from tunekit.errors import UserError

METADATA, PROGRESS = ".metadata", "progress.pt"
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
# What torch writes into the metadata. Everything else that a pickle can name is code.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": DTYPES | {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}


class State:
    """The newest `keep` states of a run under `folder`, one folder a step. Saving and restoring change no number."""

    def __init__(self, folder: Path, model: nn.Module, optimizer, schedule, keep: int, run, *extra) -> None:
        """`extra`: what else has a state_dict() of plain values."""
        assert keep > 0
        self.extra = extra
        self.folder, self.model, self.optimizer, self.schedule = folder, model, optimizer, schedule
        self.keep, self.run = keep, run

    def save(self, step: int) -> None:
        """Write the state after `step` steps. States that are not kept go only once this one is whole."""
        tensors = self.weights() | (self.moments() if self.optimizer.state else {})
        progress = {"step": step, "schedule": self.schedule.state_dict(), "groups": self.groups()}
        progress["extra"] = [one.state_dict() for one in self.extra]
        folder = self.folder / f"{step:08d}"
        # Every tensor has a zip header of its own, and a line in the metadata.
        atomic.need(folder, sum(tensor.nbytes + 4096 for tensor in tensors.values()) + 2**20)
        with atomic.whole(folder) as partial:
            write_tensors(partial, tensors)
            write_plain(partial / PROGRESS, progress)
            write_plain(partial / generators_file(self.run), generators(self.run.device))
        for old in saved(self.folder)[: -self.keep]:
            atomic.remove(old)

    def restore(self) -> int:
        """Load the newest whole state in place and return how many steps it has behind it; 0 if there is none."""
        for left in (*self.folder.glob(f"*{atomic.PREVIOUS}"), *self.folder.glob(f"*{atomic.PARTIAL}")):
            atomic.recover(left.with_suffix(""))
        states = saved(self.folder)
        if not states:
            return 0
        try:
            return self.load(states[-1])
        except Unreadable as error:
            back = f"step {int(states[-2].name)}" if len(states) > 1 else "the start"
            raise UserError(f"{error}; delete the folder {states[-1]} to go on from {back}") from error

    def load(self, folder: Path) -> int:
        """Everything is checked before the first number of the model changes."""
        damaged = atomic.damaged(folder)
        if damaged is not None:
            raise Unreadable(damaged)
        progress = read_plain(folder / PROGRESS)
        drawn = folder / generators_file(self.run)
        random_states = read_plain(drawn) if drawn.is_file() else {}  # a rank that is new in this layout has none
        reader = Reader(folder)
        tensors = self.fitting(reader.read_metadata().state_dict_metadata, progress["groups"], folder)
        with alone():
            load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        for group, values in zip(self.optimizer.param_groups, progress["groups"], strict=True):
            restore_group(group, values)
        self.schedule.load_state_dict(progress["schedule"])
        for one, values in zip(self.extra, progress["extra"], strict=True):
            one.load_state_dict(values)
        restore_generators(random_states, self.run.device)
        return progress["step"]

    def weights(self) -> dict[str, Tensor]:
        """What is trained, and what was fixed when training began, by name. References: loading fills them in place.

        A buffer such as the start of PiSSA is computed, and comes out otherwise with other threads or another device.
        """
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return {f"model.{bare(name)}": tensor.detach() for name, tensor in (*trained, *self.model.named_buffers())}

    def moments(self) -> dict[str, Tensor]:
        """What the optimizer keeps for each weight, by name. References too; allocated if it took no step yet."""
        kept = cast("dict[str, dict[str, Tensor]]", get_optimizer_state_dict(self.model, self.optimizer)["state"])
        found = {f"optimizer.{name}.{key}": value for name, one in kept.items() for key, value in one.items()}
        assert all(isinstance(value, Tensor) for value in found.values()), "optimizers keep tensors"
        return found

    def groups(self) -> list[dict]:
        """The optimizer's groups: the names of their parameters, and the numbers that a schedule may move."""
        names = {parameter: bare(name) for name, parameter in self.model.named_parameters()}
        return [
            {name: value for name, value in group.items() if isinstance(value, float | tuple | Tensor)}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def fitting(self, disk: dict, groups: list[dict], folder: Path) -> dict[str, Tensor]:
        """The tensors to fill, once it is sure that the state is one of this model and this optimizer."""
        # What had no gradient before the state was saved has nothing kept for it.
        kept = {owner(name) for name in disk}
        moments = {name: tensor for name, tensor in self.moments().items() if owner(name) in kept}
        for name, parameter in self.model.named_parameters():
            if f"optimizer.{bare(name)}" not in kept:
                self.optimizer.state.pop(parameter, None)
        tensors = self.weights() | moments
        here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        there = {n: tuple(m.size) if isinstance(m, TensorStorageMetadata) else None for n, m in disk.items()}
        odd = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
        if odd or [g["params"] for g in groups] != [g["params"] for g in self.groups()]:
            what = f"{odd[0]}: {there.get(odd[0])} there, {here.get(odd[0])} here" if odd else "other parameter groups"
            raise UserError(f"{folder} is the state of another model or optimizer ({what}): start over with --fresh")
        return tensors


class Unreadable(Exception):
    """A file of a state that was cut off or changed, or that holds what no state holds."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"cannot read {file}: it is damaged or cut off")


class Reader(FileSystemReader):
    """Reads the metadata of a state without running what a pickle may hold."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        try:
            metadata = Names(BytesIO((Path(self.path) / METADATA).read_bytes())).load()
        except pickle.UnpicklingError as error:
            raise Unreadable(Path(self.path) / METADATA) from error
        return metadata


class Names(pickle.Unpickler):
    """Knows the names that torch writes into the metadata, and no other."""

    def find_class(self, module: str, name: str) -> object:
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong here")
        return super().find_class(module, name)


def saved(folder: Path) -> list[Path]:
    """The whole states in a folder, oldest first."""
    return sorted(state for state in folder.glob("[0-9]" * 8) if atomic.is_whole(state))


def bare(name: str) -> str:
    """The name of a parameter without the wrappers of compilation and recompute: a state fits with and without them."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    writer = FileSystemWriter(folder, sync_files=False)  # the folder is synced as a whole
    failures = {}
    try:
        with alone():
            save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        failures = error.failures
    for failure, _ in failures.values():  # raised in the handler, it would forget the refusal of the disk behind it
        raise failure


@contextmanager
def alone() -> Iterator[None]:
    """One process needs no process group, and no warning that it has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def write_plain(file: Path, values: dict) -> None:
    with file.open("wb") as stream:  # through Python, so that a full disk keeps its name
        torch.save(values, stream)


def read_plain(file: Path) -> dict:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unreadable(file) from error


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
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    if "numpy.random" in sys.modules:  # numpy loads it when it is first used
        kind, words, *rest = cast("tuple", numpy.random.get_state())  # a dict only if asked for one
        found["numpy"] = (kind, words.tolist(), *rest)
    return found


def restore_generators(found: dict, device: torch.device) -> None:
    setters = {
        "torch": torch.set_rng_state,
        "python": random.setstate,
        "device": lambda value: torch.get_device_module(device).set_rng_state(value, device),
        "numpy": lambda value: numpy.random.set_state(value),
    }
    for name, value in found.items():
        setters[name](value)
