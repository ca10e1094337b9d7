"""Push and download through Xet storage, which the client uses for large files if `hf_xet` is installed."""

import os
from pathlib import Path

import pytest

from tests.helpers.hub.http_handler import Fault
from tests.helpers.hub.xet_storage import Store
from tests.recipes.hub.conftest import TOKEN, Sandbox
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


@pytest.mark.parametrize("failure", [pytest.param(w, marks=[pytest.mark.slow] * (w != "nothing")) for w in FAULTS])
def test_push_and_download_with_transient_failures(failure: str, sandbox: Sandbox) -> None:
    sandbox.hub.xet, sandbox.hub.faults = Store(), FAULTS[failure]
    pushed = sandbox.tune("push", "tunekit/nano", "ann/nano", **XET)
    assert pushed.code == 0, pushed.err
    repo = sandbox.hub.repos["ann/nano"]
    assert all(repo.files[file.name] == file.read_bytes() for file in NANO.iterdir())
    assert len(repo.commits) == 2 and not sandbox.hub.seen("PUT") and len(sandbox.hub.xet.xorbs) == 1
    fetched = sandbox.tune("download", "ann/nano", **XET)
    assert {f.name: f.read_bytes() for f in Path(fetched.out.strip()).iterdir()} == repo.files, fetched.err
    assert sandbox.hub.seen("GET", "/storage/xorbs/") and not sandbox.hub.seen("GET", "/storage/ann/")
    assert sandbox.tune("chat", "ann/nano", text="Hello\n", **XET).out
    assert not any(fault.times for fault in sandbox.hub.faults), "the failure did not happen"
    received = sum(seen.received for seen in sandbox.hub.seen("POST", "/v1/xorbs/"))
    assert sandbox.tune("push", "tunekit/nano", "ann/nano", **XET).code == 0
    assert received == sum(seen.received for seen in sandbox.hub.seen("POST", "/v1/xorbs/"))
    assert not sandbox.search(TOKEN) and not any(
        seen.token == TOKEN for seen in sandbox.hub.seen(path="/xet/|/storage/")
    )


@pytest.mark.slow
def test_rejected_upload_is_an_error(sandbox: Sandbox) -> None:
    sandbox.hub.xet, sandbox.hub.faults = Store(), [Fault("POST", "/v1/xorbs/", 403, times=99)]
    assert "ann/nano" in sandbox.tune("push", "tunekit/nano", "ann/nano", **XET).error
    assert not sandbox.hub.repos["ann/nano"].files


@pytest.mark.slow
def test_large_files_are_uploaded_by_the_client(sandbox: Sandbox) -> None:
    folder = sandbox.directory / "large"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(data := os.urandom(12_000_000))
    sandbox.hub.xet = Store()
    assert sandbox.tune("push", "large", "ann/large", **XET).code == 0
    fetched = sandbox.tune("download", "ann/large", "--local-dir", "by_xet", **XET)
    assert (Path(fetched.out.strip()) / "model.safetensors").read_bytes() == data
    assert not sandbox.hub.seen("GET", "/storage/ann/")
    without = sandbox.tune("download", "ann/large", "--local-dir", "by_http")
    assert (Path(without.out.strip()) / "model.safetensors").read_bytes() == data
    assert sandbox.hub.seen("GET", "/storage/ann/")
