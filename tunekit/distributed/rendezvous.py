"""Several machines that start one run: they meet, watch each other, and end together. Nothing here imports torch.

Each machine runs the same command. The one that `--rdzv-endpoint` names keeps the table: all others, and itself, are
guests that join it, beat once a second, and tell how their ranks have ended. A machine that says nothing for LOST
seconds is gone. What happens in between, such as a cable that is out for a quarter of a minute, TCP makes good.
"""

import errno
import fcntl
import json
import socket
import struct
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tunekit.distributed.launch_config import End, Place, WorkerSpec
from tunekit.distributed.signals import TICK, StopRequests
from tunekit.errors import UserError

LOST = 60.0  # seconds without a word, or the run's `timeout` if that is less
BEAT = 1.0  # seconds between two words
SIOCGIFADDR = 0x8915
BACKLOG = 4096  # ranks that may knock before the first one listens


class Wire:
    """Messages over a socket that never blocks, one line of JSON each."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link, self.open = link, True
        self.coming, self.going = b"", b""
        self.heard = self.said = time.monotonic()

    def say(self, **message: object) -> None:
        self.going += json.dumps(message).encode() + b"\n"
        self.said = time.monotonic()
        self.flush()

    def flush(self) -> None:
        try:
            while self.open and self.going:
                self.going = self.going[self.link.send(self.going) :]
        except BlockingIOError:
            return
        except OSError:
            self.open = False

    def hear(self) -> list[dict[str, Any]]:
        """What has come since; beats are part of the pulse and not of the talk."""
        try:
            while self.open and (found := self.link.recv(1 << 16)):
                self.coming += found
                self.heard = time.monotonic()
            self.open = False  # the end of all that comes
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self.coming = self.coming.split(b"\n")
        try:
            found = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):  # no machine of ours: whoever looks for open ports
            self.open = False
            return []
        return [message for message in found if message]

    def pulse(self) -> None:
        if time.monotonic() - self.said > BEAT:
            self.say()
        self.flush()

    @property
    def silence(self) -> float:
        return time.monotonic() - self.heard

    def close(self) -> None:
        self.open = False
        self.link.close()


@dataclass(eq=False)
class Seat:
    """A guest, as the table sees it. It has a name once it has joined."""

    wire: Wire
    joined: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    node: int | None = None  # once all have come

    @property
    def name(self) -> str:
        return self.joined["name"]


class Table:
    """Where the machines meet. It lives in one of the processes that start ranks, and is looked after by `tick`."""

    def __init__(self, listener: socket.socket, nodes: int, limit: float) -> None:
        listener.setblocking(False)
        self.listener, self.nodes, self.limit = listener, nodes, limit
        self.seats: list[Seat] = []

    @property
    def placed(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.node is not None]

    @property
    def waiting(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.node is None and seat.joined]

    def tick(self) -> None:
        """Let in, listen, and tell what follows from it."""
        try:
            while True:
                self.seats.append(Seat(Wire(self.listener.accept()[0])))
        except BlockingIOError:
            pass
        for seat in self.seats:
            for message in seat.wire.hear():
                seat.joined = message.get("join", seat.joined)
                seat.ended = message.get("end", seat.ended)
            seat.wire.pulse()
        self.seats = [seat for seat in self.seats if seat.wire.open or seat.node is not None]
        if self.placed:
            self.judge()
        elif len(self.waiting) >= self.nodes:
            self.place(self.waiting[: self.nodes])
        else:
            self.welcome()

    def welcome(self) -> None:
        """Tell those who wait who is here, so that they can name who is not."""
        names = sorted(seat.name for seat in self.waiting)
        for seat in self.waiting:
            if seat.joined.get("told") != names:
                seat.joined["told"] = names
                seat.wire.say(here=names)

    def place(self, seats: list[Seat]) -> None:
        """Each machine's place, by `--node-rank` or by arrival."""
        if wrong := disagreement([seat.joined for seat in seats]):
            for seat in seats:
                seat.node = 0
            self.over(End("mistake", 2, wrong))
            return
        taken = {seat.joined["want"] for seat in seats}
        free = iter(sorted(set(range(self.nodes)) - taken))
        for seat in seats:
            seat.node = next(free) if seat.joined["want"] is None else seat.joined["want"]
        seats = sorted(seats, key=lambda seat: seat.node or 0)
        first, reached = seats[0], reached_at([seat.wire.link for seat in seats])
        address = None if is_local(first.wire.link) else first.wire.link.getpeername()[0]
        counts = [seat.joined["count"] for seat in seats]
        told = {"address": address, "port": first.joined["port"], "size": sum(counts), "reached": reached}
        told["first"] = not any(seat.joined["start"] for seat in seats)
        names = [seat.name for seat in seats]
        for node, seat in enumerate(seats):
            seat.wire.say(place={**told, "node": node, "base": sum(counts[:node]), "names": names})

    def judge(self) -> None:
        """Whether this start is over: one has failed or is gone, or all have ended."""
        for seat in self.placed:
            if seat.ended and seat.ended["kind"] not in ("done", "left"):
                return self.over(End(**{**seat.ended, "text": f"{seat.name}: {seat.ended['text']}"}))
            if seat.wire.silence > self.limit:
                return self.over(End("failed", 1, f"no word from {seat.name} for {self.limit:g} s"))
            if not seat.wire.open:
                return self.over(End("failed", 1, f"{seat.name} has gone: its `tune run` has ended"))
        if all(seat.ended for seat in self.placed):
            left = [seat.ended for seat in self.placed if seat.ended["kind"] == "left"]
            return self.over(End(**left[0]) if left else End("done"))
        return None

    def over(self, end: End) -> None:
        for seat in self.placed:
            seat.wire.say(over=asdict(end))
            seat.wire.close()
        self.seats = [seat for seat in self.seats if seat.node is None]

    def close(self) -> None:
        for seat in self.seats:
            seat.wire.close()
        self.listener.close()


