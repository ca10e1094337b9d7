"""How many processes a person asks for, on how many machines. Nothing here imports torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import UserError

PER_CORE = 4  # processes that a core may have to carry: enough to try how a run divides


@dataclass(frozen=True)
class LaunchConfig:
    """The options of `tune run` that say what runs where."""

    gpus: int | None = None
    nodes: int = 1
    rendezvous: str | None = None
    node_rank: int | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise UserError(f"--max-restarts {self.restarts}: give a number from 0 up")
        if self.nodes > 1 and self.rendezvous is None:
            raise UserError(f"--nnodes {self.nodes}: where do they meet? --rdzv-endpoint HOST:PORT names one of them")
        if self.nodes == 1 and (self.rendezvous, self.node_rank) != (None, None):
            raise UserError(
                "--rdzv-endpoint and --node-rank are for several machines: --nnodes says how many there are"
            )
        if self.node_rank is not None and self.node_rank >= self.nodes:
            raise UserError(f"--node-rank {self.node_rank}: with --nnodes {self.nodes} the last is {self.nodes - 1}")
        self.address()

    @property
    def several(self) -> bool:
        """Whether processes are to be started. One that may be restarted is started by another one, too."""
        return self.count > 1 or self.nodes > 1 or self.restarts > 0

    @property
    def count(self) -> int:
        """Processes on this machine."""
        return self.gpus or 1

    @property
    def words(self) -> tuple[str, ...]:
        """As they stand on the command line."""
        found = {"--nproc-per-node": self.count, "--nnodes": self.nodes, "--rdzv-endpoint": self.rendezvous}
        found |= {"--node-rank": self.node_rank, "--max-restarts": self.restarts}
        return tuple(word for name, value in found.items() if value is not None for word in (name, str(value)))

    def address(self) -> tuple[str, int]:
        """Where the machines meet."""
        if self.rendezvous is None:
            return "127.0.0.1", 0
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--rdzv-endpoint {self.rendezvous}: write HOST:PORT, such as node1:29400")
        return host.strip("[]"), int(port)

    def check(self, device: str, found: int) -> None:
        """Refuse more processes than there is room for. `device`: the type of torch.device that the run will have."""
        if self.gpus is None:
            return
        if device != "cpu" and self.gpus > found:
            raise UserError(
                f"--nproc-per-node {self.gpus}: this machine has {found}; leave --nproc-per-node out to use one"
            )
        cores = len(os.sched_getaffinity(0))
        if device == "cpu" and self.gpus > cores * PER_CORE:
            raise UserError(
                f"--nproc-per-node {self.gpus}: without a GPU, {cores} cores carry at most {cores * PER_CORE} processes"
            )


@dataclass(frozen=True)
class WorkerSpec:
    """A run that several processes do, checked and ready to start."""

    words: tuple[str, ...]  # of `tune`, for each of the processes
    asked: LaunchConfig
    folder: Path | None  # of the run; none: it has no folder
    timeout: float  # seconds
    digest: str = ""  # of the config: all machines have the same
    fresh: bool = False


@dataclass(frozen=True)
class Place:
    """Where the processes of this machine stand among all."""

    base: int  # rank of the first
    size: int  # of all machines together
    address: str  # where rank 0 listens
    port: int
    listener: int | None = None  # file of the open port, where rank 0 is here
    names: tuple[str, ...] = ()  # of the machines
    interface: str | None = None  # of the network between them
    first: bool = True  # none of them has started before


@dataclass(frozen=True)
class End:
    """How a start of all processes ended.

    done; left: all have saved, as a person asked; asked: a person ended it at once; mistake; failed;
    hung: no rank went on.
    """

    kind: str
    code: int = 0
    text: str = ""
