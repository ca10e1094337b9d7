"""Training states that are written in the background."""

from collections.abc import Callable
from copy import copy
from threading import Thread
from typing import cast

import torch.distributed

from tunekit.distributed.context import HOST_TIMEOUT, DistributedContext
from tunekit.errors import UserError


class AsyncSave(Thread):
    """Thread that writes a state during training. Communicates with other ranks over its own process group."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(daemon=True)  # do not delay the exit of the process
        self.write, self.error, self.is_done = write, None, False

    def run(self) -> None:
        try:
            self.write()
        except UserError as error:
            self.error = error
        self.is_done = True

    def check_alive(self) -> None:
        assert self.is_alive() or self.is_done, "the background save failed; see the traceback above"

    def finish(self) -> None:
        """Wait for the thread and raise its error."""
        self.join()
        self.check_alive()
        if self.error is not None:
            raise self.error


def with_own_process_group(dist: DistributedContext) -> DistributedContext:
    """Copy of the context with its own process group, for collectives of a background thread."""
    clone = copy(dist)
    if dist.host_group is not None:
        clone.host_group = cast(
            "torch.distributed.ProcessGroup", torch.distributed.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        )
    return clone
