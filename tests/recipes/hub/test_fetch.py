"""Downloads from a Hub with failures, through the real client."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from tests.helpers.command_result import CommandResult
from tests.helpers.hub.http_handler import Fault
from tests.helpers.wait import TIMEOUT_SECONDS, wait_until
from tests.recipes.hub.conftest import BOB_TOKEN, TOKEN, Sandbox
from tunekit import assets
from tunekit.errors import UserError
from tunekit.hub import download

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(1000),
    "tokenizer.json": b"{}",
    "README.md": b"---\nlicense: mit\n---\n",
    "pytorch_model.bin": bytes(10),
    "original/params.json": b"{}",
    "consolidated.safetensors": b"the same weights again",
}
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "README.md")
LARGE = 30_000_000


def downloaded_files(outcome: CommandResult) -> dict[str, bytes]:
    assert outcome.code == 0, outcome.err
    directory = Path(outcome.out.strip())
    paths = [path for path in directory.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def sent_bytes(sandbox: Sandbox) -> int:
    """Bytes of large files that the Hub sent."""
    return sum(seen.sent for seen in sandbox.hub.seen("GET", "/storage/"))


def test_only_needed_files_are_downloaded_once(sandbox: Sandbox) -> None:
    repo = sandbox.hub.put("owner/model", FILES)
    done = sandbox.tune("download", "owner/model")
    assert downloaded_files(done) == {name: FILES[name] for name in NEEDED} and "4 files" in done.err
    assert Path(done.out.strip()).name == repo.refs["main"] == download.cached_commit(Path(done.out.strip()))
    sandbox.hub.log.clear()
    assert sandbox.tune("download", "owner/model").out == sandbox.tune("download", "owner/model@main").out == done.out
    assert not sandbox.hub.seen(path="/resolve/") and not sandbox.hub.seen(path="/storage/")
    sandbox.hub.log.clear()
    offline = sandbox.tune("download", "owner/model", HF_HUB_OFFLINE="1")
    assert downloaded_files(offline) == downloaded_files(done) and not sandbox.hub.log
    assert not sandbox.search(TOKEN)


def test_installed_command_downloads(sandbox: Sandbox) -> None:
    sandbox.hub.put("owner/model", FILES)
    tune = Path(sys.executable).with_name("tune")
    done = subprocess.run([tune, "download", "owner/model"], env=sandbox.env(), capture_output=True, text=True)
    assert downloaded_files(CommandResult(done.returncode, done.stdout, done.stderr)).keys() == set(NEEDED)


def test_include_and_exclude_select_files(sandbox: Sandbox) -> None:
    sandbox.hub.put("owner/model", FILES)
    args = ("--include", "*.bin", "--include", "original/*", "--local-dir", "here")
    done = sandbox.tune("download", "owner/model", *args)
    assert done.out == f"{sandbox.directory / 'here'}\n" and set(downloaded_files(done)) == {
        "pytorch_model.bin",
        "original/params.json",
    }
    excluded = sandbox.tune("download", "owner/model", "--exclude", "*.json", "--exclude", "*.md")
    assert set(downloaded_files(excluded)) == {"model.safetensors"}


@pytest.mark.parametrize("to", [(), ("--local-dir", "here")])
def test_download_resumes_after_a_closed_connection(to: tuple[str, ...], sandbox: Sandbox) -> None:
    """The client requests only the remaining bytes."""
    data = {"model.safetensors": os.urandom(LARGE), "config.json": b"{}"}
    sandbox.hub.put("ann/large", data, private=True)
    sandbox.hub.faults = [
        Fault("HEAD", "/resolve/.*safetensors", 503),
        Fault("GET", "/storage/", cut="reply", at=12_000_000),
        Fault("GET", "/storage/", 429, {"Retry-After": "0"}),
    ]
    assert (
        downloaded_files(sandbox.tune("download", "ann/large", *to)) == data
        and sent_bytes(sandbox) < LARGE + 12_000_000
    )
    ranges = [seen.range or "bytes=0-" for seen in sandbox.hub.seen("GET", "/storage/")]
    assert ranges[0] == "bytes=0-" and "bytes=0-" not in ranges[1:] and len(ranges) == 3
    assert not any(fault.times for fault in sandbox.hub.faults)
    assert not any(seen.token for seen in sandbox.hub.seen(path="/storage/"))


@pytest.mark.parametrize("to", [(), ("--local-dir", "here")])
def test_reset_connection_repeats_only_its_file(to: tuple[str, ...], sandbox: Sandbox) -> None:
    data = {"a.safetensors": os.urandom(LARGE // 3), "b.safetensors": os.urandom(LARGE // 3), "config.json": b"{}"}
    repo = sandbox.hub.put("ann/large", data)
    oid = repo.commits[repo.refs["main"]].files["b.safetensors"].sha256
    sandbox.hub.faults = [
        Fault("GET", f"/storage/.*{oid}", cut="reply", at=7_000_000, reset=True),
        Fault("GET", f"/storage/.*{oid}", 503),
    ]
    done = sandbox.tune("download", "ann/large", *to)
    assert downloaded_files(done) == data and "503" in done.err
    assert len([seen for seen in sandbox.hub.seen("GET", "/storage/") if oid not in seen.path]) == 1


def test_incomplete_file_is_downloaded_again(sandbox: Sandbox) -> None:
    """A proxy ends the reply early, but in a way that is complete for HTTP."""
    sandbox.hub.put("owner/model", FILES)
    sandbox.hub.faults = [Fault("GET", "/resolve/.*tokenizer", 200, body="{")]
    done = sandbox.tune("download", "owner/model")
    assert downloaded_files(done) == {name: FILES[name] for name in NEEDED} and "incomplete" in done.err
    assert not any(fault.times for fault in sandbox.hub.faults) and "force_download" not in done.err


def test_progress_renews_the_retries(sandbox: Sandbox) -> None:
    """More failures than attempts, but a file is completed between any two of them."""
    data = {f"{number}.safetensors": os.urandom(1000) for number in range(8)}
    repo = sandbox.hub.put("ann/shards", data)
    blobs = repo.commits[repo.refs["main"]].files
    sandbox.hub.faults = [Fault("GET", f"/storage/.*{blobs[name].sha256}", 503) for name in data]
    assert downloaded_files(sandbox.tune("download", "ann/shards")) == data
    assert not any(fault.times for fault in sandbox.hub.faults)


def test_sigkill_keeps_complete_files(sandbox: Sandbox) -> None:
    data = {"model.safetensors": os.urandom(LARGE), "config.json": b"{}"}
    commit = sandbox.hub.put("ann/large", data).refs["main"]
    config = sandbox.directory / "home/hub/models--ann--large/snapshots" / commit / "config.json"
    may_continue = Event()
    sandbox.hub.faults = [Fault("GET", "/storage/", cut="reply", at=20_000_000, until=may_continue)]
    child = sandbox.start("download", "ann/large")
    wait_until(lambda: config.exists() and sandbox.hub.seen("GET", "/storage/"))
    os.kill(child, signal.SIGKILL)
    may_continue.set()
    assert sandbox.end().code == -signal.SIGKILL
    assert downloaded_files(sandbox.tune("download", "ann/large")) == data
    assert len(sandbox.hub.seen("GET", "/resolve/.*config.json")) == 1


@pytest.mark.parametrize("to", [(), ("--local-dir", "here")])
def test_damaged_file_is_deleted(to: tuple[str, ...], sandbox: Sandbox) -> None:
    repo = sandbox.hub.put("ann/large", {"model.safetensors": (data := os.urandom(LARGE))})
    (oid,) = repo.objects
    repo.objects[oid] = data[:-1] + bytes([data[-1] ^ 1])
    assert "model.safetensors" in sandbox.tune("download", "ann/large", *to).error
    repo.objects[oid] = data
    assert downloaded_files(sandbox.tune("download", "ann/large", *to)) == {"model.safetensors": data}


@pytest.mark.slow
def test_concurrent_downloads_fetch_a_large_file_once(sandbox: Sandbox) -> None:
    data = {"model.safetensors": os.urandom(LARGE)}
    sandbox.hub.put("ann/large", data)
    may_continue = Event()
    sandbox.hub.faults = [Fault("GET", "/storage/", cut="reply", at=15_000_000, until=may_continue)]
    tune = [Path(sys.executable).with_name("tune"), "download", "ann/large"]
    env = sandbox.env(HF_HUB_DOWNLOAD_TIMEOUT=str(int(TIMEOUT_SECONDS)))
    both = [subprocess.Popen(tune, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    wait_until(lambda: len(sandbox.hub.seen("HEAD", "/resolve/")) == 2, *both)  # the client takes the lock after this
    may_continue.set()
    for process in both:
        out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        assert downloaded_files(CommandResult(process.returncode, out, "")) == data
    assert [seen.range for seen in sandbox.hub.seen("GET", "/storage/")] == [None, "bytes=10485760-"]


@pytest.mark.parametrize(
    ("args", "env", "part"),
    [
        (["owner/missing"], {}, "owner/missing"),
        (["owner/hidden"], {}, "hf auth login"),
        (["owner/hidden"], {"HF_TOKEN": ""}, "hf auth login"),
        (["owner/gated"], {}, "gated"),
        (["owner/gated"], {"HF_TOKEN": ""}, "gated"),
        (["owner/model"], {"HF_TOKEN": "hf_wrong"}, "401"),
        (["owner/model", "--token", "hf_wrong"], {}, "401"),
        (["owner/broken"], {}, "418"),
        (["owner/model", "--revision", "nope"], {}, "'nope'"),
        (["owner/model@nope"], {}, "'nope'"),
        (["owner/model@v1", "--revision", "v2"], {}, "--revision"),
        (["owner/model", "--include", "*.gguf"], {}, "owner/model"),
        (["own er/model"], {}, "own er/model"),
        (["owner/model", "--token", f"{TOKEN}\n"], {}, "token"),
        (["owner/model"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        (["owner/model"], {"HF_ENDPOINT": "http://127.0.0.1:1"}, "http://127.0.0.1:1"),
        (["owner/model"], {"HF_ENDPOINT": "http://hub.invalid"}, "http://hub.invalid"),
    ],
)
def test_failed_download_is_a_one_line_error(args: list[str], env: dict[str, str], part: str, sandbox: Sandbox) -> None:
    sandbox.hub.put("owner/model", FILES)
    sandbox.hub.put("owner/hidden", FILES, private=True)
    sandbox.hub.put("owner/gated", FILES, gated=True)
    sandbox.hub.faults = [Fault(path="owner/broken", code=418, times=9)]
    assert part in sandbox.tune("download", *args, **env).error
    assert not sandbox.search(TOKEN) and not sandbox.search("hf_wrong")


def test_members_can_download_a_gated_model(sandbox: Sandbox) -> None:
    sandbox.hub.put("owner/gated", FILES, gated=True, members={"bob"})
    assert downloaded_files(sandbox.tune("download", "owner/gated", HF_TOKEN=BOB_TOKEN)).keys() == set(NEEDED)
    assert downloaded_files(
        sandbox.tune("download", "owner/gated", "--token", BOB_TOKEN, "--local-dir", "x")
    ).keys() == set(NEEDED)


def test_model_name_with_revision(sandbox: Sandbox) -> None:
    """A model name can include a branch, a tag or a commit."""
    nano = {file.name: file.read_bytes() for file in assets.MODELS["tunekit/nano"].iterdir()}
    repo = sandbox.hub.put("ann/nano", nano)
    repo.tags["v1"] = commit = repo.refs["main"]
    sandbox.hub.put("ann/nano", {"config.json": b"{}"})
    assert "config.json" in sandbox.tune("chat", "ann/nano").error
    for revision in ("v1", commit):
        assert sandbox.tune("chat", f"ann/nano@{revision}", text="Hello\n").out
        assert sandbox.tune("chat", f"ann/nano@{revision}", text="Hello\n", HF_HUB_OFFLINE="1").out
    assert "'v2'" in sandbox.tune("chat", "ann/nano@v2").error


def test_pickled_weights_are_downloaded_if_there_are_no_others(sandbox: Sandbox) -> None:
    sandbox.hub.put("owner/old", {"config.json": b"{}", "pytorch_model.bin": b"x", "training_args.bin": b"y"})
    code = "from tunekit.hub import download; print(download.resolve_model_dir('owner/old'))"
    files = downloaded_files(sandbox.run_python(code))
    assert files == {"config.json": b"{}", "pytorch_model.bin": b"x"}


def test_directory_takes_precedence_over_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "owner/model@v1"):
        (tmp_path / name).mkdir(parents=True)
        assert download.resolve_model_dir(name) == Path(name)
    for name, folder in assets.MODELS.items():
        assert download.resolve_model_dir(name) == folder
    assert download.cached_commit(tmp_path) is None


@pytest.mark.parametrize("path", ["./nope", "../nope", "/nope", "~/nope", "a/b/c", "a\\b", "a/b/c@x"])
def test_missing_path_is_not_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(UserError, match="directory"):
        download.resolve_model_dir(path)
