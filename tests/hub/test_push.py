"""`tune push`, `tune download` and `tune chat` over a Hub where things go wrong, with the client as it is installed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from tests.hub.conftest import GUEST, READER, TOKEN, Place
from tests.hub.repos import card_problems
from tests.hub.server import STALE, Hub
from tests.hub.wire import Fault
from tests.waiting import until
from tunekit import assets
from tunekit.checkpoint import atomic

NANO = assets.MODELS["tunekit/nano"]
SENT = {file.name: file.read_bytes() for file in NANO.iterdir()}
WEIGHTS = len(SENT["model.safetensors"])
SOON = {"Retry-After": "0"}
PAGE = {"Content-Type": "text/html"}
# What passes by itself, by what one sees of it. The first requests and the commit are repeated by us, others by the
# client; either goes on where it was.
PASSING = {
    "push_to_hub: 429 at first": [Fault("POST", "/api/repos/create", 429, {"Retry-After": "1"})],
    "push_to_hub: 500 at first": [Fault("GET", "/api/models/ann/nano$", 500)],
    "push_to_hub: 502 of a listing": [Fault("GET", "/tree/", 502, PAGE)],
    "push: a page of a proxy in place of JSON": [Fault("POST", "/validate-yaml", 502, PAGE, body="<html>Bad Gateway")],
    "push_to_hub: 429 before uploading": [Fault("POST", "/preupload/", 429, SOON)],
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
    """What the nano says when it never left."""
    with Hub() as hub:
        place = Place(tmp_path_factory.mktemp("here"), hub, zygote)
        done = place.tune("chat", "tunekit/nano", text="Hello\n")
        assert done.out and not hub.log, done.err
        return done.out


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if path != "README.md"}


def uploaded(hub: Hub) -> int:
    """Bytes of large files that the Hub received."""
    return sum(seen.received for seen in hub.seen("PUT", "/storage/"))


@pytest.fixture
def mine(place: Place) -> Path:
    """The nano in a folder of one's own, with a card."""
    folder = place.folder / "mine"
    folder.mkdir()
    for name, data in SENT.items():
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text("---\nlicense: bsd-3-clause\n---\n# Mine\n")
    return folder


@pytest.fixture
def run(place: Place) -> Callable[..., Path]:
    """The folder of a run that has ended, whose files were compared with the model, or not."""

    def made(passed: bool | None = True) -> Path:
        with atomic.AtomicDir(place.folder / "run/final") as folder:
            for name, data in SENT.items():
                (folder / name).write_bytes(data)
            (folder / "README.md").write_text("---\ntags: [tunekit]\n---\n# Run\n")
            if passed is not None:
                (folder / "verification.json").write_text(json.dumps({"passed": passed}))
        (place.folder / "run/state").mkdir()
        return place.folder / "run"

    return made


@pytest.mark.parametrize("what", [pytest.param(w, marks=[pytest.mark.slow] * (w not in QUICK)) for w in PASSING])
def test_there_and_back(what: str, place: Place, answer: str) -> None:
    """Nothing is lost, and nobody ever sees a part: there is one commit, with all that was sent."""
    place.hub.faults = PASSING[what]
    pushed = place.tune("push", "tunekit/nano", "ann/nano")
    assert (pushed.code, pushed.out) == (0, f"{place.hub.endpoint}/ann/nano\n"), pushed.err
    repo = place.hub.repos["ann/nano"]
    assert without_card(repo.files) == SENT and len(repo.commits) == 2
    fetched = place.tune("download", "ann/nano")
    assert fetched.code == 0, fetched.err
    assert {file.name: file.read_bytes() for file in Path(fetched.out.strip()).iterdir()} == repo.files
    assert place.tune("chat", "ann/nano", text="Hello\n").out == answer
    assert not any(fault.times for fault in place.hub.faults), "this never went wrong"
    assert any(word in pushed.err + fetched.err for word in ("trying again in", "etry", "resume")), pushed.err
    assert not place.search(TOKEN)


