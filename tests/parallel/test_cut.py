"""Two machines whose cable is pulled: network namespaces with a pair of interfaces between them."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.parallel.beads import Beads, gone
from tests.waiting import wait_until

pytestmark = [pytest.mark.multi, pytest.mark.slow]
MEET = ("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400")
# Ranks that exchange something over the network in each step.
RING = '''"""Adding up over the network."""

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
    with DistributedContext(0, cfg.device, cfg.parallel) as run:
        while run.sum_counts(int((out / "enough").exists())) < 2:
            step += 1
            beats.beat(step, "step")
            (out / f"new.{run.rank}").write_text(str(step))
            (out / f"new.{run.rank}").rename(out / f"step.{run.rank}")  # whole at any time
            time.sleep(0.01)
'''


@dataclass(frozen=True)
class Net:
    """Two namespaces and the interface of each."""

    names: tuple[str, str]

    def pull(self, up: bool = False) -> None:
        """Pull the cable out, or put it in again."""
        run("ip", "-n", self.names[1], "link", "set", "wire", "up" if up else "down")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def net() -> Iterator[Net]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces are not permitted here")
    names = f"tune{os.getpid()}a", f"tune{os.getpid()}b"
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "address", "add", f"10.213.7.{number}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield Net(names)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def machines(net: Net, tmp_path: Path) -> list[Beads]:
    beads = Beads.make(tmp_path)
    return [replace(beads, within=("ip", "netns", "exec", name)) for name in net.names]


def test_a_cable_that_is_out_for_a_while_is_waited_for(net: Net, machines: list[Beads]) -> None:
    folder = machines[0].folder
    (folder / "beads.py").write_text(RING)
    (folder / "beads.yaml").write_text("output_dir: out\n")
    (folder / "out").mkdir()
    started = [machine.start(*MEET) for machine in machines]
    wait_until(lambda: all((folder / f"out/step.{rank}").exists() for rank in range(2)))
    net.pull()
    time.sleep(15)  # 30 do as well, and take longer
    net.pull(up=True)
    before = (folder / "out/step.0").read_text()
    wait_until(lambda: int((folder / "out/step.0").read_text()) > int(before) + 3)
    (folder / "out/enough").touch()
    for machine, process in zip(machines, started, strict=True):
        ended = machine.end(process)
        assert ended.code == 0, ended


def test_a_cable_that_stays_out_ends_both_and_they_meet_again(net: Net, machines: list[Beads]) -> None:
    limit = "parallel.hang_timeout_seconds=20"
    started = [machine.start(*MEET, "--max-restarts", "1", "beads=100000", limit) for machine in machines]
    folder = machines[0]
    wait_until(lambda: list(folder.folder.glob("out/5.*")))
    net.pull()
    wait_until(lambda: all(gone(one.pid) for one in folder.started()))
    net.pull(up=True)
    wait_until(lambda: len(folder.started()) == 4)
    net.pull()
    first, second = (machine.end(process) for machine, process in zip(machines, started, strict=True))
    assert (first.code, second.code) == (1, 1)
    assert first.err.count("no word from ") == 2 and first.err.count("for 20 s") == 2, first
    # Its own 20 s may end after the cable is back: it then hears that the first machine has ended its connection.
    ends = ("no word from 10.213.7.1:29400 for 20 s", "10.213.7.1:29400 has gone: its `tune run` has ended")
    assert sum(second.err.count(end) for end in ends) == 2 and ends[0] in second.err, second
    assert all("(restart 1 of 1)" in one.err for one in (first, second))
    assert all(gone(one.pid) for one in folder.started())
