"""Where ranks find each other first."""

import os
from datetime import timedelta
from functools import cache

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from tunekit.parallel import member


@cache
def met(timeout: timedelta) -> Store:
    """The store through which all ranks of the environment meet, one for the life of this process.

    What `tune run` starts finds an open port, so nobody else can have taken it in between.
    """
    if not member.ours():
        return next(rendezvous("env://", timeout=timeout))[0]
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listener = os.environ.get(member.LISTENS)
    file = None if listener is None else int(listener)
    return TCPStore(os.environ["MASTER_ADDR"], port, size, rank == 0, timeout, master_listen_fd=file)