@pytest.mark.parametrize("path", ["/api/repos/create", "/preupload/", "/commit/"])
def test_a_hub_that_says_nothing_is_asked_again(path: str, place: Place) -> None:
    never = Event()
    place.hub.faults = [Fault("POST", path, cut="lost", hold=never)]
    done = place.tune("push", "tunekit/nano", "ann/nano", TUNEKIT_HUB_TIMEOUT="2")
    never.set()
    assert done.code == 0, done.err
    assert "rying again in" in done.err or "etry" in done.err
    assert without_card(place.hub.repos["ann/nano"].files) == SENT


@pytest.mark.parametrize("word", ["soon", "0", "-1", "inf", "nan"])
def test_how_long_it_may_say_nothing_is_a_number(word: str, place: Place) -> None:
    refused = place.tune("push", "tunekit/nano", "ann/nano", TUNEKIT_HUB_TIMEOUT=word)
    assert f"TUNEKIT_HUB_TIMEOUT: {word!r} is no number of seconds above 0" in refused.error


@pytest.mark.slow
def test_what_did_not_pass_ends_in_one_line(place: Place) -> None:
    """The Hub asks for more patience than there is, or is in trouble for long: nothing is visible, and one line."""
    place.hub.faults = [Fault("POST", "/api/repos/create", 429, {"Retry-After": "3600"})]
    assert "answered 429" in place.tune("push", "tunekit/nano", "ann/nano").error and not place.hub.repos
    place.hub.faults = [Fault("POST", "/commit/", 503, SOON, times=9)]
    error = place.tune("push", "tunekit/nano", "ann/nano").error
    assert "answered 503, also the 6th time" in error and not place.hub.repos["ann/nano"].files


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (["ann/nano"], {"HF_TOKEN": "hf_wrong"}, "refused this token"),
        (["ann/nano"], {"HF_TOKEN": ""}, "does not know you: log in with `hf auth login`"),
        (["ann/nano", "--token", "hf_wrong"], {}, "refused this token"),
        (["ann/nano", "--token", "hf_wrong\n"], {}, "token holds characters"),
        (["ann/nano"], {"HF_TOKEN": READER}, 'the rights to create a model under the namespace "ann"'),
        (["bob/nano"], {}, 'the rights to create a model under the namespace "bob"'),
        (["bob/hidden"], {}, "the rights to create"),
        (["bob/open"], {}, "don't have write permission"),
        (["a b/nano"], {}, "is no name for a model"),
        (["ann/nano..x"], {}, "is no name for a model"),
        (["ann/nano.git"], {}, "ann/nano.git"),
        (["ann/open", "--private"], {}, "is there already and public"),
        (["ann/nano"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to push"),
        (["ann/nano", "--create-pr", "--revision", "x"], {}, "creates its own branch. Remove --revision"),
        (["ann/nano", "--merge-adapter"], {}, "is no adapter"),
        (["ann/nano", "--merged-dir", "x"], {}, "requires --merge-adapter"),
    ],
)
def test_a_refusal_is_one_line(words: list[str], env: dict[str, str], says: str, place: Place) -> None:
    place.hub.put("bob/hidden", {"x": b""}, private=True)
    place.hub.put("bob/open", {"x": b""})
    place.hub.put("ann/open", {"x": b""})
    assert says in place.tune("push", "tunekit/nano", *words, **env).error
    assert all(len(repo.commits) == 2 for repo in place.hub.repos.values()) and len(place.hub.repos) == 3
    for token in (TOKEN, READER, "hf_wrong"):
        assert not place.search(token)


@pytest.mark.parametrize("token", ["hf_wrongOne", "hf_wrongOne\n", READER])
def test_a_traceback_tells_no_secret(token: str, place: Place) -> None:
    for words in (("push", "tunekit/nano", "ann/nano"), ("download", "ann/nano")):
        done = place.tune(*words, "--token", token, "--debug")
        assert done.code == 2 and "Traceback" in done.err
    place.tune("push", "tunekit/nano", "ann/nano", "--debug", HF_TOKEN=token, HF_DEBUG="1")
    for secret in (TOKEN, token.strip()):
        assert not place.search(secret)


