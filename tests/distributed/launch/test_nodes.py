"""Two nodes: network namespaces with host names of their own, connected by a veth pair."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.helpers.command_result import CommandResult
from tests.helpers.toy_launcher import ToyLauncher
from tests.helpers.wait import has_exited, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.slow]
RENDEZVOUS_ARGS = ("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400", "parallel.hang_timeout_seconds=15")
MANY_STEPS = "steps=100000"
# `tune run` in a namespace, with the host name of its node.
ENTER = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
# A recipe whose ranks communicate over the network in each step.
ALL_REDUCE_RECIPE = '''"""Adding up over the network."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.heartbeat import HeartbeatWriter


@dataclass(frozen=True)
class Ring:
    output_dir: str = "out"
    parallel: ParallelConfig = ParallelConfig()
    device: str = "cpu"


CONFIG = Ring


def check(cfg):
    pass


def main(cfg, overwrite=False):
    beats, out, step = HeartbeatWriter.open(), Path(cfg.output_dir), 0
    with DistributedContext(0, cfg.device, cfg.parallel) as dist:
        while dist.sum_counts(int((out / "enough").exists())) < 2:
            step += 1
            beats.record(step, "step")
            (out / f"new.{dist.rank}").write_text(str(step))
            (out / f"new.{dist.rank}").rename(out / f"step.{dist.rank}")  # atomic
            time.sleep(0.01)
