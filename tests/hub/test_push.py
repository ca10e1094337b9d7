"""`tune push`, `tune download` and `tune chat` over a Hub where things go wrong, with the client as it is installed."""

from pathlib import Path

import pytest

from tests.hub.conftest import TOKEN, Place
from tests.hub.server import Hub
from tests.hub.wire import Fault
from tunekit import bundled

NANO = bundled.MODELS["tunekit/nano"]
SENT = {file.name: file.read_bytes() for file in NANO.iterdir()}
WEIGHTS = len(SENT["model.safetensors"])
SOON = {"Retry-After": "0"}
PAGE = {"Content-Type": "text/html"}
# What passes by itself, by what one sees of it. The first requests and the commit are repeated by us, others by the
# client; either goes on where it was.
PASSING = {
    "push: 429 at first": [Fault("POST", "/api/repos/create", 429, {"Retry-After": "1"})],
    "push: 500 at first": [Fault("GET", "/api/models/ann/nano$", 500)],
    "push: a page of a proxy": [Fault("GET", "/tree/", 502, PAGE)],
    "push: 429 before uploading": [Fault("POST", "/preupload/", 429, SOON)],
    "push: 503 before uploading": [Fault("POST", "/objects/batch", 503)],
    "push: 500 of the storage": [Fault("PUT", "/storage/", 500)],
    "push: closed in mid-upload": [Fault("PUT", "/storage/", cut="request", at=2_000_000)],
    "push: broken in mid-upload": [Fault("PUT", "/storage/", cut="request", at=2_000_000, reset=True)],
    "push: uploaded, no answer": [Fault("PUT", "/storage/", cut="lost")],
    "push: 503 at the commit": [Fault("POST", "/commit/", 503)],
    "push: broken in the commit": [Fault("POST", "/commit/", cut="request", at=1000)],
    "push: made, no answer": [Fault("POST", "/api/repos/create", cut="lost")],
    "push: committed, no answer": [Fault("POST", "/commit/", cut="lost", reset=True)],
    "download: 429 at first": [Fault("GET", "/revision/", 429, {"Retry-After": "1"}, times=2)],
    "download: 503 of the listing": [Fault("GET", "/tree/", 503, skip=1)],
    "download: 500 of a file": [Fault("GET", "/resolve/", 500)],
    "download: closed in a file": [Fault("GET", "/storage/", cut="reply", at=2_000_000)],
    "download: broken in a file": [Fault("GET", "/storage/", cut="reply", at=2_000_000, reset=True)],
}


@pytest.fixture(scope="module")
def answer(zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the nano says when it never left."""
    with Hub() as hub:
        place = Place(tmp_path_factory.mktemp("here"), hub, zygote)
        done = place.tune("chat", "tunekit/nano", text="Hello\n")
        assert done.out and not hub.log, done.err
        return done.out


@pytest.mark.parametrize("what", PASSING)
def test_there_and_back(what: str, place: Place, answer: str) -> None:
    """Nothing is lost, and nobody ever sees a part: there is one commit, with all that was sent."""
    place.hub.faults = PASSING[what]
    pushed = place.tune("push", "tunekit/nano", "ann/nano")
    assert (pushed.code, pushed.out) == (0, f"{place.hub.endpoint}/ann/nano\n"), pushed.err
    repo = place.hub.repos["ann/nano"]
    assert repo.files == SENT and len(repo.commits) == 2
    fetched = place.tune("download", "ann/nano")
    assert fetched.code == 0, fetched.err
    assert {file.name: file.read_bytes() for file in Path(fetched.out.strip()).iterdir()} == SENT
    assert place.tune("chat", "ann/nano", text="Hello\n").out == answer
    assert not any(fault.times for fault in place.hub.faults), "this never went wrong"
    assert any(word in pushed.err + fetched.err for word in ("trying again in", "Retrying in", "resume")), fetched.err
    assert not place.search(TOKEN)
