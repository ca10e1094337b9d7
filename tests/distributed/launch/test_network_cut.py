"""Two nodes whose network link is cut: network namespaces, connected by a veth pair."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.helpers.toy_launcher import ToyLauncher
from tests.helpers.wait import has_exited, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.slow]
RENDEZVOUS_ARGS = ("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400")
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
    return [replace(toy, command_prefix=("ip", "netns", "exec", name)) for name in network.names]


def test_short_network_outage_is_survived(network: Network, nodes: list[ToyLauncher]) -> None:
    folder = nodes[0].folder
    (folder / "toy.py").write_text(ALL_REDUCE_RECIPE)
    (folder / "toy.yaml").write_text("output_dir: out\n")
    (folder / "out").mkdir()
    processes = [node.start(*RENDEZVOUS_ARGS) for node in nodes]
    wait_until(lambda: all((folder / f"out/step.{rank}").exists() for rank in range(2)))
    network.set_link()
    time.sleep(15)  # several keepalive messages; 30 s work too, but take longer
    network.set_link(up=True)
    before = (folder / "out/step.0").read_text()
    wait_until(lambda: int((folder / "out/step.0").read_text()) > int(before) + 3)
    (folder / "out/enough").touch()
    for node, process in zip(nodes, processes, strict=True):
        result = node.end(process)
        assert result.code == 0, result


def test_long_network_outage_restarts_both_nodes(network: Network, nodes: list[ToyLauncher]) -> None:
    limit = "parallel.hang_timeout_seconds=15"
    processes = [node.start(*RENDEZVOUS_ARGS, "--max-restarts", "1", "steps=100000", limit) for node in nodes]
    folder = nodes[0]
    wait_until(lambda: list(folder.folder.glob("out/5.*")))
    network.set_link()
    wait_until(lambda: all(has_exited(item.pid) for item in folder.started_workers()))
    network.set_link(up=True)
    wait_until(lambda: len(folder.started_workers()) == 4)
    network.set_link()
    first, second = (node.end(process) for node, process in zip(nodes, processes, strict=True))
    assert (first.code, second.code) == (1, 1)
    assert first.err.count("no message from ") == 2 and first.err.count("for 15 s") == 2, first
    # Its own 15 s timeout may end after the link is up again. It then sees that the first node has closed its
    # connection.
    ends = ("no message from 10.213.7.1:29400 for 15 s", "10.213.7.1:29400 has gone: its `tune run` has ended")
    assert sum(second.err.count(end) for end in ends) == 2 and ends[0] in second.err, second
    assert all("(restart 1 of 1)" in item.err for item in (first, second))
    assert all(has_exited(item.pid) for item in folder.started_workers())
