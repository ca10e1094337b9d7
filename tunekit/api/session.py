"""Calls from Python: errors in one line, and a process that is afterwards as it was before."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from tunekit import devices
from tunekit.api.environment import torch_environment
from tunekit.cli.main import CtrlCHandler, describe_error, is_out_of_memory
from tunekit.config.secrets import message_text
from tunekit.errors import UserError, find_user_code
from tunekit.kernels.malloc import return_freed_memory


@contextmanager
def api_call(where: str) -> Iterator[None]:
    """The body of a function of the API. Errors are UserErrors with the text that the command line prints.

    `where` is the call, for messages. Ctrl-C is a KeyboardInterrupt, as everywhere in Python.
    """
    check_single_process(where)
    was_frozen = gc.get_freeze_count() > 0
    with OneLineErrors(), CtrlCHandler(), torch_environment():
        try:
            yield
        finally:
            if not was_frozen:  # imports exclude objects from garbage collection, those of the session too
                gc.unfreeze()


def check_single_process(where: str) -> None:
    """Raise UserError in a process of torchrun or `tune run`."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1":
        problem = f"{where}: runs in one process, but a launcher has started {count}"
        raise UserError(f"{problem}. Use the command line: tune run CONFIG --nproc-per-node {count}")


class OneLineErrors:
    """Context manager that raises UserError where the command line prints one line and ends."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, UserError):
            return
        if (location := find_user_code(error)) is not None:
            raise UserError(message_text(location.message)) from error
        if isinstance(error, OSError) or (
            isinstance(error, MemoryError | RuntimeError | SystemError | ImportError) and is_out_of_memory(error)
        ):
            raise UserError(message_text(describe_error(error))) from error


@contextmanager
def isolated_torch(device: torch.device) -> Iterator[None]:
    """Restore random numbers and the switches of torch at the end."""
    numerics, dtype, num_threads = devices.read_numerics(), torch.get_default_dtype(), torch.get_num_threads()
    with devices.fork_rng(device):
        try:
            yield
        finally:
            devices.set_numerics(numerics)
            torch.set_default_dtype(dtype)
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)


def free_memory(device: torch.device) -> None:
    """Free what a run has left: reference cycles, and memory that allocators keep."""
    gc.collect()
    devices.empty_cache(device)
    return_freed_memory()
