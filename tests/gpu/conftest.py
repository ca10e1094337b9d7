"""Fixtures of tests that prove GPU code without a GPU."""

from collections.abc import Iterator

import pytest

from tunekit.distributed.context import ONE_RANK, DistributedContext


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[DistributedContext]:
    """A run on the CPU with a process group of one rank."""
    values = {ONE_RANK: "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in (values | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    with DistributedContext(0, "cpu") as dist:
        yield dist
