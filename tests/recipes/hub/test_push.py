"""`tune push`, `tune download` and `tune chat` with a Hub with failures, through the real client."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from tests.helpers.hub.http_handler import Fault
from tests.helpers.hub.repositories import card_problems
from tests.helpers.hub.server import STALE, Hub
from tests.helpers.wait import wait_until
from tests.recipes.hub.conftest import BOB_TOKEN, READ_TOKEN, TOKEN, Sandbox
from tunekit import assets
from tunekit.checkpoint import atomic

NANO = assets.MODELS["tunekit/nano"]
NANO_FILES = {file.name: file.read_bytes() for file in NANO.iterdir()}
WEIGHTS = len(NANO_FILES["model.safetensors"])
RETRY_NOW = {"Retry-After": "0"}
PAGE = {"Content-Type": "text/html"}
# Transient failures, by command and symptom. tunekit retries the first requests and the commit, the client all others;
# both resume.
TRANSIENT = {
    "push_to_hub: 429 at first": [Fault("POST", "/api/repos/create", 429, {"Retry-After": "1"})],
    "push_to_hub: 500 at first": [Fault("GET", "/api/models/ann/nano$", 500)],
    "push_to_hub: 502 of a listing": [Fault("GET", "/tree/", 502, PAGE)],
    "push: HTML of a proxy": [Fault("POST", "/validate-yaml", 502, PAGE, body="<html>Bad Gateway")],
    "push_to_hub: 429 before uploading": [Fault("POST", "/preupload/", 429, RETRY_NOW)],
    "push_to_hub: 503 before uploading": [Fault("POST", "/objects/batch", 503)],
    "push_to_hub: 500 of the storage": [Fault("PUT", "/storage/", 500)],
    "push: closed in mid-upload": [Fault("PUT", "/storage/", cut="request", at=2_000_000)],
    "push: broken in mid-upload": [Fault("PUT", "/storage/", cut="request", at=2_000_000, reset=True)],
    "push: uploaded, no answer": [Fault("PUT", "/storage/", cut="lost")],
    "push_to_hub: 503 at the commit": [Fault("POST", "/commit/", 503)],
    "push: broken in the commit": [Fault("POST", "/commit/", cut="request", at=1000)],
    "push: made, no answer": [Fault("POST", "/api/repos/create", cut="lost")],
    "push: committed, no answer": [Fault("POST", "/commit/", cut="lost", reset=True)],
    "download: 429 at first": [Fault("GET", "/revision/", 429, {"Retry-After": "1"}, times=2)],
    "download: 503 of the listing": [Fault("GET", "/tree/", 503, skip=1)],
    "download: 500 of a file": [Fault("GET", "/resolve/", 500)],
    "download: closed in a file": [Fault("GET", "/storage/", cut="reply", at=2_000_000)],
    "download: broken in a file": [Fault("GET", "/storage/", cut="reply", at=2_000_000, reset=True)],
}
QUICK = {"push: broken in mid-upload", "push: committed, no answer", "download: closed in a file"}


@pytest.fixture(scope="module")
def answer(zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Answer of the nano model from local files."""
    with Hub() as hub:
        local_sandbox = Sandbox(tmp_path_factory.mktemp("here"), hub, zygote)
        done = local_sandbox.tune("chat", "tunekit/nano", text="Hello\n")
        assert done.out and not hub.log, done.err
        return done.out


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if path != "README.md"}


def uploaded_bytes(hub: Hub) -> int:
    """Bytes of large files that the Hub received."""
    return sum(seen.received for seen in hub.seen("PUT", "/storage/"))


@pytest.fixture
def user_model(sandbox: Sandbox) -> Path:
    """A user's copy of the nano model, with a model card."""
    folder = sandbox.directory / "mine"
    folder.mkdir()
    for name, data in NANO_FILES.items():
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text("---\nlicense: bsd-3-clause\n---\n# Mine\n")
    return folder


