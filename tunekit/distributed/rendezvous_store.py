"""Store for the initialization of process groups."""

import os
from datetime import timedelta
from functools import cache

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from tunekit.distributed import worker_env


@cache
def get_store(timeout: timedelta) -> Store:
    """Store shared by all ranks of the environment, one per process.

    Rank 0 of `tune run` inherits a listening socket, so that no other process can take the port.
    """
    if not worker_env.is_tune_worker():
        return next(rendezvous("env://", timeout=timeout))[0]
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listener = os.environ.get(worker_env.LISTENER)
    listener_fd = None if listener is None else int(listener)
    return TCPStore(os.environ["MASTER_ADDR"], port, size, rank == 0, timeout, master_listen_fd=listener_fd)
