"""Last collectives of each rank, from the flight recorder of torch. Does not import torch.

In each rank started by `tune run`, a thread waits for requests to write the flight recorder to the run directory. It
can answer while the main thread is blocked in a collective. Files are pickles, read by an unpickler that creates plain
values only; `torchfrtrace` reads them as well.
"""

import os
import pickle
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

from tunekit.distributed import worker_env
from tunekit.distributed.heartbeat import StackFrame

CHANNEL = "TUNEKIT_RANK_RECORDER"  # file descriptor of the socket for requests to a rank
SIZE = "2000"  # collectives that the recorder keeps
# Environment variables of torch, with their former names.
BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
PREFIX = "nccl-trace-"
READY, WRITE, WRITTEN = b"r", b"w", b"d"
BACKENDS = "nccl", "gloo"
QUOTED = 2  # groups of a rank whose last collectives a report quotes


class PlainUnpickler(pickle.Unpickler):
    """Creates numbers, strings, lists, tuples and dicts, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


@dataclass(frozen=True)
class Collective:
    """One entry of a flight recorder."""

    group: str  # name, the same on all ranks
    description: str  # of the group
    number: int  # of the collectives of its group
    name: str
    sizes: tuple[tuple[int, ...], ...]
    state: str
    created: int  # ns
    caller: str

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, size)) or "scalar" for size in self.sizes)
        caller = f", from {self.caller}" if self.caller else ""
        return f"{self.name} #{self.number} of {self.description} ({shapes}), {self.state}{caller}"


def recorder_variables(prefix: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that make torch record collectives, and NCCL write them to `prefix` and the rank on its own
    timeout. Variables set by the user are kept."""
    values = {BUFFER: SIZE, ON_TIMEOUT: "1", FILE: str(prefix)}
    return {names[0]: value for names, value in values.items() if not any(name in environment for name in names)}


def record_into(folder: Path) -> None:
    """Set these variables in a rank started by another launcher; `tune run` sets them for its workers."""
    if "RANK" in os.environ and worker_env.PARENT not in os.environ:
        with suppress(OSError):  # a directory that cannot be written is reported when the run claims it
            folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(recorder_variables(folder / PREFIX, os.environ))


def file_of(folder: Path, backend: str, rank: int) -> Path:
    """File with the collectives of a rank; NCCL appends the rank to a prefix."""
    return folder / f"{backend}-trace-{rank}"


# In a rank


def serve_dumps(dump: Callable[[], Mapping[str, bytes]], rank: int) -> None:
    """Start a thread that writes what `dump` returns for each backend whenever the launcher requests it."""
    value = os.environ.pop(CHANNEL, None)  # removed: child processes must not start a thread
    if value is None:
        return
    number, _, folder = value.partition(":")
    Thread(
        target=answer_request, args=(socket.socket(fileno=int(number)), dump, Path(folder), rank), daemon=True
    ).start()


def answer_request(sock: socket.socket, dump: Callable[[], Mapping[str, bytes]], folder: Path, rank: int) -> None:
    """Body of the thread. Ends when the launcher closes the socket."""
    with suppress(OSError):
        sock.sendall(READY)
        while sock.recv(1) == WRITE:
            with suppress(OSError):  # disk full: the report omits this rank
                for backend, data in dump().items():
                    file_of(folder, backend, rank).write_bytes(data)
            sock.sendall(WRITTEN)


# In the launcher


class Recorders:
    """Sockets to the ranks of this node. A rank without a process group never reports that it is ready."""

    def __init__(self, folder: Path, base: int, count: int) -> None:
        """Open sockets for `count` ranks from `base` on. Files of an earlier start are removed."""
        self.folder = folder
        for rank in range(base, base + count):
            for backend in BACKENDS:
                file_of(folder, backend, rank).unlink(missing_ok=True)
        self.pairs = [socket.socketpair() for _ in range(count)]

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors that ranks inherit."""
        return tuple(remote.fileno() for _, remote in self.pairs)

    def environment(self, slot: int) -> dict[str, str]:
        return {CHANNEL: f"{self.pairs[slot][1].fileno()}:{self.folder}"}

    def request(self, seconds: float) -> None:
        """Request files from all ranks that can answer, and wait for at most `seconds`."""
        sockets = [local for local, _ in self.pairs if is_ready(local)]
        for sock in sockets:
            sock.sendall(WRITE)
        end = time.monotonic() + seconds
        while sockets and (left := end - time.monotonic()) > 0:
            done, _, _ = select.select(sockets, [], [], left)
            sockets = [sock for sock in sockets if sock not in done]

    def close(self) -> None:
        for pair in self.pairs:
            for sock in pair:
                sock.close()


def is_ready(sock: socket.socket) -> bool:
    """Whether the rank at the other end waits for requests."""
    readable, _, _ = select.select([sock], [], [], 0)
    return bool(readable) and sock.recv(1) == READY


# Reading


def parse_dump(file: Path) -> list[Collective]:
    """Collectives of a file, oldest first; empty if the file does not exist or is invalid."""
    try:
        content = PlainUnpickler(BytesIO(file.read_bytes())).load()
        return [describe_collective(entry) for entry in content["entries"]]
    except (OSError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError):
        return []


def describe_collective(entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    return Collective(
        group=str(name),
        description=str(description or name),
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]),
        sizes=tuple(tuple(map(int, size)) for size in entry["input_sizes"]),
        state=str(entry["state"]),
        created=int(entry["time_created_ns"]),
        caller=find_caller(entry.get("frames", [])),
    )


def find_caller(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame outside of torch."""
    for frame in frames:
        if not (location := StackFrame(frame["filename"], frame["line"], frame["name"])).is_torch:
            return str(location)
    return ""


def quote_dumps(folder: Path, ranks: Sequence[int]) -> list[str]:
    """Lines for a report: the last collectives of each rank, and groups in which some ranks have issued fewer."""
    last = {rank: last_of_groups(folder, rank) for rank in ranks}
    lines = []
    for rank, collectives in last.items():
        newest = sorted(collectives.values(), key=lambda item: item.created, reverse=True)[:QUOTED]
        lines += [f"  rank {rank}: {'; '.join(map(str, newest))}"] if newest else []
    groups = dict.fromkeys(group for collectives in last.values() for group in collectives)
    lines += [line for group in groups if (line := describe_lag(group, last))]
    return ["last collectives:", *lines] if lines else []


def describe_lag(group: str, last: Mapping[int, Mapping[str, Collective]]) -> str:
    """Report of ranks that have issued fewer collectives of a group than others; empty if none."""
    items = {rank: collectives[group] for rank, collectives in last.items() if group in collectives}
    newest = max(item.number for item in items.values())
    lagging = [f"rank {rank} is at #{item.number}" for rank, item in items.items() if item.number < newest]
    if not lagging:
        return ""
    return f"  {next(iter(items.values())).description}: {', '.join(lagging)}, the others at #{newest}"


def last_of_groups(folder: Path, rank: int) -> dict[str, Collective]:
    """The last collective of each process group of a rank."""
    return {item.group: item for backend in BACKENDS for item in parse_dump(file_of(folder, backend, rank))}
