"""Several machines that start one run: here they are processes that meet at a port of this machine."""

import signal
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from tests.outcome import CommandResult
from tests.parallel.beads import Beads, gone
from tests.waiting import wait_until
from tunekit.distributed.rendezvous import Seat, Wire, disagreement

pytestmark = pytest.mark.multi
LONG = "beads=1000"


@pytest.fixture
def beads(tmp_path: Path) -> Beads:
    return Beads.make(tmp_path)


HELD: list[socket.socket] = []  # for each port that this process has, until it ends


def held(number: int) -> bool:
    """Whether a port is ours from now on: other processes with these tests, which look for one too, leave it alone."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0tunekit-tests-{number}")  # a name that belongs to no file, and goes with its process
    except OSError:
        lock.close()
        return False
    HELD.append(lock)
    return True


def port() -> str:
    """A port that is free, of those that the system gives to nobody by itself."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in range(low - 1, 1024, -1):
        with socket.socket() as probe:
            try:
                probe.bind(("", number))
            except OSError:
                continue
            if held(number):
                return f"127.0.0.1:{number}"
    raise AssertionError("no port is free")


def both(beads: Beads, *words: str, second: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
    """Two machines with the same command, but for `second`."""
    meet = ("--nnodes", "2", "--rdzv-endpoint", port())
    return [beads.start(*meet, *words), beads.start(*meet, *words, *second)]


def ends(beads: Beads, machines: list[subprocess.Popen[str]]) -> list[CommandResult]:
    return [beads.end(machine) for machine in machines]


def test_machines_meet_and_divide_the_ranks(beads: Beads) -> None:
    ended = ends(beads, both(beads, "--nproc-per-node", "2"))
    assert [one.code for one in ended] == [0, 0], ended
    name = socket.gethostname()
    assert all(f"starting 2 processes of 4 on 2 machines: {name}, {name}" in one.err for one in ended)
    assert sorted((one.rank, one.size, one.local) for one in beads.started()) == [(r, 4, r % 2) for r in range(4)]
    assert sorted(one.out for one in ended) == ["", "rank 0 is here\n"]


def test_places_may_be_given_and_numbers_of_processes_differ(beads: Beads) -> None:
    meet = ("--nnodes", "2", "--rdzv-endpoint", port())
    last = beads.start(*meet, "--node-rank", "1")
    first = beads.start(*meet, "--node-rank", "0", "--nproc-per-node", "2")
    ended = ends(beads, [first, last])
    assert [one.code for one in ended] == [0, 0], ended
    assert "rank 0 is here" in ended[0].out
    assert sorted((one.rank, one.size, one.local) for one in beads.started()) == [(0, 3, 0), (1, 3, 1), (2, 3, 0)]


def test_machines_that_do_not_agree_are_told(beads: Beads) -> None:
    for ended in ends(beads, both(beads, second=("beads=5",))):
        assert ended.code == 2 and "run different configs" in ended.err
    one = {"name": "a", "nodes": 3, "digest": "x", "want": 0}
    assert disagreement([one, {**one, "want": None}]) is None
    assert "a and b say --nnodes 3 and 4" in (disagreement([one, {**one, "name": "b", "nodes": 4}]) or "")
    assert "two machines say --node-rank 0" in (disagreement([one, one]) or "")


def test_who_did_not_come_is_named(beads: Beads) -> None:
    limit, name = "parallel.hang_timeout_seconds=10", socket.gethostname()
    meet = ("--nnodes", "3", "--rdzv-endpoint", port(), limit)
    nobody = beads.start("--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:9", limit, "--node-rank", "1")
    for ended in ends(beads, [beads.start(*meet), beads.start(*meet)]):
        assert ended.code == 1
        assert f"2 of 3 machines came within 10 s: {name}, {name}" in ended.err
    alone = beads.end(nobody)
    assert alone.code == 1 and "192.0.2.1:9 did not answer for 10 s" in alone.err


def test_a_rank_that_dies_ends_all_machines(beads: Beads) -> None:
    ended = ends(beads, both(beads, "bad=SIGKILL"))
    assert [one.code for one in ended] == [1, 1]
    assert all("rank 1 was killed by SIGKILL" in one.err for one in ended)
    assert all(gone(one.pid) for one in beads.started())


def test_all_machines_start_again(beads: Beads) -> None:
    ended = ends(beads, both(beads, "bad=error", "--max-restarts", "1", "--overwrite"))
    assert [one.code for one in ended] == [0, 0], ended
    assert all("rank 1 failed: ValueError: a bead is lost" in one.err for one in ended)
    assert len(beads.started()) == 4 and beads.strings(2) == [4, 4]
    assert sum(one.overwrite for one in beads.started()) == 2


def test_a_signal_to_one_machine_ends_all(beads: Beads) -> None:
    machines = both(beads, "bad=hang", "--max-restarts", "1")
    wait_until(lambda: (beads.folder / "out/wrong").exists())
    for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may come as one
        machines[0].send_signal(number)
    ended = ends(beads, machines)
    assert ended[0].code == 143 and ended[1].code == 143
    assert all(gone(one.pid) for one in beads.started())


@pytest.mark.parametrize("which", [0, 1])
def test_a_machine_that_is_gone_is_named(beads: Beads, which: int) -> None:
    machines = both(beads, LONG)
    wait_until(lambda: list(beads.folder.glob("out/5.*")))
    machines[which].kill()
    ended = ends(beads, machines)
    assert ended[1 - which].code == 1 and "has gone: its `tune run` has ended" in ended[1 - which].err
    assert all(gone(one.pid) for one in beads.started())


def test_a_machine_that_comes_back_is_taken_in(beads: Beads) -> None:
    machines = both(beads, LONG, "--max-restarts", "1")
    words = machines[1].args[7:]
    wait_until(lambda: list(beads.folder.glob("out/5.*")))
    machines[1].kill()
    beads.end(machines[1])
    machines[1] = beads.start(*words)
    wait_until(lambda: len(beads.started()) == 4)
    begin = beads.strings(2)
    wait_until(lambda: min(beads.strings(2)) > max(begin) + 3)
    for machine in machines:
        machine.send_signal(signal.SIGINT)
    assert [one.code for one in ends(beads, machines)] == [130, 130]


def test_a_rank_that_hangs_is_named_on_its_machine(beads: Beads) -> None:
    ended = ends(beads, both(beads, "bad=hang", "parallel.hang_timeout_seconds=10"))
    assert [one.code for one in ended] == [1, 1], ended
    assert any("rank 0: step 2, step; in wait_for_all" in one.err for one in ended), ended
    assert any("rank 1: step 2, step; in go_wrong" in one.err for one in ended), ended


def linked() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = socket.create_connection(listener.getsockname())
        return listener.accept()[0], end


def test_a_machine_that_broke_off_is_named() -> None:
    here, there = linked()
    seat = Seat(Wire(here), joined={"name": "node7"}, node=0)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()  # with a reset, as of a machine that was killed with messages unread
    while seat.wire.open:
        seat.wire.hear()
    assert seat.name == "node7"
    here.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"7\n"])
def test_strangers_are_not_listened_to(sent: bytes) -> None:
    here, there = linked()
    wire = Wire(here)
    there.sendall(sent)
    while wire.open:
        assert wire.hear() == []
    there.close()
    here.close()
