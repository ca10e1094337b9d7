"""Multi-node launching, with processes of this machine as nodes."""

import re
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.command_result import CommandResult
from tests.helpers.toy_launcher import ToyLauncher
from tests.helpers.wait import has_exited, wait_until

pytestmark = pytest.mark.multi


@pytest.fixture
def toy(tmp_path: Path) -> ToyLauncher:
    return ToyLauncher.make(tmp_path)


PORT_LOCKS: list[socket.socket] = []  # reserved ports, until this process ends


def reserve_port(port: int) -> bool:
    """Reserve a port among all test processes. False if another process has reserved it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0tunekit-tests-{port}")  # an abstract socket: no file, released when the process ends
    except OSError:
        lock.close()
        return False
    PORT_LOCKS.append(lock)
    return True


def free_address() -> str:
    """Free address outside the ephemeral port range."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in filter(reserve_port, range(low - 1, 1024, -1)):  # a port of another test must not be probed
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", number))
            return f"127.0.0.1:{number}"
    raise AssertionError("no port is free")


def start_two_nodes(toy: ToyLauncher, *args: str, second: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
    """Two nodes with the same command, except for `second`."""
    rendezvous = ("--nnodes", "2", "--rdzv-endpoint", free_address())
    return [toy.start(*rendezvous, *args), toy.start(*rendezvous, *args, *second)]


def wait_for_all(toy: ToyLauncher, nodes: list[subprocess.Popen[str]]) -> list[CommandResult]:
    return [toy.end(node) for node in nodes]


def test_two_nodes_rendezvous_and_split_the_ranks(toy: ToyLauncher) -> None:
    results = wait_for_all(toy, start_two_nodes(toy, "--nproc-per-node", "2", "--rdzv-id", "job1"))
    assert [item.code for item in results] == [0, 0], results
    name = socket.gethostname()
    assert all(f"starting 2 processes of 4 on 2 nodes: {name}, {name}" in item.err for item in results)
    assert sorted((item.rank, item.size, item.local) for item in toy.started_workers()) == [
        (r, 4, r % 2) for r in range(4)
    ]
    assert sorted(item.out for item in results) == ["", "rank 0 started\n"]


def test_node_ranks_and_different_process_counts(toy: ToyLauncher) -> None:
    rendezvous = ("--nnodes", "2", "--rdzv-endpoint", free_address())
    last = toy.start(*rendezvous, "--node-rank", "1")
    first = toy.start(*rendezvous, "--node-rank", "0", "--nproc-per-node", "2")
    results = wait_for_all(toy, [first, last])
    assert [item.code for item in results] == [0, 0], results
    assert "rank 0 started" in results[0].out
    assert sorted((item.rank, item.size, item.local) for item in toy.started_workers()) == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 0),
    ]


def test_different_configs_are_an_error(toy: ToyLauncher) -> None:
    for results in wait_for_all(toy, start_two_nodes(toy, second=("steps=5",))):
        assert results.code == 2 and "differ in config or version" in results.err
    for results in wait_for_all(toy, start_two_nodes(toy, "--rdzv-id", "job1", second=("--rdzv-id", "job2"))):
        assert results.code == 2 and re.search("--rdzv-id: job[12] and job[12]", results.err)


def test_killed_rank_ends_all_nodes(toy: ToyLauncher) -> None:
    results = wait_for_all(toy, start_two_nodes(toy, "fault=SIGKILL"))
    assert [item.code for item in results] == [1, 1]
    assert all("rank 1 was killed by SIGKILL" in item.err for item in results)
    assert all(has_exited(item.pid) for item in toy.started_workers())


def test_user_error_of_a_rank_ends_all_nodes_without_restart(toy: ToyLauncher) -> None:
    results = wait_for_all(toy, start_two_nodes(toy, "fault=user_error", "once=false", "--max-restarts", "3"))
    assert [item.code for item in results] == [2, 2], results
    assert all(f"error: {socket.gethostname()}: toy: user error" in item.err for item in results)
    assert len(toy.started_workers()) == 2


def test_all_nodes_restart(toy: ToyLauncher) -> None:
    results = wait_for_all(toy, start_two_nodes(toy, "fault=error", "--max-restarts", "1", "--overwrite"))
    assert [item.code for item in results] == [0, 0], results
    assert all(re.search(r"rank 1 failed: \S+toy\.py:\d+: ValueError: toy error", item.err) for item in results)
    assert len(toy.started_workers()) == 4 and toy.progress(2) == [4, 4]
    assert sum(item.overwrite for item in toy.started_workers()) == 2


def test_signal_to_one_node_ends_all(toy: ToyLauncher) -> None:
    nodes = start_two_nodes(toy, "fault=hang", "--max-restarts", "1")
    wait_until(lambda: (toy.folder / "out/failed").exists())
    for number in (signal.SIGINT, signal.SIGTERM):  # two signals of one kind may be merged
        nodes[0].send_signal(number)
    results = wait_for_all(toy, nodes)
    assert results[0].code == 143 and results[1].code == 143
    assert all(has_exited(item.pid) for item in toy.started_workers())


def test_hung_rank_is_reported_by_its_node(toy: ToyLauncher) -> None:
    results = wait_for_all(toy, start_two_nodes(toy, "fault=hang", "parallel.hang_timeout_seconds=15"))
    assert [item.code for item in results] == [1, 1], results
    assert any("rank 0: step 2, step; in wait_for_all" in item.err for item in results), results
    assert any("rank 1: step 2, step; in fail" in item.err for item in results), results
