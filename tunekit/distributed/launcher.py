"""Workers of this node: start, monitor, stop and restart them. Does not import torch.

If one rank ends, all are ended: the others could wait for it forever.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

from tunekit.distributed import flight_recorder, worker_env
from tunekit.distributed.flight_recorder import PREFIX, Recorders, recorder_variables
from tunekit.distributed.heartbeat import STACK_TIMEOUT_SECONDS, HeartbeatMonitor, find_stalled_rank, rank_status
from tunekit.distributed.launch_config import RendezvousInfo, RunResult, WorkerSpec
from tunekit.distributed.node_address import BACKLOG
from tunekit.distributed.signals import POLL_SECONDS, STOP, STOP_SIGNALS, StopFile, StopRequests, stop_reason
from tunekit.errors import UserError

LOGS = "logs"  # subdirectory of the output directory
GRACE_SECONDS = 2.0  # seconds for ranks to exit after one has failed
EXIT_SECONDS = 10.0  # seconds for a rank to exit after a UserError: Python exits slowly on a busy machine
USER_ERROR_PREFIX = f"{UserError.__name__}: "
SLOW_START_SECONDS = 15.0  # seconds after which the phase of a start is printed
START_PHASES = {"": "importing torch and the recipe", "prepare": "preparing rows", "load": "loading weights"}
MAX_LOG_LINES = 30  # lines of the log of a failed rank that are printed
RESTARTABLE = ("failed", "hung")  # kinds of results that are followed by a restart
RunFunction = Callable[[WorkerSpec, StopRequests], RunResult]  # of a run on one node, or on several
# Exit codes of ranks that end because another rank has failed.
SECONDARY_EXIT_CODES = {-signal.SIGABRT, -signal.SIGPIPE}


def print_line(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def tune_command(args: tuple[str, ...]) -> list[str]:
    """Command that runs `tune` with `args`."""
    return [sys.executable, "-P", "-m", "tunekit.cli", *args]


class WorkerGroup:
    """Worker processes of one start on this node."""

    def __init__(self, spec: WorkerSpec, info: RendezvousInfo) -> None:
        self.spec, self.info = spec, info
        self.monitor = HeartbeatMonitor(spec.launch_config.nproc_per_node)
        self.log_fds = [open_log(spec.output_dir, info, slot) for slot in range(spec.launch_config.nproc_per_node)]
        self.recorders: Recorders | None = None
        if spec.output_dir is not None:
            self.recorders = Recorders(spec.output_dir / LOGS, info.base_rank, spec.launch_config.nproc_per_node)
        self.log_offsets = [os.lseek(fd, 0, os.SEEK_END) for fd in self.log_fds]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sent_signals: list[signal.Signals] = []
        self.reported_phases: set[str] = set()

    def __enter__(self) -> "WorkerGroup":
        for slot in range(self.spec.launch_config.nproc_per_node):
            self.processes.append(self.start(slot))
        if self.info.listener_fd is not None:
            os.close(self.info.listener_fd)
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.monitor.close()
        if self.recorders is not None:
            self.recorders.close()
        for fd in self.log_fds:
            os.close(fd)

    def start(self, slot: int) -> subprocess.Popen[bytes]:
        """Start a rank in a session of its own; otherwise Ctrl-C in a terminal would reach it twice."""
        is_rank_0, log = self.info.base_rank + slot == 0, self.log_fds[slot]
        args = (*self.spec.args, *["--overwrite"] * (self.spec.overwrite and self.info.is_first_start))
        env = worker_environment(self.spec, self.info, slot) | self.monitor.environment(slot)
        env[worker_env.LOG] = str(log)
        inherited = [*self.monitor.files, log]
        if self.recorders is not None:
            env |= self.recorders.environment(slot)
            inherited += self.recorders.files
        if is_rank_0 and self.info.listener_fd is not None:
            inherited.append(self.info.listener_fd)
        return subprocess.Popen(
            tune_command(args),
            stdin=subprocess.DEVNULL,
            stdout=None if is_rank_0 else log,
            stderr=None if is_rank_0 else log,
            env=env,
            pass_fds=inherited,
            start_new_session=True,
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Forward a signal to all ranks."""
        self.sent_signals.append(number)
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Kill the remaining ranks and their child processes."""
        for process in self.processes:
            if process.poll() != 0:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def exit_codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def poll_result(self) -> RunResult | None:
        """Result if all ranks have succeeded or stopped, or one has failed; otherwise None."""
        codes = self.exit_codes()
        if all(is_expected_exit(code) for code in codes):
            return RunResult("stopped", max(filter(None, codes))) if any(codes) else RunResult("succeeded")
        failure_times = [heartbeat.failure_time for heartbeat in self.monitor.read_all()]
        has_overdue = any(0 < failure_time < time.monotonic() - GRACE_SECONDS for failure_time in failure_times)
        if has_overdue or not all(code is None or is_expected_exit(code) for code in codes):
            self.wait_for_exits()
            return self.find_cause()
        return None

    def wait_for_exits(self) -> None:
        """Wait for other ranks to exit after one has failed; they may be about to report the same UserError."""
        start_time = time.monotonic()
        while (elapsed := time.monotonic() - start_time) < EXIT_SECONDS:
            codes = self.exit_codes()
            is_exiting = any(code is None and self.has_user_error(slot) for slot, code in enumerate(codes))
            if not is_exiting and (elapsed > GRACE_SECONDS or not {2, None} <= set(codes)):
                return
            time.sleep(POLL_SECONDS)

    def has_user_error(self, slot: int) -> bool:
        """Whether a rank has exited, or is about to exit, with a UserError."""
        return self.exit_codes()[slot] == 2 or self.monitor.read_all()[slot].reason.startswith(USER_ERROR_PREFIX)

    def find_cause(self) -> RunResult:
        """Result of the rank that failed first. Killed ranks come first: they leave no failure time."""
        codes, heartbeats = self.exit_codes(), self.monitor.read_all()
        signal_numbers = [-code for code in codes if code is not None and -code in STOP_SIGNALS]
        if signal_numbers:  # sent by the user or a scheduler only
            name = stop_reason(signal.Signals(signal_numbers[0]), self.spec.output_dir and self.spec.output_dir / STOP)
            text = f"{name}: ended before the first step; nothing was changed"
            return RunResult("interrupted", 128 + signal_numbers[0], text)
        for slot, code in enumerate(codes):
            if code is not None and code < 0 and code not in SECONDARY_EXIT_CODES:
                return self.failure_result(slot)
        has_failed = [code is not None and not is_expected_exit(code) for code in codes]
        failed_slots = [slot for slot in range(len(codes)) if has_failed[slot] or heartbeats[slot].failure_time]
        first = min(failed_slots, key=lambda slot: heartbeats[slot].failure_time or float("inf"))
        return self.user_error_result(first) if self.has_user_error(first) else self.failure_result(first)

    def user_error_result(self, slot: int) -> RunResult:
        """Result with the message of a UserError; empty if rank 0 has printed it."""
        is_printed = len(self.info.node_names) < 2 and self.exit_codes()[0] == 2
        return RunResult("user_error", 2, "" if is_printed else self.monitor.read_all()[slot].reason.partition(": ")[2])

    def failure_result(self, slot: int) -> RunResult:
        rank, code = self.info.base_rank + slot, self.exit_codes()[slot]
        for line in self.read_log_tail(slot):
            print_line(f"rank {rank}: {line}")
        reason = self.monitor.read_all()[slot].reason
        if code is not None and code < 0:
            message = f"was killed by {signal.Signals(-code).name}"
            message += " (the system may be out of memory)" if code == -signal.SIGKILL else ""
        else:
            message = f"failed: {reason}" if reason else f"ended with exit code {code}"
        return RunResult("failed", 1, f"rank {rank} {message}")

    def read_log_tail(self, slot: int) -> list[str]:
        """Last lines of the log of a rank, since its start."""
        file, offset = self.log_fds[slot], self.log_offsets[slot]
        text = os.pread(file, os.fstat(file).st_size - offset, offset).decode(errors="replace")
        return text.splitlines()[-MAX_LOG_LINES:]

    def get_start_message(self) -> str | None:
        """Message about a slow phase of rank 0 before its first step, once per phase."""
        phase = self.monitor.read_all()[0].phase
        is_slow = time.monotonic() - self.monitor.start_time >= SLOW_START_SECONDS
        if phase not in START_PHASES or phase in self.reported_phases or not is_slow:
            return None
        self.reported_phases.add(phase)
        return f"still starting: {START_PHASES[phase]}" if self.info.base_rank == 0 else None

    def poll_hang(self) -> RunResult | None:
        """Result with a report if no rank has made progress within the timeout."""
        return RunResult("hung", 1, self.write_hang_report()) if self.monitor.is_stalled(self.spec.timeout) else None

    def write_hang_report(self) -> str:
        """Report of the position of each running rank, from its stack. Writes all stacks to a file."""
        base, heartbeats = self.info.base_rank, self.monitor.read_all()
        running = [slot for slot, code in enumerate(self.exit_codes()) if code is None]
        stacks = self.monitor.dump_stacks([self.processes[slot].pid for slot in running])
        statuses = [rank_status(base + slot, heartbeats[slot], stacks[slot]) for slot in running]
        text = find_stalled_rank(statuses, self.spec.timeout)
        if self.spec.output_dir is None or self.recorders is None:
            return text
        self.recorders.request(STACK_TIMEOUT_SECONDS)
        file = self.spec.output_dir / LOGS / f"stacks-{base}.txt"
        file.write_text("\n".join(f"rank {base + slot}\n{stack}" for slot, stack in enumerate(stacks)))
        text = f"{text}; stacks of all ranks: {file}"
        ranks = [base + slot for slot in running]
        return "\n".join([text, *flight_recorder.quote_dumps(self.spec.output_dir / LOGS, ranks)])


def worker_environment(spec: WorkerSpec, info: RendezvousInfo, slot: int) -> dict[str, str]:
    """Environment of a rank: variables of torchrun and `tune run`. OMP_NUM_THREADS defaults to cores per rank."""
    rank = info.base_rank + slot
    values = {"RANK": rank, "LOCAL_RANK": slot, "WORLD_SIZE": info.world_size}
    values |= {"LOCAL_WORLD_SIZE": spec.launch_config.nproc_per_node}
    values |= {"MASTER_ADDR": info.master_addr, "MASTER_PORT": info.master_port, worker_env.PARENT: os.getpid()}
    values |= {"GROUP_WORLD_SIZE": max(1, len(info.node_names))}
    if rank == 0 and info.listener_fd is not None:
        values[worker_env.LISTENER] = info.listener_fd
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // spec.launch_config.nproc_per_node))}
    gloo = {"GLOO_SOCKET_IFNAME": info.interface} if info.interface else {}
    recorder = {} if spec.output_dir is None else recorder_variables(spec.output_dir / LOGS / PREFIX, os.environ)
    return threads | gloo | recorder | dict(os.environ) | {name: str(value) for name, value in values.items()}


def is_expected_exit(code: int | None) -> bool:
    """Whether a rank has succeeded, or has saved and stopped on a signal."""
    return code == 0 or (code is not None and code - 128 in STOP_SIGNALS)


def open_log(output_dir: Path | None, info: RendezvousInfo, slot: int) -> int:
    """Open the log of a rank. Rank 0 prints to the terminal, and its log contains errors only."""
    if output_dir is None:
        return os.memfd_create("log")
    (output_dir / LOGS).mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if info.is_first_start else 0)
    return os.open(output_dir / LOGS / f"rank-{info.base_rank + slot}.log", flags, 0o644)


def launch_workers(spec: WorkerSpec, stop_requests: StopRequests, run: RunFunction) -> None:
    """Run the workers of this node with `run`. SystemExit unless they succeed."""
    with nullcontext() if spec.output_dir is None else StopFile(spec.output_dir):
        result = run(spec, stop_requests)
    if result.kind == "user_error" and result.text:
        raise UserError(result.text)
    if result.text:
        has_hint = result.kind in RESTARTABLE and not spec.launch_config.restarts
        print_line(result.text + "; --max-restarts N restarts it automatically" * has_hint)
    if result.code:
        raise SystemExit(result.code)


def run_single_node(spec: WorkerSpec, stop_requests: StopRequests) -> RunResult:
    """Start all workers of a run on one node, and restart them up to `max_restarts` times."""
    for start in count():
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        size, port = spec.launch_config.nproc_per_node, listener.getsockname()[1]
        info = RendezvousInfo(0, size, "127.0.0.1", port, listener.detach(), is_first_start=start == 0)
        print_line(format_start_message(spec, info))
        with WorkerGroup(spec, info) as workers:
            while (result := poll_workers(workers, stop_requests)) is None:
                time.sleep(POLL_SECONDS)
        if not can_restart(spec, result, start + 1):
            return result
    raise AssertionError


def can_restart(spec: WorkerSpec, result: RunResult, num_failures: int) -> bool:
    """Whether a restart follows, which is printed. User errors and stop requests are not followed by one."""
    restarts = spec.launch_config.restarts
    if result.kind not in RESTARTABLE or num_failures > restarts:
        return False
    print_line(f"{result.text}\nstarting again from the last complete state (restart {num_failures} of {restarts})")
    return True


def poll_workers(workers: WorkerGroup, stop_requests: StopRequests) -> RunResult | None:
    """Result of the workers of this node, if any. Forwards signals, and prints messages about slow starts."""
    if (message := workers.get_start_message()) is not None:
        print_line(message)
    if len(stop_requests.received) > 1:
        number = stop_requests.received[-1]
        return RunResult("interrupted", 128 + number, f"{number.name} again: ended at once")
    if stop_requests.received and not workers.sent_signals:
        workers.send_signal(stop_requests.received[0])
    return workers.poll_result() or workers.poll_hang()


def format_start_message(spec: WorkerSpec, info: RendezvousInfo) -> str:
    """Message with the number of processes and the nodes."""
    count = spec.launch_config.nproc_per_node
    message = f"starting {count} process{'es' * (count > 1)}"
    if len(info.node_names) > 1:
        message += f" of {info.world_size} on {len(info.node_names)} nodes: {', '.join(info.node_names)}"
    return message


def check_in_subprocess(args: tuple[str, ...], stop_requests: StopRequests) -> dict[str, Any]:
    """Check a run in a process that may import torch. Returns its report; raises its UserError."""
    read, write = os.pipe()
    env = {**os.environ, worker_env.REPORT: f"{write}:{os.getpid()}"}
    process = subprocess.Popen(tune_command(args), stdin=subprocess.DEVNULL, env=env, pass_fds=[write], process_group=0)
    os.close(write)
    while process.poll() is None:
        if stop_requests.received:
            process.kill()
            process.wait()
            print_line(f"{stop_requests.received[0].name}: ended before the first step; nothing was changed")
            raise SystemExit(128 + stop_requests.received[0])
        time.sleep(POLL_SECONDS)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    if process.returncode:  # an exception, which the process has printed
        raise SystemExit(1)
    report = json.loads(text)
    if "mistake" in report:
        raise UserError(report["mistake"])
    return report
