"""`tune run` whose ranks are forks of the launcher instead of new Python processes, which import torch for seconds.

The launcher is itself a fork of a process with all imports done.
"""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace

from tests.helpers import plain_plots
from tests.helpers.command_result import CommandResult
from tests.helpers.forkserver import start_forkserver
from tests.helpers.wait import TIMEOUT_SECONDS
from tunekit.cli import main as cli
from tunekit.distributed import launcher

NUM_PYTHON_ARGS = len(launcher.tune_command(()))


class ForkedProcess:
    """A replacement for `subprocess.Popen` that runs `tune` in a fork of this process."""

    def __init__(  # noqa: PLR0913
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        pass_fds: Iterable[int],
        stdin: int,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
        process_group: int | None = None,
    ) -> None:
        assert stdin == subprocess.DEVNULL
        self.returncode: int | None = None
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            elif process_group is not None:
                os.setpgid(0, process_group)
            os.close(reader)
            os.close(writer)
            redirect_files(stdout, stderr)
            reset_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.environ.clear()
            os.environ.update(env)
            run_and_exit(command[NUM_PYTHON_ARGS:])
        os.close(writer)
        os.read(reader, 1)  # as after `Popen`, the process has its own session: signals to the session reach it
        os.close(reader)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def redirect_files(stdout: int | None, stderr: int | None) -> None:
    """Redirect the standard files. All others are inherited."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, file in ((1, stdout), (2, stderr)):
        if file is not None:
            os.dup2(file, target)


def reset_signals() -> None:
    """Remove the signal handlers of the launcher, as a new program does."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_and_exit(args: Sequence[str]) -> None:
    """Run `tune` and end the process with its exit code."""
    code: object = 1
    try:
        code = cli.main(args)
    except SystemExit as exit_request:
        code = exit_request.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def run_launcher(folder: Path, args: Sequence[str], environment: dict[str, str]) -> None:
    """Run `tune` in a directory. Its output, and that of rank 0, is written to the files `stdout` and `stderr`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    os.environ.clear()  # those of the server
    os.environ.update(environment)
    os.chdir(folder)
    redirect_files(*(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in ("stdout", "stderr")))
    plain_plots.replace_plots()
    launcher.subprocess = SimpleNamespace(Popen=ForkedProcess, DEVNULL=subprocess.DEVNULL)
    sys.exit(cli.main(args))


def start_tune(folder: Path, *args: str) -> ForkServerProcess:
    """Start `tune` in a directory, with the environment of this process."""
    process = start_forkserver().Process(target=run_launcher, args=(folder, args, dict(os.environ)), daemon=True)
    process.start()
    return process


def end_tune(process: ForkServerProcess, folder: Path, limit: float = TIMEOUT_SECONDS) -> CommandResult:
    """Wait for `tune`."""
    process.join(limit)
    code = process.exitcode
    process.kill()
    assert code is not None, "timeout"
    return CommandResult(code, (folder / "stdout").read_text(), (folder / "stderr").read_text())