@pytest.fixture
def make_run(sandbox: Sandbox) -> Callable[..., Path]:
    """Create the directory of a complete run, with or without a verification."""

    def create(passed: bool | None = True) -> Path:
        with atomic.AtomicDir(sandbox.directory / "run/final") as folder:
            for name, data in NANO_FILES.items():
                (folder / name).write_bytes(data)
            (folder / "README.md").write_text("---\ntags: [tunekit]\n---\n# Run\n")
            if passed is not None:
                (folder / "verification.json").write_text(json.dumps({"passed": passed}))
        (sandbox.directory / "run/state").mkdir()
        return sandbox.directory / "run"

    return create


@pytest.mark.parametrize("failure", [pytest.param(w, marks=[pytest.mark.slow] * (w not in QUICK)) for w in TRANSIENT])
def test_push_and_download_with_transient_failures(failure: str, sandbox: Sandbox, answer: str) -> None:
    """All files arrive in a single commit, so no partial upload is ever visible."""
    sandbox.hub.faults = TRANSIENT[failure]
    pushed = sandbox.tune("push", "tunekit/nano", "ann/nano")
    assert (pushed.code, pushed.out) == (0, f"{sandbox.hub.endpoint}/ann/nano\n"), pushed.err
    repo = sandbox.hub.repos["ann/nano"]
    assert without_card(repo.files) == NANO_FILES and len(repo.commits) == 2
    log = pushed.err
    if failure.startswith("download"):
        fetched = sandbox.tune("download", "ann/nano")
        assert fetched.code == 0, fetched.err
        assert {file.name: file.read_bytes() for file in Path(fetched.out.strip()).iterdir()} == repo.files
        assert sandbox.tune("chat", "ann/nano", text="Hello\n").out == answer
        log += fetched.err
    assert not any(fault.times for fault in sandbox.hub.faults), "the failure did not happen"
    assert any(word in log for word in ("trying again in", "etry", "resume")), log
    assert not sandbox.search(TOKEN)


@pytest.mark.parametrize("path", ["/api/repos/create", "/preupload/", "/commit/"])
def test_silent_hub_is_retried(path: str, sandbox: Sandbox) -> None:
    end_of_test = Event()
    sandbox.hub.faults = [Fault("POST", path, cut="lost", until=end_of_test)]
    done = sandbox.tune("push", "tunekit/nano", "ann/nano", TUNEKIT_HUB_TIMEOUT="2")
    end_of_test.set()
    assert done.code == 0, done.err
    assert "rying again in" in done.err or "etry" in done.err
    assert without_card(sandbox.hub.repos["ann/nano"].files) == NANO_FILES


def test_file_cannot_be_pushed(sandbox: Sandbox) -> None:
    file = sandbox.directory / "nano.gguf"
    file.touch()
    assert f"hf upload OWNER/NAME {file}" in sandbox.tune("push", str(file), "ann/nano").error


@pytest.mark.parametrize("word", ["soon", "0", "-1", "inf", "nan"])
def test_hub_timeout_must_be_a_number(word: str, sandbox: Sandbox) -> None:
    outcome = sandbox.tune("push", "tunekit/nano", "ann/nano", TUNEKIT_HUB_TIMEOUT=word)
    assert "TUNEKIT_HUB_TIMEOUT" in outcome.error and repr(word) in outcome.error


@pytest.mark.slow
def test_permanent_failure_is_a_one_line_error(sandbox: Sandbox) -> None:
    """The Hub requires a long wait, or fails repeatedly: nothing is visible, and the error is one line."""
    sandbox.hub.faults = [Fault("POST", "/api/repos/create", 429, {"Retry-After": "3600"})]
    assert "429" in sandbox.tune("push", "tunekit/nano", "ann/nano").error and not sandbox.hub.repos
    sandbox.hub.faults = [Fault("POST", "/commit/", 503, RETRY_NOW, times=9)]
    error = sandbox.tune("push", "tunekit/nano", "ann/nano").error
    assert "503" in error and not sandbox.hub.repos["ann/nano"].files


