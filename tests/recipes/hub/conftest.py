"""A local Hub, and `tune` commands in separate processes, which use the real Hub client."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from tests.helpers.command_result import CommandResult
from tests.helpers.forkserver import ROOT
from tests.helpers.hub.server import Hub, User
from tests.helpers.wait import TIMEOUT_SECONDS

TOKEN, BOB_TOKEN, READ_TOKEN = "hf_annsOwnSecretToken", "hf_bobsToken", "hf_annsTokenThatOnlyReads"
USERS = {TOKEN: User("ann", orgs=("acme",)), BOB_TOKEN: User("bob"), READ_TOKEN: User("ann", writes=False)}


@dataclass
class Sandbox:
    """A working directory with a Hub account and a Hub cache of its own."""

    directory: Path
    hub: Hub
    zygote: subprocess.Popen[str]
    count: int = 0
    child: int = 0  # process id of the running command
    outputs: list[str] = field(default_factory=list)

    def env(self, **changes: str) -> dict[str, str]:
        """Environment of a command. Empty values remove variables."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        hub_variables = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.directory / "home"), "HF_TOKEN": TOKEN}
        hub_variables |= {"HF_HUB_DISABLE_XET": "1", "HF_XET_XORB_COMPRESSION_POLICY": "none", "OMP_NUM_THREADS": "1"}
        hub_variables["SSL_CERT_DIR"] = str(self.directory)  # has none: each client would load all of the system
        hub_variables |= {
            "TUNEKIT_HUB_TIMEOUT": str(TIMEOUT_SECONDS)
        }  # a delayed Hub or a busy machine must not time out
        return {key: value for key, value in (inherited | hub_variables | changes).items() if value}

    def start(self, *args: str, text: str = "", code: str = "", **env: str) -> int:
        """Start `tune`, or a Python program, and return its process id."""
        self.count += 1
        request = {name: str(self.directory / f"{self.count}.{name}") for name in ("in", "out", "err")}
        Path(request["in"]).write_text(text)
        request |= {"words": args, "code": code, "env": self.env(**env), "folder": str(self.directory)}  # type: ignore
        require_pipe(self.zygote.stdin).write(json.dumps(request) + "\n")
        require_pipe(self.zygote.stdin).flush()
        self.child = int(require_pipe(self.zygote.stdout).readline())
        return self.child

    def end(self) -> CommandResult:
        """Wait for the started command."""
        code = self.wait()
        out, err = ((self.directory / f"{self.count}.{name}").read_text() for name in ("out", "err"))
        self.outputs += [out, err]
        return CommandResult(code, out, err)

    def wait(self) -> int:
        """Exit code of the started command when it has ended."""
        code = int(require_pipe(self.zygote.stdout).readline())
        self.child = 0
        return code

    def close(self) -> None:
        """End a command that a failed test has left, or the next test would read its exit code."""
        if self.child:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self.child, signal.SIGKILL)
            self.wait()

    def tune(self, *args: str, text: str = "", **env: str) -> CommandResult:
        self.start(*args, text=text, **env)
        return self.end()

    def run_python(self, code: str, *args: str) -> CommandResult:
        """Run a Python program."""
        self.start(*args, code=code)
        return self.end()

    def search(self, secret: str) -> list[str]:
        """Find outputs and files that contain a secret."""
        outputs = [text for text in self.outputs if secret in text]
        files = (path for path in self.directory.rglob("*") if path.is_file())
        return outputs + [str(path) for path in files if secret.encode() in path.read_bytes()]


def require_pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """Server of tests/helpers/hub/command_server.py."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.hub.command_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=env, cwd=ROOT) as process:
        yield process
        require_pipe(process.stdin).close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(dict(USERS)) as hub:
        yield hub


@pytest.fixture
def sandbox(tmp_path: Path, hub: Hub, zygote: subprocess.Popen[str]) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path, hub, zygote)
    yield sandbox
    sandbox.close()
