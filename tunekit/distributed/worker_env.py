"""Environment variables and startup of worker processes. Does not import torch."""

import ctypes
import faulthandler
import os
import signal
from collections.abc import Sequence

from tunekit.distributed.signals import STOP_SIGNALS, is_kept_ignored

# Set in addition to the variables of torchrun. PARENT marks workers of `tune run`.
PARENT, HEARTBEAT, STACKS, LOG, LISTENER = (
    f"TUNEKIT_RANK_{name}" for name in ("PARENT", "BEATS", "STACKS", "LOG", "LISTENS")
)
REPORT = "TUNEKIT_REPORT"  # file descriptor for the report of a config check, and the process id of the launcher
STACKS_SIGNAL = signal.SIGRTMIN + 2  # schedulers use SIGUSR1 and SIGUSR2
PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG


def is_worker() -> bool:
    """Whether this process was started by `tune run` or torchrun as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main_worker() -> bool:
    """Whether this process prints messages: it is the first of its run, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def has_launcher_env() -> bool:
    """Whether a launcher has started the processes of this node. (Kubeflow sets RANK per node, without LOCAL_RANK.)"""
    return is_worker() and "LOCAL_RANK" in os.environ


def rendezvous_id() -> str:
    """Address of the rendezvous, the same for all processes of this run; empty for a single process."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if is_worker() else ""


def is_tune_worker() -> bool:
    """Whether `tune run` has started this process as a worker."""
    return PARENT in os.environ


def init_worker() -> None:
    """Exit when the launcher exits, write stacks on STACKS_SIGNAL, and let stop signals end the process."""
    die_with_parent(int(os.environ[PARENT]))
    faulthandler.register(STACKS_SIGNAL, file=int(os.environ[STACKS]), all_threads=True)
    # Python raises KeyboardInterrupt in Python code only, not while a collective waits for other ranks.
    for number in STOP_SIGNALS:
        if not is_kept_ignored(number):
            signal.signal(number, signal.SIG_DFL)


def end_with_launcher(words: Sequence[str]) -> None:
    """Make a process that `tune run` has started, as a rank or for checks, exit when that command exits.

    Other commands may be started by code of the user in a rank.
    """
    parent = os.environ.get(PARENT) or os.environ.get(REPORT, "").rpartition(":")[2]
    if parent and words[:1] == ["run"]:
        die_with_parent(int(parent))


def die_with_parent(parent: int) -> None:
    """Kill this process when its parent exits."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already exited
        os._exit(1)