'''


@dataclass(frozen=True)
class Network:
    """Two namespaces, with one interface each."""

    names: tuple[str, str]

    def set_link(self, up: bool = False) -> None:
        """Take the link down or up."""
        run_command("ip", "-n", self.names[1], "link", "set", "wire", "up" if up else "down")


def run_command(*args: str) -> None:
    subprocess.run(args, check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces are not permitted here")
    names = f"tune{os.getpid()}a", f"tune{os.getpid()}b"
    try:
        for name in names:
            run_command("ip", "netns", "add", name)
        run_command(
            "ip", "-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1]
        )
        for number, name in enumerate(names, 1):
            run_command("ip", "-n", name, "address", "add", f"10.213.7.{number}/24", "dev", "wire")
            run_command("ip", "-n", name, "link", "set", "wire", "up")
            run_command("ip", "-n", name, "link", "set", "lo", "up")
        yield Network(names)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def nodes(network: Network, tmp_path: Path) -> list[ToyLauncher]:
    toy = ToyLauncher.make(tmp_path)
    prefixes = ((*ENTER, f"node{i}", "ip", "netns", "exec", name) for i, name in enumerate(network.names))
    return [replace(toy, command_prefix=prefix) for prefix in prefixes]


def end_all(nodes: list[ToyLauncher], processes: list[subprocess.Popen[str]]) -> list[CommandResult]:
    return [node.end(process) for node, process in zip(nodes, processes, strict=True)]


def start_running(nodes: list[ToyLauncher], *args: str) -> list[subprocess.Popen[str]]:
    """Nodes whose ranks have completed a few steps."""
    processes = [node.start(*RENDEZVOUS_ARGS, MANY_STEPS, *args) for node in nodes]
    wait_until(lambda: list(nodes[0].folder.glob("out/5.*")), *processes)
    return processes


def wait_for_progress(toy: ToyLauncher, count: int) -> None:
    begin = max(toy.progress(count))
    wait_until(lambda: min(toy.progress(count)) > begin + 3)


def test_late_host_is_waited_for(nodes: list[ToyLauncher]) -> None:
    late = nodes[1].start(*RENDEZVOUS_ARGS)
    time.sleep(5)  # it tries to connect meanwhile
    results = end_all(nodes, [nodes[0].start(*RENDEZVOUS_ARGS), late])
    assert [result.code for result in results] == [0, 0], results
    assert all("starting 1 process of 2 on 2 nodes: node0, node1" in result.err for result in results)
    assert [result.out for result in results] == ["rank 0 started\n", ""]


@pytest.mark.parametrize(
    ("which", "message"),
    [(0, "1 of 2 nodes came within 15 s: node0"), (1, "10.213.7.1:29400 did not answer for 15 s")],
)
def test_missing_node_is_reported(nodes: list[ToyLauncher], which: int, message: str) -> None:
    result = nodes[which].run(*RENDEZVOUS_ARGS)
    assert result.code == 1 and message in result.err and len(result.err.splitlines()) == 1, result


@pytest.mark.parametrize(
    ("which", "message"),
    [(0, "10.213.7.1:29400 has gone: its `tune run` has ended"), (1, "no message from node1 for 15 s")],
)
def test_killed_node_is_reported(nodes: list[ToyLauncher], which: int, message: str) -> None:
    processes = start_running(nodes, "parallel.hang_timeout_seconds=30")
    processes[which].kill()
    results = end_all(nodes, processes)
    assert results[1 - which].code == 1 and message in results[1 - which].err, results
    wait_until(lambda: all(has_exited(item.pid) for item in nodes[0].started_workers()))  # also of the killed node


@pytest.mark.parametrize(
    ("which", "limit"), [(0, 60), (1, 30)]
)  # a lost host is noticed at once, node1 after half of the limit
def test_restarted_node_joins_with_another_number_of_ranks(nodes: list[ToyLauncher], which: int, limit: int) -> None:
    args = ("--max-restarts", "1", f"parallel.hang_timeout_seconds={limit}")
    processes = start_running(nodes, *args)
    processes[which].kill()
    nodes[which].end(processes[which])
    processes[which] = nodes[which].start(*RENDEZVOUS_ARGS, MANY_STEPS, *args, "--nproc-per-node", "2")
    wait_until(lambda: len(nodes[0].started_workers()) == 5, *processes)
    assert {worker.size for worker in nodes[0].started_workers()[2:]} == {3}
    wait_until(lambda: (nodes[0].folder / "out/progress.2").exists())
    wait_for_progress(nodes[0], 2)
    processes[1 - which].send_signal(signal.SIGTERM)
    assert [result.code for result in end_all(nodes, processes)] == [143, 143]


def test_short_network_outage_is_survived(network: Network, nodes: list[ToyLauncher]) -> None:
    folder = nodes[0].folder
    (folder / "toy.py").write_text(ALL_REDUCE_RECIPE)
    (folder / "toy.yaml").write_text("output_dir: out\n")
    (folder / "out").mkdir()
    processes = [node.start(*RENDEZVOUS_ARGS[:-1]) for node in nodes]
    wait_until(lambda: all((folder / f"out/step.{rank}").exists() for rank in range(2)), *processes)
    network.set_link()
    time.sleep(15)  # several keep-alive messages; 30 s work too, but take longer
    network.set_link(up=True)
    before = (folder / "out/step.0").read_text()
    wait_until(lambda: int((folder / "out/step.0").read_text()) > int(before) + 3)
    (folder / "out/enough").touch()
    results = end_all(nodes, processes)
    assert [result.code for result in results] == [0, 0], results


def test_long_network_outage_restarts_both_nodes(network: Network, nodes: list[ToyLauncher]) -> None:
    processes = start_running(nodes, "--max-restarts", "1", "parallel.hang_timeout_seconds=30")
    network.set_link()
    wait_until(lambda: all(has_exited(item.pid) for item in nodes[0].started_workers()))
    network.set_link(up=True)
    wait_until(lambda: len(nodes[0].started_workers()) == 4)
    network.set_link()
    results = end_all(nodes, processes)
    assert [result.code for result in results] == [1, 1]
    for result, other in zip(results, ("node1", "10.213.7.1:29400"), strict=True):
        assert result.err.count(f"no message from {other} for 15 s") == 2 and "(restart 1 of 1)" in result.err, results
    assert all(has_exited(item.pid) for item in nodes[0].started_workers())
