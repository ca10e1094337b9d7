"""Names to folders. The Hub is a small server here; its client and the command are the real ones."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tunekit import bundled
from tunekit.errors import UserError
from tunekit.hub import fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_never_show_me"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(1000),
    "tokenizer.json": b"{}",
    "pytorch_model.bin": bytes(10),
    "original/params.json": b"{}",
    "consolidated.safetensors": b"the same weights again",
}
ERRORS = {
    "owner/missing": (404, "RepoNotFound"),
    "owner/private": (401, ""),
    "owner/gated": (401, "GatedRepo"),
    "owner/refused": (403, "GatedRepo"),
    "owner/broken": (418, ""),
}


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's interface that reads one model, and the ways in which it refuses others."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        rest = path.removeprefix("api/models/").removeprefix(name).strip("/")
        if name in ERRORS:
            code, kind = ERRORS[name]
            self.reply(code, b"{}", {"X-Error-Code": kind} if kind else {})
        elif rest == "revision/nope":
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif rest.startswith("revision/"):
            siblings = [{"rfilename": file} for file in FILES]
            self.reply(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
        elif rest.startswith("tree/"):
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": digest(data)} for path, data in FILES.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif not rest:  # something else that the client asks for beside the model
            self.reply(404, b"{}")
        else:
            data = FILES[rest.removeprefix(f"resolve/{COMMIT}/")]
            self.reply(200, data, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def digest(data: bytes) -> str:
    return sha1(data).hexdigest()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def download(endpoint: str, home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`tune download`, with an empty cache of its own."""
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    tune = Path(sys.executable).with_name("tune")
    env = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN, **env}
    return subprocess.run([tune, "download", *words], env=env, capture_output=True, text=True, timeout=60)


def fetched(done: subprocess.CompletedProcess[str]) -> dict[str, bytes]:
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.strip())
    paths = [path for path in place.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in paths}


def test_what_the_toolkit_reads_is_fetched_once(endpoint: str, tmp_path: Path) -> None:
    done = download(endpoint, tmp_path, "owner/model")
    wanted = {"config.json", "model.safetensors", "tokenizer.json"}
    assert fetched(done) == {name: FILES[name] for name in wanted} and "3 files" in done.stderr
    offline = download(endpoint, tmp_path, "owner/model", HF_HUB_OFFLINE="1")
    assert fetched(offline) == fetched(done)
    assert TOKEN not in done.stdout + done.stderr


def test_files_can_be_chosen(endpoint: str, tmp_path: Path) -> None:
    here = str(tmp_path / "here")
    done = download(endpoint, tmp_path, "owner/model", "--include", "*.bin", "--include", "original/*", "--to", here)
    assert done.stdout.strip() == here and set(fetched(done)) == {"pytorch_model.bin", "original/params.json"}
    assert set(fetched(download(endpoint, tmp_path, "owner/model", "--exclude", "*.json"))) == {"model.safetensors"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["owner/missing"], "no model 'owner/missing'"),
        (["owner/private"], "hf auth login"),
        (["owner/gated"], "accept its terms at http"),
        (["owner/refused"], "accept its terms at http"),
        (["owner/broken"], "answered 418"),
        (["owner/model", "--revision", "nope"], "no revision 'nope'"),
        (["owner/model", "--include", "*.gguf"], "no such file"),
        (["own er/model"], "neither a folder nor a name"),
        (["owner/model", "--token", f"{TOKEN}\n"], "token holds characters"),
    ],
)
def test_a_refusal_is_one_line(words: list[str], says: str, endpoint: str, tmp_path: Path) -> None:
    done = download(endpoint, tmp_path, *words)
    told = [line for line in done.stderr.splitlines() if not line.startswith(("Fetching", "\r"))]
    assert done.returncode == 2 and not done.stdout
    assert len([line for line in told if line.startswith("error: ")]) == 1 and says in told[-1], done.stderr
    assert TOKEN not in done.stderr and "Traceback" not in done.stderr


def test_no_network_and_an_empty_cache(endpoint: str, tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" in download(endpoint, tmp_path, "owner/model", HF_HUB_OFFLINE="1").stderr
    nobody = "http://127.0.0.1:1"
    done = download(nobody, tmp_path, "owner/model")
    assert done.returncode == 2 and f"{nobody} cannot be reached" in done.stderr


def test_a_folder_comes_before_any_other_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert fetch.resolve("owner/model") == Path("owner/model")
    for name, folder in bundled.MODELS.items():
        assert fetch.resolve(name) == folder


@pytest.mark.parametrize("path", ["./nope", "../nope", "/nope", "~/nope", "a/b/c", "a\\b"])
def test_a_path_that_is_not_there_is_never_looked_up(path: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        fetch.resolve(path)
