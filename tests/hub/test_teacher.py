"""A teacher of the Hub whose view of rows is on disk: which commit it was is known, and the Hub is needed no more."""

import shutil
import subprocess
import sys

from tests.hub.conftest import Place
from tunekit import assets

NANO = {file.name: file.read_bytes() for file in assets.MODELS["tunekit/nano"].iterdir()}
WORDS = ("run", "distill", "nano/distill", "model=tunekit/nano", "data.max_samples=4", "device=cpu", "output_dir=out")
WORDS += ("eval_data={kind: chat, source: tunekit/tools, split: test, max_samples: 2, max_length: 256}",)
WORDS += ("max_steps=2", "global_batch_size=2", "micro_batch_size=2", "save_every=1")
# `tune`, told to stop when it has saved the first step.
STOPPED = """
import signal, sys
from tunekit.cli import main as cli
from tunekit.checkpoint.training_state import Checkpointer
save = Checkpointer.save
def stopping(state, at):
    save(state, at)
    if at == 1:
        signal.raise_signal(signal.SIGTERM)
Checkpointer.save = stopping
sys.exit(cli.main(sys.argv[1:]))
"""


def kept(model: str) -> tuple[str, ...]:
    return *WORDS, f"teacher={{kind: offline, model: {model}, logits_dir: kept, top_k: 4}}"


def times(place: Place) -> dict[str, int]:
    """When each stored file was written."""
    return {str(file): file.stat().st_mtime_ns for file in place.folder.glob("kept/*/*/*")}


def moved(place: Place) -> str:
    """The next commit of the teacher."""
    return place.hub.put("owner/teacher", {"config.json": NANO["config.json"] + b"\n"}).refs["main"]


def test_a_stopped_run_ends_with_the_commit_that_it_began_with(place: Place) -> None:
    before = place.hub.put("owner/teacher", NANO).refs["main"]
    command = [sys.executable, "-c", STOPPED, *kept("owner/teacher")]
    begun = subprocess.run(command, env=place.env(), cwd=place.folder, capture_output=True, text=True)
    assert begun.returncode == 143 and "asking owner/teacher" in begun.stderr, begun.stderr
    files, now = times(place), moved(place)
    done = place.tune(*kept("owner/teacher"))
    assert done.code == 0 and "asking" not in done.err, done.err
    told = [line for line in done.err.splitlines() if now in line]
    assert len(told) == 1 and f"owner/teacher is at {now}, and these files are of {before}: going on" in told[0]
    assert times(place) == files


def test_two_commits_are_never_mixed(place: Place) -> None:
    before = place.hub.put("owner/teacher", NANO).refs["main"]
    assert place.tune(*kept("owner/teacher")).code == 0
    files, now = times(place), moved(place)
    asked = place.tune(*kept(f"owner/teacher@{now}"), "--overwrite").error
    assert f"owner/teacher@{now} is at {now}, and these files are of {before}: give another teacher.logits_dir" in asked
    gone = next(place.folder.glob("kept/*/00000"))
    shutil.rmtree(gone)
    half = place.tune(*kept("owner/teacher"), "--overwrite").error
    assert f"owner/teacher is at {now}, and these files are of {before}: give another teacher.logits_dir, or " in half
    assert f"delete them; a new run may go on with them as teacher.model=owner/teacher@{before}" in half
    pinned = place.tune(*kept(f"owner/teacher@{before}"), "--overwrite")
    assert pinned.code == 0 and "asking" in pinned.err, pinned.err
    found = times(place)
    changed = {file for file in files if found[file] != files[file]}
    assert changed == {file for file in files if file.startswith(f"{gone}/")}


def test_without_the_hub_files_are_taken_as_they_are(place: Place) -> None:
    place.hub.put("owner/teacher", NANO)
    assert place.tune(*kept("owner/teacher")).code == 0
    place.hub.put("owner/teacher", {"config.json": b"{}"})
    for cache in ("home", "elsewhere"):
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place.folder / cache)}
        done = place.tune(*kept("owner/teacher"), "--overwrite", **offline)
        assert done.code == 0 and "asking" not in done.err, done.err
