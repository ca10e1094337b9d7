"""Names to folders, over a Hub where things go wrong, with the client as it is installed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from tests.hub.conftest import GUEST, TOKEN, Place
from tests.hub.wire import Fault
from tests.outcome import Outcome
from tests.waiting import LIMIT, until
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
WANTED = ("config.json", "model.safetensors", "tokenizer.json", "README.md")
LARGE = 30_000_000


def fetched(done: Outcome) -> dict[str, bytes]:
    assert done.code == 0, done.err
    place = Path(done.out.strip())
    paths = [path for path in place.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in paths}


def sent(place: Place) -> int:
    """Bytes of large files that the Hub gave away."""
    return sum(seen.sent for seen in place.hub.seen("GET", "/storage/"))


def test_what_the_toolkit_reads_is_fetched_once(place: Place) -> None:
    repo = place.hub.put("owner/model", FILES)
    done = place.tune("download", "owner/model")
    assert fetched(done) == {name: FILES[name] for name in WANTED} and "4 files" in done.err
    assert Path(done.out.strip()).name == repo.refs["main"] == download.cached_commit(Path(done.out.strip()))
    place.hub.log.clear()
    assert place.tune("download", "owner/model").out == done.out
    assert not place.hub.seen(path="/resolve/") and not place.hub.seen(path="/storage/")
    place.hub.log.clear()
    offline = place.tune("download", "owner/model", HF_HUB_OFFLINE="1")
    assert fetched(offline) == fetched(done) and not place.hub.log
    assert not place.search(TOKEN)


def test_the_command_itself(place: Place) -> None:
    place.hub.put("owner/model", FILES)
    tune = Path(sys.executable).with_name("tune")
    done = subprocess.run([tune, "download", "owner/model"], env=place.env(), capture_output=True, text=True)
    assert fetched(Outcome(done.returncode, done.stdout, done.stderr)).keys() == set(WANTED)


def test_files_can_be_chosen(place: Place) -> None:
    place.hub.put("owner/model", FILES)
    words = ("--include", "*.bin", "--include", "original/*", "--local-dir", "here")
    done = place.tune("download", "owner/model", *words)
    assert done.out == f"{place.folder / 'here'}\n" and set(fetched(done)) == {
        "pytorch_model.bin",
        "original/params.json",
    }
    without = place.tune("download", "owner/model", "--exclude", "*.json", "--exclude", "*.md")
    assert set(fetched(without)) == {"model.safetensors"}


@pytest.mark.parametrize("to", [(), ("--local-dir", "here")])
def test_a_file_resumes_after_its_connection_is_closed(to: tuple[str, ...], place: Place) -> None:
    """The client asks only for the rest."""
    data = {"model.safetensors": os.urandom(LARGE), "config.json": b"{}"}
    place.hub.put("ann/large", data, private=True)
    place.hub.faults = [
        Fault("HEAD", "/resolve/.*safetensors", 503),
        Fault("GET", "/storage/", cut="reply", at=12_000_000),
        Fault("GET", "/storage/", 429, {"Retry-After": "0"}),
    ]
    assert fetched(place.tune("download", "ann/large", *to)) == data and sent(place) < LARGE + 12_000_000
    ranges = [seen.range or "bytes=0-" for seen in place.hub.seen("GET", "/storage/")]
    assert ranges[0] == "bytes=0-" and "bytes=0-" not in ranges[1:] and len(ranges) == 3
    assert not any(fault.times for fault in place.hub.faults)
    assert not any(seen.token for seen in place.hub.seen(path="/storage/"))


@pytest.mark.parametrize("to", [(), ("--local-dir", "here")])
def test_a_reset_connection_costs_only_its_file(to: tuple[str, ...], place: Place) -> None:
    data = {"a.safetensors": os.urandom(LARGE // 3), "b.safetensors": os.urandom(LARGE // 3), "config.json": b"{}"}
    repo = place.hub.put("ann/large", data)
    oid = repo.commits[repo.refs["main"]].files["b.safetensors"].sha256
    place.hub.faults = [
        Fault("GET", f"/storage/.*{oid}", cut="reply", at=7_000_000, reset=True),
        Fault("GET", f"/storage/.*{oid}", 503),
    ]
    done = place.tune("download", "ann/large", *to)
    assert fetched(done) == data and "lost the connection" in done.err and "answered 503; trying again" in done.err
    assert len([seen for seen in place.hub.seen("GET", "/storage/") if oid not in seen.path]) == 1


def test_progress_renews_the_attempts(place: Place) -> None:
    """More failures than attempts, but a file is completed between any two of them."""
    data = {f"{number}.safetensors": os.urandom(1000) for number in range(8)}
    repo = place.hub.put("ann/shards", data)
    blobs = repo.commits[repo.refs["main"]].files
    place.hub.faults = [Fault("GET", f"/storage/.*{blobs[name].sha256}", 503) for name in data]
    assert fetched(place.tune("download", "ann/shards")) == data
    assert not any(fault.times for fault in place.hub.faults)


def test_a_killed_download_keeps_complete_files(place: Place) -> None:
    data = {"model.safetensors": os.urandom(LARGE), "config.json": b"{}"}
    place.hub.put("ann/large", data)
    hold = Event()
    place.hub.faults = [Fault("GET", "/storage/", cut="reply", at=20_000_000, hold=hold)]
    child = place.start("download", "ann/large")
    until(lambda: list(place.folder.rglob("snapshots/*/config.json")) and place.hub.seen("GET", "/storage/"))
    os.kill(child, signal.SIGKILL)
    hold.set()
    assert place.end().code == -signal.SIGKILL
    assert fetched(place.tune("download", "ann/large")) == data
    assert len(place.hub.seen("GET", "/resolve/.*config.json")) == 1


@pytest.mark.parametrize("to", [(), ("--local-dir", "here")])
def test_a_damaged_file_is_deleted(to: tuple[str, ...], place: Place) -> None:
    repo = place.hub.put("ann/large", {"model.safetensors": (data := os.urandom(LARGE))})
    (oid,) = repo.objects
    repo.objects[oid] = data[:-1] + b"?"
    assert "checksum of model.safetensors" in place.tune("download", "ann/large", *to).error
    repo.objects[oid] = data
    assert fetched(place.tune("download", "ann/large", *to)) == {"model.safetensors": data}


@pytest.mark.slow
def test_two_at_once_fetch_a_large_file_once(place: Place) -> None:
    data = {"model.safetensors": os.urandom(LARGE)}
    place.hub.put("ann/large", data)
    hold = Event()
    place.hub.faults = [Fault("GET", "/storage/", cut="reply", at=15_000_000, hold=hold)]
    tune = [Path(sys.executable).with_name("tune"), "download", "ann/large"]
    env = place.env(HF_HUB_DOWNLOAD_TIMEOUT=str(int(LIMIT)))
    both = [subprocess.Popen(tune, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    until(lambda: len(place.hub.seen("HEAD", "/resolve/")) == 2, *both)  # the client takes the lock after this
    hold.set()
    for process in both:
        out, _ = process.communicate(timeout=LIMIT)
        assert fetched(Outcome(process.returncode, out, "")) == data
    assert [seen.range for seen in place.hub.seen("GET", "/storage/")] == [None, "bytes=10485760-"]


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (["owner/missing"], {}, "no model 'owner/missing'"),
        (["owner/hidden"], {}, "hf auth login"),
        (["owner/hidden"], {"HF_TOKEN": ""}, "hf auth login"),
        (["owner/gated"], {}, "owner/gated is gated: accept its terms at http"),
        (["owner/gated"], {"HF_TOKEN": ""}, "owner/gated is gated: accept its terms at http"),
        (["owner/model"], {"HF_TOKEN": "hf_wrong"}, "answered 401: check the token"),
        (["owner/model", "--token", "hf_wrong"], {}, "answered 401: check the token"),
        (["owner/broken"], {}, "answered 418"),
        (["owner/model", "--revision", "nope"], {}, "no revision 'nope'"),
        (["owner/model", "--include", "*.gguf"], {}, "no such file"),
        (["own er/model"], {}, "neither a folder nor a name"),
        (["owner/model", "--token", f"{TOKEN}\n"], {}, "token holds characters"),
        (["owner/model"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        (["owner/model"], {"HF_ENDPOINT": "http://127.0.0.1:1"}, "http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_a_refusal_is_one_line(words: list[str], env: dict[str, str], says: str, place: Place) -> None:
    place.hub.put("owner/model", FILES)
    place.hub.put("owner/hidden", FILES, private=True)
    place.hub.put("owner/gated", FILES, gated=True)
    place.hub.faults = [Fault(path="owner/broken", code=418, times=9)]
    assert says in place.tune("download", *words, **env).error
    assert not place.search(TOKEN) and not place.search("hf_wrong")


def test_who_was_let_in_gets_a_gated_model(place: Place) -> None:
    place.hub.put("owner/gated", FILES, gated=True, members={"bob"})
    assert fetched(place.tune("download", "owner/gated", HF_TOKEN=GUEST)).keys() == set(WANTED)
    assert fetched(place.tune("download", "owner/gated", "--token", GUEST, "--local-dir", "x")).keys() == set(WANTED)


def test_a_name_may_say_a_revision(place: Place) -> None:
    """A branch, a tag or a commit, where a model is named."""
    nano = {file.name: file.read_bytes() for file in assets.MODELS["tunekit/nano"].iterdir()}
    repo = place.hub.put("ann/nano", nano)
    repo.tags["v1"] = commit = repo.refs["main"]
    place.hub.put("ann/nano", {"config.json": b"{}"})
    assert "config.json" in place.tune("chat", "ann/nano").error
    for revision in ("v1", commit):
        assert place.tune("chat", f"ann/nano@{revision}", text="Hello\n").out
        assert place.tune("chat", f"ann/nano@{revision}", text="Hello\n", HF_HUB_OFFLINE="1").out
    assert "no revision 'v2'" in place.tune("chat", "ann/nano@v2").error


def test_old_weights_are_fetched_where_there_are_no_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.hub.put("owner/old", {"config.json": b"{}", "pytorch_model.bin": b"x", "training_args.bin": b"y"})
    code = "from tunekit.hub import download; print(download.resolve_model_dir('owner/old'))"
    done = subprocess.run([sys.executable, "-c", code], env=place.env(), capture_output=True, text=True)
    files = fetched(Outcome(done.returncode, done.stdout, done.stderr))
    assert files == {"config.json": b"{}", "pytorch_model.bin": b"x"}


def test_a_folder_comes_before_any_other_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "owner/model@v1"):
        (tmp_path / name).mkdir(parents=True)
        assert download.resolve_model_dir(name) == Path(name)
    for name, folder in assets.MODELS.items():
        assert download.resolve_model_dir(name) == folder
    assert download.cached_commit(tmp_path) is None


@pytest.mark.parametrize("path", ["./nope", "../nope", "/nope", "~/nope", "a/b/c", "a\\b", "a/b/c@x"])
def test_a_path_that_is_not_there_is_never_looked_up(path: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        download.resolve_model_dir(path)