def test_a_full_account(place: Place) -> None:
    place.hub.quota = 10**6
    assert "storage limit reached" in place.tune("push", "tunekit/nano", "ann/nano").error
    assert not place.hub.repos["ann/nano"].files


def test_a_commit_made_meanwhile(place: Place) -> None:
    place.hub.put("ann/nano", {"notes.txt": b"mine"})
    place.hub.faults = [Fault("POST", "/commit/", 412, body={"error": STALE})]
    assert "got another commit meanwhile" in place.tune("push", "tunekit/nano", "ann/nano").error
    assert place.hub.repos["ann/nano"].files == {"notes.txt": b"mine"}


def test_a_real_commit_made_meanwhile(place: Place, mine: Path) -> None:
    """Somebody else is faster while the weights are under way: theirs stays, ours can be sent on top of it."""
    arrived = Event()
    place.hub.faults = [Fault("PUT", "/storage/", cut="lost", hold=arrived)]
    place.start("push", "mine", "ann/nano")
    until(lambda: place.hub.seen("PUT", "/storage/"))
    place.hub.put("ann/nano", {"notes.txt": b"theirs"})
    arrived.set()
    assert "got another commit meanwhile" in place.end().error
    assert place.hub.repos["ann/nano"].files == {"notes.txt": b"theirs"}
    before = uploaded(place.hub)
    assert place.tune("push", "mine", "ann/nano").code == 0 and uploaded(place.hub) == before
    assert place.hub.repos["ann/nano"].files == SENT | {
        "README.md": (mine / "README.md").read_bytes(), "notes.txt": b"theirs"}  # fmt: skip


def test_only_what_changed_is_sent(place: Place, mine: Path) -> None:
    assert place.tune("push", "mine", "nano", "--commit-message", "First").code == 0  # the token's owner is meant
    repo = place.hub.repos["ann/nano"]
    assert repo.find("main").title == "First" and uploaded(place.hub) == WEIGHTS
    place.hub.log.clear()
    again = place.tune("push", "mine", "nano")
    assert again.out == f"{place.hub.endpoint}/ann/nano\n" and "nothing has changed" in again.err
    assert len(repo.commits) == 2 and not place.hub.seen("POST", "/commit/")
    place.hub.log.clear()
    (mine / "config.json").write_bytes(SENT["config.json"] + b"\n")
    assert "sending 1 of 8 files" in place.tune("push", "mine", "ann/nano").err
    assert len(repo.commits) == 3 and uploaded(place.hub) == 0
    assert sum(seen.received for seen in place.hub.log) < 10_000
    assert repo.find("main").files["model.safetensors"] == repo.history("main")[1].files["model.safetensors"]


def test_nothing_stays_of_another_model(place: Place, mine: Path) -> None:
    """An adapter is replaced by a whole model. What is not of a model stays, and what is deeper down."""
    old = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"old", "verification.json": b"{}"}
    kept = {"notes.md": b"text", "onnx/model.safetensors": b"x"}
    place.hub.put("ann/nano", old | kept)
    assert place.tune("push", "mine", "ann/nano").code == 0
    repo = place.hub.repos["ann/nano"]
    assert repo.files == SENT | kept | {"README.md": (mine / "README.md").read_bytes()}
    assert len(repo.history("main")) == 3  # gone in the commit that brought the others


def test_an_adapter_whose_base_lies_here(place: Place) -> None:
    folder = place.folder / "adapter"
    folder.mkdir()
    for base, warned in ((str(NANO), True), ("ann/nano", False)):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
        done = place.tune("push", "adapter", "ann/adapter")
        assert done.code == 0 and ("others cannot open the adapter" in done.err) is warned


