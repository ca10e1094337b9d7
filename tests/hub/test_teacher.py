"""A teacher of the Hub whose view of rows is on disk: which commit it was is known, and the Hub is needed no more."""

from tests.hub.conftest import Place
from tunekit import bundled

NANO = bundled.MODELS["tunekit/nano"]
WORDS = ("run", "distill", "nano/distill", "model=tunekit/nano", "data.limit=4", "validation=null", "device=cpu")
WORDS += ("steps=1", "batch=2", "micro_batch=2", "--fresh")


def kept(model: str) -> tuple[str, ...]:
    return *WORDS, f"teacher={{kind: stored, model: {model}, folder: kept, top: 4}}"


def test_files_of_another_commit_are_not_taken_for_those_of_this_one(place: Place) -> None:
    repo = place.hub.put("owner/teacher", {file.name: file.read_bytes() for file in NANO.iterdir()})
    before = repo.refs["main"]
    done = place.tune(*kept("owner/teacher"))
    assert done.code == 0 and "asking owner/teacher" in done.err, done.err
    files = {file: file.stat().st_mtime_ns for file in place.folder.glob("kept/*/*/*")}
    config = (NANO / "config.json").read_bytes()
    now = place.hub.put("owner/teacher", {"config.json": config + b"\n"}).refs["main"]
    told = place.tune(*kept("owner/teacher")).error
    assert f"owner/teacher is at {now}, and these files are of {before}: " in told
    assert f"teacher.model=owner/teacher@{before} goes on with them; delete them" in told
    pinned = place.tune(*kept(f"owner/teacher@{before}"))
    assert pinned.code == 0 and "asking" not in pinned.err, pinned.err
    assert files == {file: file.stat().st_mtime_ns for file in place.folder.glob("kept/*/*/*")}


def test_without_the_hub_files_are_taken_as_they_are(place: Place) -> None:
    place.hub.put("owner/teacher", {file.name: file.read_bytes() for file in NANO.iterdir()})
    assert place.tune(*kept("owner/teacher")).code == 0
    place.hub.put("owner/teacher", {"config.json": b"{}"})
    for cache in ("home", "elsewhere"):
        done = place.tune(*kept("owner/teacher"), HF_HUB_OFFLINE="1", HF_HOME=str(place.folder / cache))
        assert done.code == 0 and "asking" not in done.err, done.err
