"""Launch the workers of a run, monitor and restart them. Does not import torch."""

import json
import os
import subprocess
import time
from typing import Any

from tunekit.distributed import worker_env
from tunekit.distributed.launch_config import RendezvousInfo, RunResult, WorkerSpec
from tunekit.distributed.launcher import WorkerGroup, print_line, tune_command
from tunekit.distributed.rendezvous import MultiNodeRendezvous, SingleNodeRendezvous
from tunekit.distributed.signals import POLL_SECONDS, StopRequests
from tunekit.errors import UserError

RESTARTABLE = ("failed", "hung")  # kinds of results that are followed by a restart


def launch_workers(spec: WorkerSpec, stop_requests: StopRequests) -> None:
    """Start all workers, and restart them up to `max_restarts` times. SystemExit unless they succeed.

    User errors and stop requests are not followed by a restart.
    """
    restarts = spec.launch_config.restarts
    stop_requests.watch_file(spec.output_dir)
    with (MultiNodeRendezvous if spec.launch_config.nodes > 1 else SingleNodeRendezvous)(spec) as rendezvous:
        result = run_once(spec, 0, stop_requests, rendezvous)
        for start in range(1, restarts + 1):
            if result.kind not in RESTARTABLE:
                break
            print_line(f"{result.text}\nstarting again from the last complete state (restart {start} of {restarts})")
            result = run_once(spec, start, stop_requests, rendezvous)
    if result.kind == "user_error" and result.text:
        raise UserError(result.text)
    if result.text:
        hint = "; --max-restarts N restarts it automatically" if result.kind in RESTARTABLE and not restarts else ""
        print_line(result.text + hint)
    if result.code:
        raise SystemExit(result.code)


def run_once(
    spec: WorkerSpec, start: int, stop_requests: StopRequests, rendezvous: MultiNodeRendezvous | SingleNodeRendezvous
) -> RunResult:
    """Run all workers once."""
    info = rendezvous.next_rendezvous(start, stop_requests)
    if isinstance(info, RunResult):
        return info
    print_line(format_start_message(spec, info))
    with WorkerGroup(spec, info) as workers:
        local_result = monitor_workers(workers, stop_requests, rendezvous)
    result = rendezvous.report_result(local_result, stop_requests)
    if local_result.kind == "hung" and local_result.text not in result.text:  # another node was the first to report it
        print_line(local_result.text)
    return result


def monitor_workers(
    workers: WorkerGroup, stop_requests: StopRequests, rendezvous: MultiNodeRendezvous | SingleNodeRendezvous
) -> RunResult:
    """Wait for the result of this or another node. Forwards signals, and prints messages about slow starts."""
    while True:
        if (message := workers.get_start_message()) is not None:
            print_line(message)
        stop_requests.poll_file()
        if len(stop_requests.received) > 1:
            number = stop_requests.received[-1]
            return RunResult("interrupted", 128 + number, f"{number.name} again: ended at once")
        if stop_requests.received and not workers.sent_signals:
            workers.send_signal(stop_requests.received[0])
        result = workers.poll_result() or workers.poll_hang()
        if result is not None:
            return result
        if (result := rendezvous.poll_result()) is not None:
            if result.kind == "hung":  # the stalled rank may be on this node
                print_line(workers.write_hang_report())
            return result
        time.sleep(POLL_SECONDS)


def format_start_message(spec: WorkerSpec, info: RendezvousInfo) -> str:
    """Message with the number of processes and the nodes."""
    count = spec.launch_config.nproc_per_node
    message = f"starting {count} process{'es' * (count > 1)}"
    if len(info.node_names) > 1:
        message += f" of {info.world_size} on {len(info.node_names)} machines: {', '.join(info.node_names)}"
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