class Guest:
    """This machine at the table."""

    def __init__(self, job: WorkerSpec) -> None:
        self.job, self.limit = job, min(LOST, job.timeout)
        self.host, self.port = job.asked.address()
        listener = table_here(self.host, self.port, job.asked.node_rank)
        self.table = listener and Table(listener, job.asked.nodes, self.limit)
        self.wire: Wire | None = None
        self.heard: list[dict[str, Any]] = []
        self.here: list[str] = []

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *error: object) -> None:
        if self.wire is not None:
            self.wire.close()
        if self.table is not None:
            late = time.monotonic() + self.limit
            while any(seat.wire.going and seat.wire.open for seat in self.table.seats) and time.monotonic() < late:
                self.tick()
                time.sleep(TICK)
            self.table.close()

    def tick(self) -> None:
        if self.table is not None:
            self.table.tick()
        if self.wire is not None:
            self.heard += self.wire.hear()
            self.wire.pulse()

    def meet(self, start: int, wishes: StopRequests) -> Place | End:
        """Our place among all machines, once all have come."""
        with socket.create_server(("", 0), backlog=BACKLOG) as listener:
            late = time.monotonic() + self.job.timeout
            self.here, self.heard = [], []
            while time.monotonic() < late:
                if wishes.came:
                    text = f"{wishes.came[0].name} while waiting for other machines: nothing was started"
                    return End("asked", 128 + wishes.came[0], text)
                if self.wire is None or not self.wire.open:
                    self.join(start, listener.getsockname()[1])
                self.tick()
                for message in self.heard:
                    self.here = message.get("here", self.here)
                    if "place" in message:
                        return self.placed(message["place"], listener)
                    if "over" in message:
                        return End(**message["over"])
                time.sleep(TICK)
        return End("failed", 1, self.missing())

    def join(self, start: int, port: int) -> None:
        """Try to reach the table; it may not be there yet."""
        try:
            link = socket.create_connection((self.host, self.port), timeout=2.0)
        except OSError:
            return
        asked = self.job.asked
        joined = {"name": socket.gethostname(), "count": self.job.asked.count, "port": port, "digest": self.job.digest}
        self.wire = Wire(link)
        self.wire.say(join={**joined, "nodes": asked.nodes, "want": asked.node_rank, "start": start})

    def placed(self, told: dict[str, Any], listener: socket.socket) -> Place:
        assert self.wire is not None
        local = is_local(self.wire.link)
        interface = interface_of(told["reached"] if local else self.wire.link.getsockname()[0])
        file = listener.detach() if told["node"] == 0 else None
        address = told["address"] or self.host
        names = tuple(told["names"])
        return Place(told["base"], told["size"], address, told["port"], file, names, interface, told["first"])

    def missing(self) -> str:
        """Who came, if not all did."""
        asked, limit = self.job.asked, f"{self.job.timeout:g} s"
        if self.wire is None:
            return f"{asked.rendezvous} did not answer for {limit}: is `tune run` started there, and the port open?"
        return f"{len(self.here)} of {asked.nodes} machines came within {limit}: {', '.join(self.here)}"

    def over(self) -> End | None:
        """Whether the start is over for a reason that lies elsewhere."""
        self.tick()
        assert self.wire is not None
        for message in self.heard:
            if "over" in message:
                return End(**message["over"])
        if self.wire.silence > self.limit:
            return End("failed", 1, f"no word from {self.job.asked.rendezvous} for {self.limit:g} s")
        if not self.wire.open:
            return End("failed", 1, f"{self.job.asked.rendezvous} has gone: its `tune run` has ended")
        return None

    def leave(self, end: End, wishes: StopRequests) -> End:
        """How the start ends for all, now that it has ended here."""
        assert self.wire is not None
        self.wire.say(end=asdict(end))
        before = len(wishes.came)
        while (found := self.over()) is None and len(wishes.came) == before:
            time.sleep(TICK)
        self.wire.close()
        return found or End("asked", 128 + wishes.came[-1], "ended at once, before the other machines")


