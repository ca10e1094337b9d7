"""What a process does that was started as one rank of several, before it imports torch."""

import ctypes
import faulthandler
import os
import signal

# Of our own beside what torchrun sets. Whoever is started by a rank does not take itself for one: see `begin`.
PARENT, BEATS, STACKS, LOG, LISTENS = (
    f"TUNEKIT_RANK_{name}" for name in ("PARENT", "BEATS", "STACKS", "LOG", "LISTENS")
)
REPORT = "TUNEKIT_REPORT"  # the file into which a process tells what it has found out for the one that starts ranks
STACKS_SIGNAL = signal.SIGRTMIN + 2  # nobody else sends it: schedulers take SIGUSR1 and SIGUSR2
DEATH = 1  # PR_SET_PDEATHSIG


def is_worker() -> bool:
    """Whether this process is a rank, of ours or of torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def has_launcher_env() -> bool:
    """Whether somebody has started all processes of this machine. (Kubeflow numbers but the machines, by RANK.)"""
    return is_worker() and "LOCAL_RANK" in os.environ


def rendezvous_id() -> str:
    """Where the processes of this run meet, the same for all of them; empty for one alone."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if is_worker() else ""


def is_tune_worker() -> bool:
    """Whether `tune run` has started it."""
    return PARENT in os.environ


def init_worker() -> None:
    """Die with the parent; tell where you stand when asked; let signals end what has nothing to save yet."""
    die_with_parent(int(os.environ[PARENT]))
    faulthandler.register(STACKS_SIGNAL, file=int(os.environ[STACKS]), all_threads=True)
    # Python would raise KeyboardInterrupt in its own code alone, and not while it waits for other ranks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def die_with_parent(parent: int) -> None:
    """From now on this process dies with the one that has started it."""
    ctypes.CDLL(None, use_errno=True).prctl(DEATH, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
