"""`tune push`, `tune download` and `tune chat` over a Hub where things go wrong, with the client as it is installed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.hub.conftest import GUEST, READER, TOKEN, Place
from tests.hub.wire import Fault
from tunekit import bundled

NANO = bundled.MODELS["tunekit/nano"]
SENT = {file.name: file.read_bytes() for file in NANO.iterdir()}
WEIGHTS = len(SENT["model.safetensors"])


def test_first(place: Place) -> None:
    done = place.tune("push", "tunekit/nano", "ann/nano")
    assert (done.code, done.out) == (0, f"{place.hub.endpoint}/ann/nano\n"), done.err
    print(done.err)
    assert place.hub.repos["ann/nano"].files == SENT
    assert not place.search(TOKEN)
    done = place.tune("push", "tunekit/nano", "ann/nano")
    print(done.err)
    done = place.tune("download", "ann/nano")
    print(done.err)
    done = place.tune("chat", "ann/nano", text="Hello\n")
    print(done)