class Alone:
    """One machine: nobody to wait for."""

    def __init__(self, job: WorkerSpec) -> None:
        self.job = job

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def meet(self, start: int, wishes: StopRequests) -> Place | End:
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        port = listener.getsockname()[1]
        return Place(0, self.job.asked.count, "127.0.0.1", port, listener.detach(), first=start == 0)

    def over(self) -> End | None:
        return None

    def leave(self, end: End, wishes: StopRequests) -> End:
        return end


def disagreement(joined: list[dict[str, Any]]) -> str | None:
    """What the machines do not agree on, in one line."""
    first = joined[0]
    for other in joined[1:]:
        names = f"{first['name']} and {other['name']}"
        if other["nodes"] != first["nodes"]:
            return f"{names} say --nnodes {first['nodes']} and {other['nodes']}: start all with the same command"
        if other["digest"] != first["digest"]:
            return f"{names} run different configs or versions: start all with the same command"
    wants = [one["want"] for one in joined if one["want"] is not None]
    twice = [want for want in wants if wants.count(want) > 1]
    return f"two machines say --node-rank {twice[0]}: give each its own, or leave it out" if twice else None


def table_here(host: str, port: int, node: int | None) -> socket.socket | None:
    """The open table, if this machine is the one that keeps it: the first, or else the one whose address it is."""
    if node is not None and node > 0:
        return None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"--rdzv-endpoint {host}:{port}: no machine of this name: {error.strerror}") from error
    try:
        with socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))
    except OSError:
        if node is None:
            return None
    try:  # at all addresses: a machine may know itself by another one (127.0.1.1) than others do
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and node is None:
            return None  # another process of this machine keeps it
        raise UserError(f"--rdzv-endpoint {host}:{port}: cannot listen there: {error.strerror}") from error


def is_local(link: socket.socket) -> bool:
    """Whether both ends are on one machine."""
    return link.getpeername()[0] == link.getsockname()[0]


def reached_at(links: list[socket.socket]) -> str:
    """The address at which other machines reach this one."""
    away = [link for link in links if not is_local(link)]
    return (away or links)[0].getsockname()[0]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address (IPv4), for gloo, which would guess."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
