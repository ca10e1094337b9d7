"""The same over Xet, the Hub's own storage, which the client uses for large files if `hf_xet` is installed."""

import os
from pathlib import Path

import pytest

from tests.hub.conftest import TOKEN, Place
from tests.hub.wire import Fault
from tests.hub.xet import Store
from tunekit import assets

pytest.importorskip("hf_xet")
NANO = assets.MODELS["tunekit/nano"]
WEIGHTS = (NANO / "model.safetensors").stat().st_size
XET = {"HF_HUB_DISABLE_XET": ""}
FAULTS = {
    "nothing": [],
    "broken in mid-upload": [Fault("POST", "/v1/xorbs/", cut="request", at=2_000_000, reset=True)],
    "429 of the store": [Fault("POST", "/v1/xorbs/", 429, {"Retry-After": "1"})],
    "503 of the store": [Fault("POST", "/v1/xorbs/", 503)],
    "500 of the list": [Fault("POST", "/v1/shards", 500)],
    "503 of the Hub": [Fault("GET", "/xet-write-token/", 503)],
    "broken in mid-download": [Fault("GET", "/storage/xorbs/", cut="reply", at=2_000_000, reset=True)],
    "503 in the download": [Fault("GET", "/reconstructions/", 503)],
}


@pytest.mark.parametrize("what", [pytest.param(w, marks=[pytest.mark.slow] * (w != "nothing")) for w in FAULTS])
def test_there_and_back(what: str, place: Place) -> None:
    place.hub.xet, place.hub.faults = Store(), FAULTS[what]
    pushed = place.tune("push", "tunekit/nano", "ann/nano", **XET)
    assert pushed.code == 0, pushed.err
    repo = place.hub.repos["ann/nano"]
    assert all(repo.files[file.name] == file.read_bytes() for file in NANO.iterdir())
    assert len(repo.commits) == 2 and not place.hub.seen("PUT") and len(place.hub.xet.xorbs) == 1
    fetched = place.tune("download", "ann/nano", **XET)
    assert {f.name: f.read_bytes() for f in Path(fetched.out.strip()).iterdir()} == repo.files, fetched.err
    assert place.hub.seen("GET", "/storage/xorbs/") and not place.hub.seen("GET", "/storage/ann/")
    assert place.tune("chat", "ann/nano", text="Hello\n", **XET).out
    assert not any(fault.times for fault in place.hub.faults), "this never went wrong"
    received = sum(seen.received for seen in place.hub.seen("POST", "/v1/xorbs/"))
    assert "nothing has changed" in place.tune("push", "tunekit/nano", "ann/nano", **XET).err
    assert received == sum(seen.received for seen in place.hub.seen("POST", "/v1/xorbs/"))
    assert not place.search(TOKEN) and not any(seen.token == TOKEN for seen in place.hub.seen(path="/xet/|/storage/"))


@pytest.mark.slow
def test_a_store_that_refuses(place: Place) -> None:
    place.hub.xet, place.hub.faults = Store(), [Fault("POST", "/v1/xorbs/", 403, times=99)]
    assert "ann/nano: the upload failed: " in place.tune("push", "tunekit/nano", "ann/nano", **XET).error
    assert not place.hub.repos["ann/nano"].files


@pytest.mark.slow
def test_a_large_file_is_left_to_the_client(place: Place) -> None:
    folder = place.folder / "large"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(data := os.urandom(12_000_000))
    place.hub.xet = Store()
    assert place.tune("push", "large", "ann/large", **XET).code == 0
    fetched = place.tune("download", "ann/large", "--local-dir", "there", **XET)
    assert (Path(fetched.out.strip()) / "model.safetensors").read_bytes() == data
    assert not place.hub.seen("GET", "/storage/ann/")
    without = place.tune("download", "ann/large", "--local-dir", "here")  # by plain HTTP
    assert (Path(without.out.strip()) / "model.safetensors").read_bytes() == data
    assert place.hub.seen("GET", "/storage/ann/")