@pytest.mark.parametrize(
    ("args", "env", "part"),
    [
        (["ann/nano"], {"HF_TOKEN": "hf_wrong"}, "token"),
        (["ann/nano"], {"HF_TOKEN": ""}, "hf auth login"),
        (["ann/nano", "--token", "hf_wrong"], {}, "token"),
        (["ann/nano", "--token", "hf_wrong\n"], {}, "token"),
        (["ann/nano"], {"HF_TOKEN": READ_TOKEN}, 'the rights to create a model under the namespace "ann"'),
        (["bob/nano"], {}, 'the rights to create a model under the namespace "bob"'),
        (["bob/hidden"], {}, "the rights to create"),
        (["bob/open"], {}, "don't have write permission"),
        (["a b/nano"], {}, "a b/nano"),
        (["ann/nano..x"], {}, "ann/nano..x"),
        (["ann/nano.git"], {}, "ann/nano.git"),
        (["ann/open", "--private"], {}, "public"),
        (["ann/nano"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        (["ann/nano", "--create-pr", "--revision", "x"], {}, "--revision"),
        (["ann/nano", "--merge-adapter"], {}, "--merge-adapter"),
        (["ann/nano", "--merged-dir", "x"], {}, "--merge-adapter"),
    ],
)
def test_invalid_push_is_a_one_line_error(args: list[str], env: dict[str, str], part: str, sandbox: Sandbox) -> None:
    sandbox.hub.put("bob/hidden", {"x": b""}, private=True)
    sandbox.hub.put("bob/open", {"x": b""})
    sandbox.hub.put("ann/open", {"x": b""})
    assert part in sandbox.tune("push", "tunekit/nano", *args, **env).error
    assert all(len(repo.commits) == 2 for repo in sandbox.hub.repos.values()) and len(sandbox.hub.repos) == 3
    for token in (TOKEN, READ_TOKEN, "hf_wrong"):
        assert not sandbox.search(token)


@pytest.mark.parametrize("token", ["hf_wrongOne", "hf_wrongOne\n", READ_TOKEN])
def test_traceback_contains_no_token(token: str, sandbox: Sandbox) -> None:
    for args in (("push", "tunekit/nano", "ann/nano"), ("download", "ann/nano")):
        done = sandbox.tune(*args, "--token", token, "--debug")
        assert done.code == 2 and "Traceback" in done.err
    sandbox.tune("push", "tunekit/nano", "ann/nano", "--debug", HF_TOKEN=token, HF_DEBUG="1")
    for secret in (TOKEN, token.strip()):
        assert not sandbox.search(secret)


def test_storage_limit_is_an_error(sandbox: Sandbox) -> None:
    sandbox.hub.quota = 10**6
    assert "storage limit reached" in sandbox.tune("push", "tunekit/nano", "ann/nano").error
    assert not sandbox.hub.repos["ann/nano"].files


def test_concurrent_commit_is_an_error(sandbox: Sandbox) -> None:
    sandbox.hub.put("ann/nano", {"notes.txt": b"mine"})
    sandbox.hub.faults = [Fault("POST", "/commit/", 412, body={"error": STALE})]
    assert "ann/nano" in sandbox.tune("push", "tunekit/nano", "ann/nano").error
    assert sandbox.hub.repos["ann/nano"].files == {"notes.txt": b"mine"}


def test_concurrent_commit_is_kept(sandbox: Sandbox, user_model: Path) -> None:
    """Another user commits during the upload. That commit is kept, and ours can be pushed after it."""
    arrived = Event()
    sandbox.hub.faults = [Fault("PUT", "/storage/", cut="lost", until=arrived)]
    sandbox.start("push", "mine", "ann/nano")
    wait_until(lambda: sandbox.hub.seen("PUT", "/storage/"))
    sandbox.hub.put("ann/nano", {"notes.txt": b"theirs"})
    arrived.set()
    assert "ann/nano" in sandbox.end().error
    assert sandbox.hub.repos["ann/nano"].files == {"notes.txt": b"theirs"}
    before = uploaded_bytes(sandbox.hub)
    assert sandbox.tune("push", "mine", "ann/nano").code == 0 and uploaded_bytes(sandbox.hub) == before
    assert sandbox.hub.repos["ann/nano"].files == NANO_FILES | {
        "README.md": (user_model / "README.md").read_bytes(), "notes.txt": b"theirs"}  # fmt: skip


def test_only_changed_files_are_uploaded(sandbox: Sandbox, user_model: Path) -> None:
    assert sandbox.tune("push", "mine", "nano", "--commit-message", "First").code == 0  # in the namespace of the token
    repo = sandbox.hub.repos["ann/nano"]
    assert repo.find("main").title == "First" and uploaded_bytes(sandbox.hub) == WEIGHTS
    sandbox.hub.log.clear()
    repeated = sandbox.tune("push", "mine", "nano")
    assert repeated.out == f"{sandbox.hub.endpoint}/ann/nano\n"
    assert len(repo.commits) == 2 and not sandbox.hub.seen("POST", "/commit/")
    sandbox.hub.log.clear()
    (user_model / "config.json").write_bytes(NANO_FILES["config.json"] + b"\n")
    assert "1 of 8 files" in sandbox.tune("push", "mine", "ann/nano").err
    assert len(repo.commits) == 3 and uploaded_bytes(sandbox.hub) == 0
    assert sum(seen.received for seen in sandbox.hub.log) < 10_000
    assert repo.find("main").files["model.safetensors"] == repo.history("main")[1].files["model.safetensors"]


def test_files_of_the_previous_model_are_deleted(sandbox: Sandbox, user_model: Path) -> None:
    """A full model replaces an adapter. Files that are not part of a model and files in subdirectories are kept."""
    adapter_files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"old", "verification.json": b"{}"}
    other_files = {"notes.md": b"text", "onnx/model.safetensors": b"x"}
    sandbox.hub.put("ann/nano", adapter_files | other_files)
    assert sandbox.tune("push", "mine", "ann/nano").code == 0
    repo = sandbox.hub.repos["ann/nano"]
    assert repo.files == NANO_FILES | other_files | {"README.md": (user_model / "README.md").read_bytes()}
    assert len(repo.history("main")) == 3  # deleted in the commit that adds the others


def test_adapter_with_a_local_base_is_a_warning(sandbox: Sandbox) -> None:
    folder = sandbox.directory / "adapter"
    folder.mkdir()
    for base, is_local in ((str(NANO), True), ("ann/nano", False)):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
        done = sandbox.tune("push", "adapter", "ann/adapter")
        assert done.code == 0 and (str(NANO) in done.err) is is_local


def test_unreadable_weights_are_rejected(sandbox: Sandbox) -> None:
    truncated = sandbox.directory / "cut"
    shutil.copytree(NANO, truncated)
    (truncated / "model.safetensors").write_bytes(NANO_FILES["model.safetensors"][:-1000])
    without_weights = sandbox.directory / "gone"
    shutil.copytree(NANO, without_weights)
    (without_weights / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (without_weights / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors" in (error := sandbox.tune("push", "cut", "ann/cut").error) and "--force" in error
    assert "model-00001-of-00001.safetensors" in sandbox.tune("push", "gone", "ann/gone").error
    assert not sandbox.hub.repos


def test_sigkill_leaves_no_partial_upload(sandbox: Sandbox) -> None:
    """It is killed in the middle of the second file. The next push uploads only that file."""
    folder = sandbox.directory / "two"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    sizes = {"model-00001-of-00002.safetensors": 10**6, "model-00002-of-00002.safetensors": 2 * 10**6}
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))
    may_continue = Event()
    sandbox.hub.part = 10**6  # the second file is uploaded in two parts
    sandbox.hub.faults = [Fault("PUT", "/[0-9a-f]{64}/2", cut="request", at=500_000, until=may_continue)]
    child = sandbox.start("push", "two", "ann/two")
    wait_until(lambda: "ann/two" in sandbox.hub.repos and sandbox.hub.repos["ann/two"].objects)
    wait_until(lambda: sandbox.hub.seen("PUT", "/2\\?"))
    os.kill(child, signal.SIGKILL)
    may_continue.set()
    assert sandbox.end().code == -signal.SIGKILL and not sandbox.hub.repos["ann/two"].files
    sandbox.hub.log.clear()
    assert sandbox.tune("push", "two", "ann/two").code == 0
    repo = sandbox.hub.repos["ann/two"]
    assert uploaded_bytes(sandbox.hub) == 2 * 10**6 and len(repo.commits) == 2
    assert without_card(repo.files) == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_push_to_a_branch(sandbox: Sandbox) -> None:
    sandbox.hub.put("ann/nano", {"config.json": b"old"})
    done = sandbox.tune("push", "tunekit/nano", "ann/nano", "--revision", "try/1")
    assert done.out == f"{sandbox.hub.endpoint}/ann/nano/tree/try%2F1\n" and "try/1" in done.err
    repo = sandbox.hub.repos["ann/nano"]
    assert repo.files == {"config.json": b"old"} and len(repo.history("try/1")) == 3
    assert repo.find("try/1").files["config.json"].data == NANO_FILES["config.json"]
    fetched = sandbox.tune("download", "ann/nano", "--revision", "try/1", "--include", "config.json")
    assert (Path(fetched.out.strip()) / "config.json").read_bytes() == NANO_FILES["config.json"]
    assert sandbox.tune("push", "tunekit/nano", "ann/nano", "--revision", "try/1").code == 0
    commit = repo.find("main").oid
    assert commit in sandbox.tune("push", "tunekit/nano", "ann/nano", "--revision", commit).error


@pytest.mark.parametrize("is_reply_lost", [False, True])
def test_pull_request(is_reply_lost: bool, sandbox: Sandbox) -> None:
    """Users without write access can open a pull request. A lost reply does not create a second one."""
    sandbox.hub.put("bob/nano", {"config.json": b"old"})
    sandbox.hub.faults = [Fault("POST", "/commit/", cut="lost")] * is_reply_lost
    done = sandbox.tune("push", "tunekit/nano", "bob/nano", "--create-pr", "--commit-message", "Mine")
    assert done.out == f"{sandbox.hub.endpoint}/bob/nano/discussions/1\n", done.err
    repo = sandbox.hub.repos["bob/nano"]
    assert repo.files == {"config.json": b"old"} and set(repo.refs) == {"main", "refs/pr/1"}
    files = {path: blob.data for path, blob in repo.find("refs/pr/1").files.items() if path[0] != "."}
    assert without_card(files) == NANO_FILES


def test_organization_and_private_model(sandbox: Sandbox) -> None:
    assert sandbox.tune("push", "tunekit/nano", "acme/nano", "--private").code == 0
    assert sandbox.hub.repos["acme/nano"].private
    assert sandbox.tune("chat", "acme/nano", "--temperature", "0", text="Hello\n").code == 0
    for env in ({"HF_TOKEN": ""}, {"HF_TOKEN": BOB_TOKEN}):
        fetched = sandbox.tune("download", "acme/nano", "--local-dir", "there", **env)
        assert "acme/nano" in fetched.error
    assert not sandbox.search(TOKEN)


def test_run_directory_pushes_its_final_checkpoint(sandbox: Sandbox, make_run: Callable[..., Path]) -> None:
    make_run()
    (sandbox.directory / "run/final/.cache").mkdir()
    for name in (".cache/x", "model.safetensors.partial", "x.incomplete"):
        (sandbox.directory / "run/final" / name).write_bytes(b"ignored")
    assert sandbox.tune("push", "run", "ann/run").code == 0
    sent = sandbox.hub.repos["ann/run"].files
    assert without_card(sent) == NANO_FILES | {"verification.json": b'{"passed": true}'}
    assert sent["README.md"].endswith(b"# Run\n")


@pytest.mark.parametrize("passed", [None, False])
def test_unverified_run_is_rejected(passed: bool | None, sandbox: Sandbox, make_run: Callable[..., Path]) -> None:
    final = make_run(passed) / "final"
    before = {file: file.read_bytes() for file in final.iterdir()}
    for args in (["run"], ["run/final"], ["run", "--dry-run"]):
        error = sandbox.tune("push", *args[:1], "ann/run", *args[1:]).error
        assert "--force" in error
    assert not sandbox.hub.log
    assert sandbox.tune("push", "run", "ann/run", "--force").code == 0
    card = sandbox.hub.repos["ann/run"].files["README.md"].decode()
    assert "force" in card and card.startswith("---\ntags: [tunekit]") and "# Run" in card
    assert {file: file.read_bytes() for file in final.iterdir()} == before


def test_unfinished_runs_and_other_directories_are_rejected(sandbox: Sandbox, make_run: Callable[..., Path]) -> None:
    (make_run() / "final/complete").unlink()
    assert "run" in sandbox.tune("push", "run", "ann/run").error
    (sandbox.directory / "empty").mkdir()
    assert "empty" in sandbox.tune("push", "empty", "ann/x").error
    assert "missing" in sandbox.tune("push", "missing", "ann/x").error
    assert not sandbox.hub.log


def test_corrupt_weights_are_rejected(sandbox: Sandbox, make_run: Callable[..., Path]) -> None:
    weights = make_run() / "final/model.safetensors"
    weights.write_bytes(NANO_FILES["model.safetensors"][:-1] + b"x")
    error = sandbox.tune("push", "run", "ann/run").error
    assert "model.safetensors" in error and ".." not in error
    assert sandbox.tune("push", "run", "ann/run", "--force").code == 0
    assert b"force" in sandbox.hub.repos["ann/run"].files["README.md"]


def test_file_with_a_token_is_rejected(sandbox: Sandbox, user_model: Path) -> None:
    config = json.loads((user_model / "config.json").read_text())
    (user_model / "config.json").write_text(json.dumps(config | {"note": f"my {TOKEN}"}))
    assert "config.json" in sandbox.tune("push", "mine", "ann/nano").error
    assert not sandbox.hub.log
    (user_model / "config.json").unlink()
    assert not sandbox.search(TOKEN)


def test_dry_run_sends_no_request(sandbox: Sandbox, user_model: Path) -> None:
    done = sandbox.tune("push", "mine", "ann/nano", "--dry-run")
    assert done.code == 0 and not sandbox.hub.log
    assert [line.split()[2] for line in done.out.splitlines()] == [*sorted([*NANO_FILES, "README.md"]), "in"]
    assert f"{WEIGHTS / 1e6:.2f} MB  model.safetensors" in done.out


def test_missing_card_is_created(sandbox: Sandbox, user_model: Path) -> None:
    """The Hub accepts the card. The local directory is unchanged."""
    (user_model / "README.md").unlink()
    assert sandbox.tune("push", "mine", "ann/nano").code == 0
    card = sandbox.hub.repos["ann/nano"].files["README.md"].decode()
    assert card_problems(card) == ([], []) and "library_name: transformers" in card
    assert not (user_model / "README.md").exists()
    (user_model / "README.md").write_text("---\nlicense: no such license\n---\n")
    assert '"license" must be one of' in sandbox.tune("push", "mine", "ann/nano").error


@pytest.mark.slow
def test_transformers_opens_pushed_model(sandbox: Sandbox) -> None:
    """The logits equal those of the local files."""
    assert sandbox.tune("push", "tunekit/nano", "ann/nano").code == 0
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = AutoTokenizer.from_pretrained("ann/nano")("Once upon a time", return_tensors="pt")
first, second = (AutoModelForCausalLM.from_pretrained(name)(**tokens).logits for name in ("ann/nano", sys.argv[1]))
assert torch.equal(first, second)
"""
    done = sandbox.run_python(code, str(NANO))
    assert done.code == 0, done.err