def test_weights_that_nobody_could_open_are_refused(place: Place) -> None:
    cut = place.folder / "cut"
    shutil.copytree(NANO, cut)
    (cut / "model.safetensors").write_bytes(SENT["model.safetensors"][:-1000])
    gone = place.folder / "gone"
    shutil.copytree(NANO, gone)
    (gone / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (gone / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors" in (told := place.tune("push", "cut", "ann/cut").error) and "--force" in told
    assert "model-00001-of-00001.safetensors" in place.tune("push", "gone", "ann/gone").error
    assert not place.hub.repos


def test_a_killed_push_leaves_nothing_half(place: Place) -> None:
    """Its first file has arrived when it is killed, in the middle of the second; the next push sends only that."""
    folder = place.folder / "two"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    sizes = {"model-00001-of-00002.safetensors": 10**6, "model-00002-of-00002.safetensors": 2 * 10**6}
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))
    hold = Event()
    place.hub.part = 10**6  # the second file goes in two parts
    place.hub.faults = [Fault("PUT", "/[0-9a-f]{64}/2", cut="request", at=500_000, hold=hold)]
    child = place.start("push", "two", "ann/two")
    until(lambda: "ann/two" in place.hub.repos and place.hub.repos["ann/two"].objects)
    until(lambda: place.hub.seen("PUT", "/2\\?"))
    os.kill(child, signal.SIGKILL)
    hold.set()
    assert place.end().code == -signal.SIGKILL and not place.hub.repos["ann/two"].files
    place.hub.log.clear()
    assert place.tune("push", "two", "ann/two").code == 0
    repo = place.hub.repos["ann/two"]
    assert uploaded(place.hub) == 2 * 10**6 and len(repo.commits) == 2
    assert without_card(repo.files) == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_branch(place: Place) -> None:
    place.hub.put("ann/nano", {"config.json": b"old"})
    done = place.tune("push", "tunekit/nano", "ann/nano", "--revision", "try/1")
    assert done.out == f"{place.hub.endpoint}/ann/nano/tree/try%2F1\n" and "new branch try/1" in done.err
    repo = place.hub.repos["ann/nano"]
    assert repo.files == {"config.json": b"old"} and len(repo.history("try/1")) == 3
    assert repo.find("try/1").files["config.json"].data == SENT["config.json"]
    fetched = place.tune("download", "ann/nano", "--revision", "try/1", "--include", "config.json")
    assert (Path(fetched.out.strip()) / "config.json").read_bytes() == SENT["config.json"]
    assert "there is no branch" not in place.tune("push", "tunekit/nano", "ann/nano", "--revision", "try/1").err
    commit = repo.find("main").oid
    assert "has no branch" in place.tune("push", "tunekit/nano", "ann/nano", "--revision", commit).error


@pytest.mark.parametrize("lost", [False, True])
def test_a_pull_request(lost: bool, place: Place) -> None:
    """Who may not write may propose. If the answer is lost, there is one proposal all the same."""
    place.hub.put("bob/nano", {"config.json": b"old"})
    place.hub.faults = [Fault("POST", "/commit/", cut="lost")] * lost
    done = place.tune("push", "tunekit/nano", "bob/nano", "--create-pr", "--commit-message", "Mine")
    assert done.out == f"{place.hub.endpoint}/bob/nano/discussions/1\n", done.err
    repo = place.hub.repos["bob/nano"]
    assert repo.files == {"config.json": b"old"} and set(repo.refs) == {"main", "refs/pr/1"}
    files = {path: blob.data for path, blob in repo.find("refs/pr/1").files.items() if path[0] != "."}
    assert without_card(files) == SENT


def test_an_organization_and_a_private_model(place: Place) -> None:
    assert place.tune("push", "tunekit/nano", "acme/nano", "--private").code == 0
    assert place.hub.repos["acme/nano"].private
    assert place.tune("chat", "acme/nano", "--temperature", "0", text="Hello\n").code == 0
    for env in ({"HF_TOKEN": ""}, {"HF_TOKEN": GUEST}):
        fetched = place.tune("download", "acme/nano", "--local-dir", "there", **env)
        assert "no model 'acme/nano' that you can access" in fetched.error
    assert not place.search(TOKEN)


def test_a_run_is_its_final_folder(place: Place, run: Callable[..., Path]) -> None:
    run()
    (place.folder / "run/final/.cache").mkdir()
    for name in (".cache/x", "model.safetensors.partial", "x.incomplete"):
        (place.folder / "run/final" / name).write_bytes(b"not this")
    assert place.tune("push", "run", "ann/run").code == 0
    sent = place.hub.repos["ann/run"].files
    assert without_card(sent) == SENT | {"verification.json": b'{"passed": true}'}
    assert sent["README.md"].endswith(b"# Run\n")


