"""Launch options, worker specs and results. Does not import torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import UserError

MAX_PROCESSES_PER_CORE = 4  # on the CPU; enough to try a parallel layout


@dataclass(frozen=True)
class LaunchConfig:
    """Options of `tune run` for processes and nodes."""

    gpus: int | None = None
    nodes: int = 1
    rendezvous: str | None = None
    node_rank: int | None = None
    restarts: int = 0
    job_id: str | None = None

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise UserError(f"--max-restarts {self.restarts}: must be >= 0")
        if self.nodes > 1 and self.rendezvous is None:
            raise UserError(f"--nnodes {self.nodes}: missing address. Set --rdzv-endpoint HOST:PORT to one node")
        if self.nodes == 1 and (self.rendezvous, self.node_rank, self.job_id) != (None, None, None):
            raise UserError("--rdzv-endpoint, --rdzv-id and --node-rank: require more than one node. Set --nnodes")
        if self.node_rank is not None and self.node_rank >= self.nodes:
            raise UserError(f"--node-rank {self.node_rank}: with --nnodes {self.nodes} the last is {self.nodes - 1}")
        self.parse_endpoint()

    @property
    def needs_launcher(self) -> bool:
        """Whether a launcher starts the workers. A single worker needs one if it can be restarted."""
        return self.nproc_per_node > 1 or self.nodes > 1 or self.restarts > 0

    @property
    def nproc_per_node(self) -> int:
        """Processes on this node."""
        return self.gpus or 1

    def parse_endpoint(self) -> tuple[str, int]:
        """Host and port of the rendezvous endpoint."""
        if self.rendezvous is None:
            return "127.0.0.1", 0
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--rdzv-endpoint {self.rendezvous}: must be HOST:PORT, such as node1:29400")
        return host.strip("[]"), int(port)

    def check_nproc_per_node(self, device: str, num_devices: int) -> None:
        """Raise UserError if this node cannot run that many processes. `device`: type of torch.device."""
        if self.gpus is None:
            return
        if device != "cpu" and self.gpus > num_devices:
            raise UserError(f"--nproc-per-node {self.gpus}: only {num_devices} devices exist. Omit the flag to use one")
        cores = len(os.sched_getaffinity(0))
        if device == "cpu" and self.gpus > cores * MAX_PROCESSES_PER_CORE:
            raise UserError(
                f"--nproc-per-node {self.gpus}: must be <= {cores * MAX_PROCESSES_PER_CORE} on {cores} CPU cores"
            )


@dataclass(frozen=True)
class WorkerSpec:
    """A checked run that is started as worker processes."""

    args: tuple[str, ...]  # of `tune`, for each worker
    launch_config: LaunchConfig
    output_dir: Path | None  # None: the run writes no files
    timeout: float  # seconds
    digest: str = ""  # of the config, equal on all nodes
    overwrite: bool = False


@dataclass(frozen=True)
class RendezvousInfo:
    """Ranks of this node and the address of rank 0, the result of a rendezvous."""

    base_rank: int  # first rank of this node
    world_size: int  # processes of all nodes
    master_addr: str  # of rank 0
    master_port: int
    listener_fd: int | None = None  # listening socket, if rank 0 is on this node
    node_names: tuple[str, ...] = ()  # of all nodes
    interface: str | None = None  # network interface for gloo
    is_first_start: bool = True  # no node has started workers before


@dataclass(frozen=True)
class RunResult:
    """Result of one start of all workers.

    Kinds: succeeded; stopped (saved and stopped on request); interrupted (ended immediately on request); user_error;
    failed; hung (no rank made progress).
    """

    kind: str
    code: int = 0
    text: str = ""

    @property
    def is_expected(self) -> bool:
        return self.kind in ("succeeded", "stopped")
