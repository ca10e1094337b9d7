"""Rendezvous of several nodes that run one job and end together. Does not import torch.

Each node runs the same command. The node of `--rdzv-endpoint` runs the RendezvousServer. All nodes, including this one,
connect to it, send a keep-alive message once a second, and report the result of their workers. A node that sends
nothing for LOST_SECONDS is lost. TCP recovers from shorter network failures.
"""

import errno
import fcntl
import json
import socket
import struct
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tunekit.distributed.launch_config import RendezvousInfo, RunResult, WorkerSpec
from tunekit.distributed.signals import POLL_SECONDS, StopRequests
from tunekit.errors import UserError

LOST_SECONDS = 60.0  # seconds without a message; at most the timeout of the run
KEEPALIVE_SECONDS = 1.0  # seconds between two messages
SIOCGIFADDR = 0x8915
BACKLOG = 4096  # connections of ranks before rank 0 accepts them


class Connection:
    """Messages over a socket that never blocks, one line of JSON each."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.is_open = sock, True
        self.receive_buffer, self.send_buffer = b"", b""
        self.last_received = self.last_sent = time.monotonic()

    def send(self, **message: object) -> None:
        self.send_buffer += json.dumps(message).encode() + b"\n"
        self.last_sent = time.monotonic()
        self.flush()

    def flush(self) -> None:
        try:
            while self.is_open and self.send_buffer:
                self.send_buffer = self.send_buffer[self.sock.send(self.send_buffer) :]
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False

    def receive(self) -> list[dict[str, Any]]:
        """Messages since the last call, without keep-alive messages."""
        try:
            while self.is_open and (data := self.sock.recv(1 << 16)):
                self.receive_buffer += data
                self.last_received = time.monotonic()
            self.is_open = False  # closed by the peer
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self.receive_buffer = self.receive_buffer.split(b"\n")
        try:
            messages = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):  # not a node of this run, such as a port scanner
            self.is_open = False
            return []
        return [message for message in messages if message]

    def keep_alive(self) -> None:
        if time.monotonic() - self.last_sent > KEEPALIVE_SECONDS:
            self.send()
        self.flush()

    @property
    def idle_seconds(self) -> float:
        return time.monotonic() - self.last_received

    def close(self) -> None:
        self.is_open = False
        self.sock.close()


@dataclass(eq=False)
class Participant:
    """State of a connected node in the RendezvousServer. It has a name after its join request."""

    connection: Connection
    request: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    node_rank: int | None = None  # after all nodes have joined

    @property
    def name(self) -> str:
        return self.request["name"]


class RendezvousServer:
    """Server of the rendezvous. Runs in the launcher of one node, which calls `poll` repeatedly."""

    def __init__(self, listener: socket.socket, num_nodes: int, timeout: float) -> None:
        listener.setblocking(False)
        self.listener, self.num_nodes, self.timeout = listener, num_nodes, timeout
        self.connected: list[Participant] = []

    @property
    def participants(self) -> list[Participant]:
        return [p for p in self.connected if p.node_rank is not None]

    @property
    def wait_list(self) -> list[Participant]:
        return [p for p in self.connected if p.node_rank is None and p.request]

    @property
    def is_sending(self) -> bool:
        """Whether messages have not left this process yet."""
        return any(p.connection.send_buffer and p.connection.is_open for p in self.connected)

    def poll(self) -> None:
        """Accept connections, receive messages and answer them."""
        try:
            while True:
                self.connected.append(Participant(Connection(self.listener.accept()[0])))
        except BlockingIOError:
            pass
        for participant in self.connected:
            for message in participant.connection.receive():
                participant.request = message.get("join", participant.request)
                participant.result = message.get("end", participant.result)
            participant.connection.keep_alive()
        self.connected = [p for p in self.connected if p.connection.is_open or p.node_rank is not None]
        if self.participants:
            self.check_participants()
        elif len(self.wait_list) >= self.num_nodes:
            self.assign_ranks(self.wait_list[: self.num_nodes])
        else:
            self.send_wait_list()

    def send_wait_list(self) -> None:
        """Send the names of all waiting nodes to each of them, for the message of a timeout."""
        names = sorted(participant.name for participant in self.wait_list)
        for participant in self.wait_list:
            if participant.request.get("sent_names") != names:
                participant.request["sent_names"] = names
                participant.connection.send(here=names)

    def assign_ranks(self, participants: list[Participant]) -> None:
        """Assign node ranks, by `--node-rank` or in order of arrival, and send the RendezvousInfo to each node."""
        if mismatch := find_mismatch([participant.request for participant in participants]):
            for participant in participants:
                participant.node_rank = 0
            self.finish(RunResult("user_error", 2, mismatch))
            return
        requested_ranks = [participant.request["node_rank"] for participant in participants]
        free_ranks = iter(sorted(set(range(self.num_nodes)) - set(requested_ranks)))
        for participant, rank in zip(participants, requested_ranks, strict=True):
            participant.node_rank = next(free_ranks) if rank is None else rank
        participants = sorted(participants, key=lambda participant: participant.node_rank or 0)
        sockets = [participant.connection.sock for participant in participants]
        address = None if is_local(sockets[0]) else sockets[0].getpeername()[0]
        counts, port = [p.request["count"] for p in participants], participants[0].request["port"]
        info = {"address": address, "port": port, "size": sum(counts), "reached": find_external_address(sockets)}
        info["first"] = not any(participant.request["start"] for participant in participants)
        names = [participant.name for participant in participants]
        for node, participant in enumerate(participants):
            participant.connection.send(place={**info, "node": node, "base": sum(counts[:node]), "names": names})

    def check_participants(self) -> None:
        """Finish this start if a node has failed or disconnected, or all nodes have ended."""
        for participant in self.participants:
            result = participant.result
            if result and result["kind"] not in ("succeeded", "stopped"):
                return self.finish(RunResult(**{**result, "text": f"{participant.name}: {result['text']}"}))
            if participant.connection.idle_seconds > self.timeout:
                return self.finish(RunResult("failed", 1, f"no message from {participant.name} for {self.timeout:g} s"))
            if not participant.connection.is_open:
                return self.finish(RunResult("failed", 1, f"{participant.name} has gone: its `tune run` has ended"))
        if all(participant.result for participant in self.participants):
            stopped = [p.result for p in self.participants if p.result["kind"] == "stopped"]
            return self.finish(RunResult(**stopped[0]) if stopped else RunResult("succeeded"))
        return None

    def finish(self, result: RunResult) -> None:
        for participant in self.participants:
            participant.connection.send(over=asdict(result))
            participant.connection.close()
        self.connected = [participant for participant in self.connected if participant.node_rank is None]

    def close(self) -> None:
        for participant in self.connected:
            participant.connection.close()
        self.listener.close()


class MultiNodeRendezvous:
    """Client of the rendezvous on this node. Also runs the RendezvousServer if the endpoint is on this node."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec, self.timeout = spec, min(LOST_SECONDS, spec.timeout)
        self.host, self.port = spec.launch_config.parse_endpoint()
        listener = create_listener(self.host, self.port, spec.launch_config.node_rank)
        self.rendezvous_host = listener and RendezvousServer(listener, spec.launch_config.nodes, self.timeout)
        self.connection: Connection | None = None
        self.messages: list[dict[str, Any]] = []
        self.joined_nodes: list[str] = []

    def __enter__(self) -> "MultiNodeRendezvous":
        return self

    def __exit__(self, *error: object) -> None:
        if self.connection is not None:
            self.connection.close()
        if self.rendezvous_host is not None:
            deadline = time.monotonic() + self.timeout
            while self.rendezvous_host.is_sending and time.monotonic() < deadline:
                self.poll()
                time.sleep(POLL_SECONDS)
            self.rendezvous_host.close()

    def poll(self) -> None:
        if self.rendezvous_host is not None:
            self.rendezvous_host.poll()
        if self.connection is not None:
            self.messages += self.connection.receive()
            self.connection.keep_alive()

    def next_rendezvous(self, start: int, stop_requests: StopRequests) -> RendezvousInfo | RunResult:
        """Join, and wait for all nodes. Returns a RunResult if the rendezvous fails."""
        with socket.create_server(("", 0), backlog=BACKLOG) as listener:
            deadline = time.monotonic() + self.spec.timeout
            self.joined_nodes, self.messages = [], []
            while time.monotonic() < deadline:
                if stop_requests.received:
                    text = f"{stop_requests.received[0].name} while waiting for other machines: nothing was started"
                    return RunResult("interrupted", 128 + stop_requests.received[0], text)
                if self.connection is None or not self.connection.is_open:
                    self.join(start, listener.getsockname()[1])
                self.poll()
                for message in self.messages:
                    self.joined_nodes = message.get("here", self.joined_nodes)
                    if "place" in message:
                        return self.create_info(message["place"], listener)
                    if "over" in message:
                        return RunResult(**message["over"])
                time.sleep(POLL_SECONDS)
        return RunResult("failed", 1, self.format_timeout())

    def join(self, start: int, port: int) -> None:
        """Try to connect to the RendezvousServer, which may not have started yet, and send a join request."""
        try:
            sock = socket.create_connection((self.host, self.port), timeout=2.0)
        except OSError:
            return
        config = self.spec.launch_config
        request = {"name": socket.gethostname(), "count": config.nproc_per_node, "port": port, "start": start}
        request |= {"nodes": config.nodes, "node_rank": config.node_rank, "digest": self.spec.digest}
        request["job_id"] = config.job_id
        self.connection = Connection(sock)
        self.connection.send(join=request)

    def create_info(self, message: dict[str, Any], listener: socket.socket) -> RendezvousInfo:
        assert self.connection is not None
        local = is_local(self.connection.sock)
        interface = find_interface(message["reached"] if local else self.connection.sock.getsockname()[0])
        listener_fd = listener.detach() if message["node"] == 0 else None
        base, size, address, port = (message[key] for key in ("base", "size", "address", "port"))
        names, first = tuple(message["names"]), message["first"]
        return RendezvousInfo(base, size, address or self.host, port, listener_fd, names, interface, first)

    def format_timeout(self) -> str:
        """Message with the nodes that have joined before the timeout."""
        config, limit = self.spec.launch_config, f"{self.spec.timeout:g} s"
        if self.connection is None:
            return f"{config.rendezvous} did not answer for {limit}. Check that `tune run` is started and the port open"
        names = ", ".join(self.joined_nodes)
        return f"{len(self.joined_nodes)} of {config.nodes} machines came within {limit}: {names}"

    def poll_result(self) -> RunResult | None:
        """Result of this start if another node or the connection has ended it; otherwise None."""
        self.poll()
        assert self.connection is not None
        endpoint = self.spec.launch_config.rendezvous
        for message in self.messages:
            if "over" in message:
                return RunResult(**message["over"])
        if self.connection.idle_seconds > self.timeout:
            return RunResult("failed", 1, f"no message from {endpoint} for {self.timeout:g} s")
        if not self.connection.is_open:
            return RunResult("failed", 1, f"{endpoint} has gone: its `tune run` has ended")
        return None

    def report_result(self, result: RunResult, stop_requests: StopRequests) -> RunResult:
        """Report the result of this node, and wait for the result of all nodes."""
        assert self.connection is not None
        self.connection.send(end=asdict(result))
        num_received = len(stop_requests.received)
        while (global_result := self.poll_result()) is None and len(stop_requests.received) == num_received:
            time.sleep(POLL_SECONDS)
        self.connection.close()
        text = "ended at once, before the other machines"
        return global_result or RunResult("interrupted", 128 + stop_requests.received[-1], text)


