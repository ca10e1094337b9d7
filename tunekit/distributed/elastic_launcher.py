"""Several nodes: each `tune run` runs an agent of torch.distributed.elastic, which starts the workers of its node.

The nodes meet in torch's c10d rendezvous, and exchange results in its store: all end with the same one. Network calls
run in threads that can be abandoned: the main thread answers signals even if the network is down.
"""

import atexit
import json
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict
from datetime import timedelta
from threading import Thread
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.agent.server import api as elastic
from torch.distributed.elastic.rendezvous import api as rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.utils.store import barrier

from tunekit.distributed.launch_config import RendezvousInfo, RunResult, WorkerSpec
from tunekit.distributed.launcher import WorkerGroup, can_restart, format_start_message, poll_workers, print_line
from tunekit.distributed.node_address import BACKLOG, create_listener, find_interface, find_local_address
from tunekit.distributed.signals import POLL_SECONDS, StopRequests

# Seconds without a message from a node; at most half of the time for which a restarted node waits for the others
LOST_SECONDS = 60.0
KEEPALIVE_SECONDS, KEEPALIVE_ATTEMPTS = 1, 15  # messages, and how many of them a node that meets others may miss
LINGER_SECONDS = 5.0  # maximum time for which a node waits at its end until the others have read the result
RUN_ID = "tunekit"
NETWORK_ERRORS = (rendezvous.RendezvousError, DistError, OSError)
# Of records that another program or version has written
DATA_ERRORS = (RuntimeError, ValueError, LookupError, AttributeError, TypeError, EOFError, pickle.UnpicklingError)


class RunEnded(Exception):
    """Ends the agent of this node without a restart."""

    def __init__(self, kind: str, code: int, text: str) -> None:
        super().__init__(text)
        self.result = RunResult(kind, code, text)


def run_in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Result of a function that runs in a daemon thread. (The threads of an executor delay the exit of the process.)"""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except (*NETWORK_ERRORS, *DATA_ERRORS) as error:  # raised by `result` in the thread that waits
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class ResultBackend(C10dRendezvousBackend):
    """Backend of the rendezvous that also reads the result of the run whenever torch reads its state.

    torch does so about once a second: to wait for other nodes, and then in its thread for keep-alive messages.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, RUN_ID)
        self.is_closed, self.last_read = False, time.monotonic()
        self.round, self.failure, self.num_done = 0, "", 0
        self.nodes: list[Any] = []  # all that have joined this round, sorted by their ranks
        self.rank: int | None = None  # of this node, after the rendezvous
        self.heartbeats: dict[int, tuple[bytes, float]] = {}  # last message of each node, and its time on this node

    def get_state(self) -> tuple[bytes, Any] | None:
        try:
            response = super().get_state()
            if response is not None:
                self.read_results(pickle.loads(response[0]))
        except rendezvous.RendezvousConnectionError:
            self.is_closed = True
            raise
        self.last_read = time.monotonic()
        return response

    def read_results(self, state: Any) -> None:
        if self.rank is None:
            known_nodes = self.nodes if state.round == self.round else []
            self.round, self.nodes = state.round, max(known_nodes, sorted(state.participants), key=len)
        self.failure = self._call_store("compare_set", self.key("failure"), "", "").decode()
        self.num_done = self._call_store("add", self.key("done"), 0)
        if self.rank is not None:  # torch's own keep-alive messages depend on clocks that agree
            self._call_store("add", self.key(f"heartbeat/{self.rank}"), 1)
            keys = [self.key(f"heartbeat/{rank}") for rank in range(len(self.nodes))]
            for rank, count in enumerate(self._call_store("multi_get", keys)):
                if rank not in self.heartbeats or count != self.heartbeats[rank][0]:
                    self.heartbeats[rank] = count, time.monotonic()

    def start_heartbeats(self, rank: int) -> None:
        """Send messages from now on. The other nodes wait for the first."""
        self.rank, self.heartbeats = rank, {}
        self._call_store("add", self.key(f"heartbeat/{rank}"), 1)

    def silent_nodes(self, limit: float) -> list[str]:
        """Names of nodes without a message for `limit` seconds."""
        now, heartbeats = time.monotonic(), dict(self.heartbeats)
        return [node_name(self.nodes[rank]) for rank, (_, last) in heartbeats.items() if now - last > limit]

    def key(self, name: str) -> str:
        return f"{RUN_ID}/{self.round}/{name}"

    def publish(self, result: RunResult) -> None:
        """Report the result of this node. The first failure becomes the result of all nodes."""
        if result.is_expected:
            self._call_store("add", self.key("done"), 1)
        else:
            text = f"{socket.gethostname()}: {result.text}" if result.text else ""
            self._call_store("compare_set", self.key("failure"), "", json.dumps(asdict(result) | {"text": text}))


