"""A Hub on loopback, and `tune` in processes of its own, which talk with it through the client as it is installed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from tests.hub.server import Hub, User
from tests.outcome import Outcome
from tests.waiting import LIMIT

TOKEN, GUEST, READER = "hf_annsOwnSecretToken", "hf_bobsToken", "hf_annsTokenThatOnlyReads"
USERS = {TOKEN: User("ann", orgs=("acme",)), GUEST: User("bob"), READER: User("ann", writes=False)}
# Imports what takes long, once, and forks a process for each command. The client of the Hub reads its environment when
# it is imported: that has to happen in the child.
PROGRAM = """
import json, os, sys
import torch._dynamo, tunekit.checkpoint.save_model, tunekit.config.dump
import tunekit.data.tokenizer, tunekit.generation.generate
import tunekit.recipes
from tunekit.cli import main as cli
assert "huggingface_hub" not in sys.modules
for line in sys.stdin:
    told = json.loads(line)
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["folder"])
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(told[name], os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0)
    code = cli.main(told["words"])
    sys.stdout.flush()
    os._exit(code)  # to take apart all that was imported takes longer than most commands
"""


@dataclass
class Place:
    """A folder to work in, an account and a cache of the Hub of its own."""

    folder: Path
    hub: Hub
    zygote: subprocess.Popen[str]
    count: int = 0
    said: list[str] = field(default_factory=list)

    def env(self, **changes: str) -> dict[str, str]:
        """The environment of a command; an empty value takes a variable out."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        own = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.folder / "home"), "HF_TOKEN": TOKEN}
        own |= {"HF_HUB_DISABLE_XET": "1", "HF_XET_XORB_COMPRESSION_POLICY": "none", "OMP_NUM_THREADS": "1"}
        own |= {"TUNEKIT_HUB_TIMEOUT": str(LIMIT)}  # a Hub that is held, or a machine that is busy, is not silent
        return {key: value for key, value in (clean | own | changes).items() if value}

    def start(self, *words: str, text: str = "", **env: str) -> int:
        """Start `tune`; the id of its process."""
        self.count += 1
        told = {name: str(self.folder / f"{self.count}.{name}") for name in ("in", "out", "err")}
        Path(told["in"]).write_text(text)
        told |= {"words": words, "env": self.env(**env), "folder": str(self.folder)}  # type: ignore
        pipe(self.zygote.stdin).write(json.dumps(told) + "\n")
        pipe(self.zygote.stdin).flush()
        return int(pipe(self.zygote.stdout).readline())

    def end(self) -> Outcome:
        """Wait for what was started."""
        code = int(pipe(self.zygote.stdout).readline())
        out, err = ((self.folder / f"{self.count}.{name}").read_text() for name in ("out", "err"))
        self.said += [out, err]
        return Outcome(code, out, err)

    def tune(self, *words: str, text: str = "", **env: str) -> Outcome:
        self.start(*words, text=text, **env)
        return self.end()

    def search(self, secret: str) -> list[str]:
        """Where a word stands that nobody may see: in what was printed, and in all files of the folder."""
        found = [text for text in self.said if secret in text]
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return found + [str(path) for path in files if secret.encode() in path.read_bytes()]


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process
        pipe(process.stdin).close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(dict(USERS)) as hub:
        yield hub


@pytest.fixture
def place(tmp_path: Path, hub: Hub, zygote: subprocess.Popen[str]) -> Place:
    return Place(tmp_path, hub, zygote)
