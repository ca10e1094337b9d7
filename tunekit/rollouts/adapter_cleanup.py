"""Unloads an adapter from a server when the run that loaded it is done with it, or has ended in any way.

`python -m tunekit.rollouts.adapter_cleanup` reads the task from stdin, and then waits for another line, or for the end
of stdin, which the system closes when the run is killed. Does not import torch.
"""

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from tunekit.rollouts.http_request import ResponseTooLargeError
from tunekit.rollouts.openai_client import OpenAIClient

MAX_SECONDS = 10.0  # of a request to unload
ATTEMPTS, DELAY = 10, 1.0  # if the run was killed: the server may still be loading the adapter


@dataclass(frozen=True)
class Task:
    """Which adapter to unload, and its directory."""

    base_url: str
    api_key_env: str
    timeout_seconds: float
    name: str
    path: str

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def run(self, attempts: int) -> None:
        """Unload the adapter, and delete its directory. A server that was restarted has forgotten it."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(DELAY)
            if self.unload():
                break
        shutil.rmtree(self.path, ignore_errors=True)

    def unload(self) -> bool:
        """Whether the server has unloaded it."""
        client = OpenAIClient("engine", self.base_url, self.api_key_env, min(self.timeout_seconds, MAX_SECONDS), 0)
        try:
            return client.send("unload_lora_adapter", {"lora_name": self.name}).status == 200
        except (OSError, HTTPException, ResponseTooLargeError):
            return False


class AdapterCleanup:
    """Process that unloads an adapter from the server and deletes its directory, however this process ends.

    It waits for the end of its stdin, which the system closes when this process is killed.
    """

    def __init__(self, client: OpenAIClient, name: str, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and a launcher that kills its ranks do not reach it
        )
        task = Task(client.base_url, client.api_key_env, client.timeout_seconds, name, str(path))
        self.write(task.to_line())

    def finish(self) -> None:
        """Let it end, and wait for that."""
        self.write(b"finish\n")
        with suppress(OSError):
            self.stdin.close()
        self.process.wait()

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def write(self, line: bytes) -> None:
        with suppress(OSError):  # it was killed
            self.stdin.write(line)
            self.stdin.flush()


def main() -> None:
    task = Task(**json.loads(sys.stdin.readline()))
    is_finished = bool(sys.stdin.readline())
    task.run(1 if is_finished else ATTEMPTS)


if __name__ == "__main__":
    main()