def node_name(node: Any) -> str:
    """Host name of a node of the rendezvous, whose address starts with the order of the node."""
    return node.addr.partition("/")[2]


class NodeRendezvous(rendezvous.RendezvousHandler):
    """torch's c10d rendezvous. The node that hosts the store is the first; the others are ordered by `--node-rank`."""

    def __init__(self, spec: WorkerSpec, stop_requests: StopRequests) -> None:
        self.spec, self.config, self.stop_requests = spec, spec.launch_config, stop_requests
        self.timeout = min(LOST_SECONDS, spec.timeout / 2)
        self.host, self.port = self.config.parse_endpoint()
        self.listener = create_listener(self.host, self.port, self.config.node_rank)
        self.is_host = self.listener is not None
        self.store: TCPStore | None = None
        self.backend: ResultBackend | None = None
        self.handler: DynamicRendezvousHandler | None = None
        self.num_starts = 0
        self.listener_fd: int | None = None  # for the store of the workers, on rank 0
        self.records: list[dict[str, Any]] = []  # of all nodes

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Join, and wait for all nodes. Raise RunEnded after the timeout, or on a signal."""
        deadline = time.monotonic() + self.spec.timeout
        with socket.create_server(("", 0), backlog=BACKLOG) as listener:
            joining = run_in_thread(lambda: self.join(listener.getsockname()[1]))
            while not joining.done() and time.monotonic() < deadline:
                if self.stop_requests.received:
                    number = self.stop_requests.received[0]
                    text = f"{number.name} while waiting for other nodes" + ": nothing was started" * (
                        not self.num_starts
                    )
                    raise RunEnded("interrupted", 128 + number, text)
                time.sleep(POLL_SECONDS)
            if not joining.done() or isinstance(joining.exception(), NETWORK_ERRORS):
                raise RunEnded("failed", 1, self.format_timeout())
            info = joining.result()
            self.listener_fd = listener.detach() if info.rank == 0 else None
        self.num_starts += 1
        return info

    def join(self, port: int) -> rendezvous.RendezvousInfo:
        """Join, and exchange records with the other nodes. Runs in a thread."""
        if self.store is None:
            self.connect()
        assert self.handler is not None and self.backend is not None
        self.backend.rank = None
        info = self.handler.next_rendezvous()
        self.backend.get_state()
        self.backend.start_heartbeats(info.rank)
        record = {"name": socket.gethostname(), "--nnodes": self.config.nodes, "--rdzv-id": self.config.job_id}
        record |= {"config or version": self.spec.digest, "port": port, "start": self.num_starts}
        record["endpoint"] = socket.gethostbyname(self.host)
        info.store.set(f"{RUN_ID}/{info.rank}", json.dumps(record))
        self.records = list(map(json.loads, info.store.multi_get([f"{RUN_ID}/{i}" for i in range(info.world_size)])))
        return info

    def connect(self) -> None:
        """Create the store or connect to it, which waits for its host."""
        timeout, nodes = timedelta(seconds=self.spec.timeout), self.config.nodes
        listen_fd = None if self.listener is None else self.listener.detach()
        options = {"is_master": self.is_host, "wait_for_workers": False, "master_listen_fd": listen_fd}
        self.store = TCPStore(self.host, self.port, timeout=timeout, **options)
        self.backend = ResultBackend(self.store)
        order = 0 if self.is_host else self.config.node_rank or nodes  # torch sorts nodes by their addresses
        address = f"{order:06d}/{socket.gethostname()}"
        waiting = RendezvousTimeout(join=timeout), KEEPALIVE_SECONDS, KEEPALIVE_ATTEMPTS
        self.handler = DynamicRendezvousHandler.from_backend(
            RUN_ID, self.store, self.backend, nodes, nodes, address, *waiting
        )

    def check_records(self) -> None:
        """Raise RunEnded if the nodes do not run the same job."""
        first = self.records[0]
        for record in self.records:
            for key in ("--nnodes", "--rdzv-id", "config or version"):
                if record[key] != first[key]:
                    text = f"{first['name']} and {record['name']} differ in {key}: {first[key]} and {record[key]}"
                    raise RunEnded("user_error", 2, f"{text}. Start all nodes with the same command")

    def describe_workers(self, base_rank: int, world_size: int) -> RendezvousInfo:
        """Ranks of the workers of this node, the address of rank 0, and the interface over which the nodes meet."""
        # The host's name may resolve to 127.0.1.1 on the host itself.
        remote = [r["endpoint"] for r in self.records if not r["endpoint"].startswith("127.")] or ["127.0.0.1"]
        interface = find_interface(remote[0] if self.is_host else find_local_address(self.host, self.port))
        rank_0 = self.host, self.records[0]["port"], self.listener_fd
        is_first_start, names = not any(r["start"] for r in self.records), tuple(r["name"] for r in self.records)
        return RendezvousInfo(base_rank, world_size, *rank_0, names, interface, is_first_start)

    def format_timeout(self) -> str:
        """Message with the nodes that have joined before the timeout."""
        endpoint, limit = self.config.rendezvous, f"{self.spec.timeout:g} s"
        if self.backend is None:
            return f"{endpoint} did not answer for {limit}. Check that `tune run` is started and the port open"
        names = [node_name(node) for node in self.backend.nodes]
        return f"{len(names)} of {self.config.nodes} nodes came within {limit}: {', '.join(names)}"

    def poll_result(self) -> RunResult | None:
        """Result of all nodes, once one of them has failed or is lost, or all have ended."""
        backend, endpoint = self.backend, self.config.rendezvous
        assert backend is not None
        is_silent = not self.is_host and time.monotonic() - backend.last_read > self.timeout
        if backend.failure:
            return RunResult(**json.loads(backend.failure))
        if backend.num_done == self.config.nodes:  # its host may have ended since
            return RunResult("succeeded")
        if backend.is_closed or is_silent:
            self.store = None  # connect again
            text = f"no message from {endpoint} for {self.timeout:g} s"
            return RunResult("failed", 1, text if is_silent else f"{endpoint} has gone: its `tune run` has ended")
        if silent := backend.silent_nodes(self.timeout):
            return RunResult("failed", 1, f"no message from {', '.join(silent)} for {self.timeout:g} s")
        return None

    def leave(self) -> None:
        """Wait until the other nodes have read the result, because the store ends with its host."""
        if (store := self.store) is not None:
            leaving = run_in_thread(lambda: barrier(store, self.config.nodes, f"{RUN_ID}/left", LINGER_SECONDS))
            wait([leaving], LINGER_SECONDS)

    def num_nodes_waiting(self) -> int:
        return 0  # with a fixed number of nodes, they replace one that `poll_result` finds lost

    def get_run_id(self) -> str:
        return RUN_ID

    def is_closed(self) -> bool:
        return False  # results end the run, not the rendezvous

    def set_closed(self) -> None:
        """Do nothing."""

    def get_backend(self) -> str:
        return "c10d"

    def shutdown(self) -> bool:
        return True  # the store ends with the process of its host


class NodeAgent(elastic.SimpleElasticAgent):
    """torch's agent, for workers of `tune run`, which have heartbeats and logs, and save and stop on a signal."""

    def __init__(self, spec: WorkerSpec, stop_requests: StopRequests) -> None:
        self.spec, self.stop_requests = spec, stop_requests
        self.rendezvous = NodeRendezvous(spec, stop_requests)
        options = {"max_restarts": spec.launch_config.restarts, "monitor_interval": POLL_SECONDS, "entrypoint": "tune"}
        size = spec.launch_config.nproc_per_node
        super().__init__(elastic.WorkerSpec("default", size, self.rendezvous, **options), LINGER_SECONDS)
        self.workers: WorkerGroup | None = None
        self.num_failures, self.num_signals = 0, 0
        self.result: RunResult | None = None  # of this node

    def _start_workers(self, worker_group: elastic.WorkerGroup) -> dict[int, Any]:
        self.rendezvous.check_records()
        first = worker_group.workers[0]
        info = self.rendezvous.describe_workers(first.global_rank, first.world_size)
        print_line(format_start_message(self.spec, info))
        self.result, self.workers = None, WorkerGroup(self.spec, info)
        return dict(enumerate(process.pid for process in self.workers.__enter__().processes))

    def _monitor_workers(self, worker_group: elastic.WorkerGroup) -> elastic.RunResult:
        """State of the workers of all nodes. A failure of another node is one of this node, too."""
        self.poll_workers()
        result = self.rendezvous.poll_result()
        if result is None:
            return elastic.RunResult(elastic.WorkerState.HEALTHY)
        if result.is_expected:
            values = {worker.global_rank: None for worker in worker_group.workers}
            return elastic.RunResult(elastic.WorkerState.SUCCEEDED, values)
        if result.kind == "hung" and self.workers is not None:
            print_line(self.workers.write_hang_report())  # the stalled rank may be on this node
        elif self.result is not None and self.result.kind == "hung" and self.result.text not in result.text:
            print_line(self.result.text)  # another node was the first to report it
        self.num_failures += 1
        if not can_restart(self.spec, result, self.num_failures):
            raise RunEnded(result.kind, result.code, result.text)
        return elastic.RunResult(elastic.WorkerState.FAILED)

    def poll_workers(self) -> None:
        """Publish the result of this node if its workers have ended."""
        received, backend = self.stop_requests.received, self.rendezvous.backend
        assert backend is not None
        if self.workers is None and len(received) > self.num_signals:
            raise RunEnded("interrupted", 128 + received[-1], "ended at once, before the other nodes")
        if self.workers is not None and (result := poll_workers(self.workers, self.stop_requests)) is not None:
            self._shutdown()
            self.result, self.num_signals = result, len(received)
            run_in_thread(lambda: backend.publish(result))

    def _stop_workers(self, worker_group: elastic.WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 0) -> None:
        if self.workers is not None:
            self.workers.__exit__()
            self.workers = None


def run_node(spec: WorkerSpec, stop_requests: StopRequests) -> RunResult:
    """Run the workers of this node until those of all nodes have ended."""
    logging.disable()  # torch logs errors of connections; the results name them
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the workers have a store of their own, on rank 0
    agent = NodeAgent(spec, stop_requests)
    try:
        agent.run()
        assert agent.result is not None
        result = agent.result
    except RunEnded as ended:
        result = ended.result
        if agent.rendezvous.num_starts:
            agent.rendezvous.leave()
    atexit.register(exit_at_once, result.code)
    return result


def exit_at_once(code: int) -> None:
    """End the process. Its normal end would abort if a thread returned from a network call meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