@pytest.mark.parametrize(("passed", "says"), [(None, "nobody has compared"), (False, "are not what the model was")])
def test_what_nobody_has_verified_is_refused(
    passed: bool | None, says: str, place: Place, run: Callable[..., Path]
) -> None:
    final = run(passed) / "final"
    before = {file: file.read_bytes() for file in final.iterdir()}
    for words in (["run"], ["run/final"], ["run", "--dry-run"]):
        error = place.tune("push", *words[:1], "ann/run", *words[1:]).error
        assert says in error and "--force" in error
    assert not place.hub.log
    assert place.tune("push", "run", "ann/run", "--force").code == 0
    card = place.hub.repos["ann/run"].files["README.md"].decode()
    assert "pushed by force" in card and card.startswith("---\ntags: [tunekit]") and "# Run" in card
    assert {file: file.read_bytes() for file in final.iterdir()} == before


def test_a_run_that_goes_on_and_folders_that_are_no_models(place: Place, run: Callable[..., Path]) -> None:
    (run() / "final/complete").unlink()
    assert "has not ended" in place.tune("push", "run", "ann/run").error
    (place.folder / "empty").mkdir()
    assert "so this is no model" in place.tune("push", "empty", "ann/x").error
    assert "no such folder: nowhere" in place.tune("push", "nowhere", "ann/x").error
    assert not place.hub.log


def test_weights_that_changed_on_the_disk(place: Place, run: Callable[..., Path]) -> None:
    weights = run() / "final/model.safetensors"
    weights.write_bytes(SENT["model.safetensors"][:-1] + b"x")
    assert "model.safetensors is no longer what was written" in place.tune("push", "run", "ann/run").error
    assert place.tune("push", "run", "ann/run", "--force").code == 0
    assert b"these files have changed since" in place.hub.repos["ann/run"].files["README.md"]


def test_a_token_in_a_file_is_never_sent(place: Place, mine: Path) -> None:
    told = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps(told | {"note": f"my {TOKEN}"}))
    assert "config.json holds your access token" in place.tune("push", "mine", "ann/nano").error
    assert not place.hub.log
    (mine / "config.json").unlink()
    assert not place.search(TOKEN)


def test_a_dry_run_asks_nobody(place: Place, mine: Path) -> None:
    done = place.tune("push", "mine", "ann/nano", "--dry-run")
    assert done.code == 0 and not place.hub.log
    assert [line.split()[2] for line in done.out.splitlines()] == [*sorted([*SENT, "README.md"]), "in"]
    assert f"{WEIGHTS / 1e6:.2f} MB  model.safetensors" in done.out


def test_a_card_is_made_where_there_is_none(place: Place, mine: Path) -> None:
    """As the Hub accepts it. The folder is left as it is."""
    (mine / "README.md").unlink()
    assert place.tune("push", "mine", "ann/nano").code == 0
    card = place.hub.repos["ann/nano"].files["README.md"].decode()
    assert card_problems(card) == ([], []) and "library_name: transformers" in card
    assert not (mine / "README.md").exists()
    (mine / "README.md").write_text("---\nlicense: no such licence\n---\n")
    assert '"license" must be one of' in place.tune("push", "mine", "ann/nano").error


@pytest.mark.slow
def test_transformers_opens_it_by_its_name(place: Place) -> None:
    """The same numbers as from the files that were pushed."""
    assert place.tune("push", "tunekit/nano", "ann/nano").code == 0
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = AutoTokenizer.from_pretrained("ann/nano")("Once upon a time", return_tensors="pt")
one, two = (AutoModelForCausalLM.from_pretrained(name)(**tokens).logits for name in ("ann/nano", sys.argv[1]))
assert torch.equal(one, two)
"""
    words = [sys.executable, "-c", code, str(NANO)]
    done = subprocess.run(words, env=place.env(), capture_output=True, text=True, cwd=place.folder)
    assert done.returncode == 0, done.stderr