class SingleNodeRendezvous:
    """Rendezvous of a run on one node, which waits for no other nodes."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    def __enter__(self) -> "SingleNodeRendezvous":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def next_rendezvous(self, start: int, stop_requests: StopRequests) -> RendezvousInfo | RunResult:
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        size, port = self.spec.launch_config.nproc_per_node, listener.getsockname()[1]
        return RendezvousInfo(0, size, "127.0.0.1", port, listener.detach(), is_first_start=start == 0)

    def poll_result(self) -> RunResult | None:
        return None

    def report_result(self, result: RunResult, stop_requests: StopRequests) -> RunResult:
        return result


def find_mismatch(requests: list[dict[str, Any]]) -> str | None:
    """Message about the first difference between the join requests; None if they are compatible."""
    first = requests[0]
    for request in requests[1:]:
        names = f"{first['name']} and {request['name']}"
        if request["nodes"] != first["nodes"]:
            return f"{names} say --nnodes {first['nodes']} and {request['nodes']}: start all with the same command"
        if request["job_id"] != first["job_id"]:
            return f"{names} say --rdzv-id {first['job_id']} and {request['job_id']}: each job needs its own port"
        if request["digest"] != first["digest"]:
            return f"{names} run different configs or versions: start all with the same command"
    node_ranks = [request["node_rank"] for request in requests if request["node_rank"] is not None]
    if duplicates := [node_rank for node_rank in node_ranks if node_ranks.count(node_rank) > 1]:
        return f"two machines say --node-rank {duplicates[0]}: set a different rank on each, or omit it"
    return None


def create_listener(host: str, port: int, node_rank: int | None) -> socket.socket | None:
    """Listening socket if this node runs the RendezvousServer: node rank 0, or the node with the endpoint's address."""
    if node_rank is not None and node_rank > 0:
        return None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"--rdzv-endpoint {host}:{port}: host not found: {error.strerror}") from error
    try:
        with socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))
    except OSError:
        if node_rank is None:
            return None
    try:  # on all addresses: the host name may resolve to 127.0.1.1 on its own machine
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and node_rank is None:
            return None  # another process of this machine runs the RendezvousServer
        raise UserError(f"--rdzv-endpoint {host}:{port}: cannot listen there: {error.strerror}") from error


def is_local(sock: socket.socket) -> bool:
    """Whether both ends of a connection are on one machine."""
    return sock.getpeername()[0] == sock.getsockname()[0]


def find_external_address(sockets: list[socket.socket]) -> str:
    """Address of this machine that other machines connect to."""
    remote = [sock for sock in sockets if not is_local(sock)]
    return (remote or sockets)[0].getsockname()[0]


def find_interface(address: str) -> str | None:
    """Name of the network interface with an IPv4 address. gloo may choose a different interface by default."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                response = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(response[20:24]) == address:
                return name
    return None
