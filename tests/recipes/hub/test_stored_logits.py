"""Offline teachers from the Hub: the commit of stored logits is recorded, and the Hub is not needed again."""

import shutil

from tests.recipes.hub.conftest import Sandbox
from tunekit import assets

NANO = {file.name: file.read_bytes() for file in assets.MODELS["tunekit/nano"].iterdir()}
ARGS = ("run", "distill", "nano/distill", "model=tunekit/nano", "data.max_samples=4", "device=cpu", "output_dir=out")
ARGS += ("eval_data={kind: chat, source: tunekit/tools, split: test, max_samples: 2, max_length: 256}",)
ARGS += ("max_steps=2", "global_batch_size=2", "micro_batch_size=2", "save_every=1")
# `tune` with a SIGTERM after the first save.
STOP_SCRIPT = """
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


def offline_args(model: str) -> tuple[str, ...]:
    return *ARGS, f"teacher={{kind: offline, model: {model}, logits_dir: logits, top_k: 4}}"


def file_times(sandbox: Sandbox) -> dict[str, int]:
    """Modification time of each stored file."""
    return {str(file): file.stat().st_mtime_ns for file in sandbox.directory.glob("logits/*/*/*")}


def add_commit(sandbox: Sandbox) -> str:
    """Add a commit to the teacher and return its id."""
    return sandbox.hub.put("owner/teacher", {"config.json": NANO["config.json"] + b"\n"}).refs["main"]


def test_stopped_run_resumes_with_the_first_commit(sandbox: Sandbox) -> None:
    commit = sandbox.hub.put("owner/teacher", NANO).refs["main"]
    stopped = sandbox.run_python(STOP_SCRIPT, *offline_args("owner/teacher"))
    assert stopped.code == 143 and "computing them with owner/teacher" in stopped.err, stopped.err
    files, new_commit = file_times(sandbox), add_commit(sandbox)
    done = sandbox.tune(*offline_args("owner/teacher"))
    assert done.code == 0 and "computing them" not in done.err, done.err
    lines = [line for line in done.err.splitlines() if new_commit in line]
    assert len(lines) == 1 and "owner/teacher" in lines[0] and commit in lines[0]
    assert file_times(sandbox) == files


def test_logits_of_two_commits_are_not_mixed(sandbox: Sandbox) -> None:
    commit = sandbox.hub.put("owner/teacher", NANO).refs["main"]
    assert sandbox.tune(*offline_args("owner/teacher")).code == 0
    files, new_commit = file_times(sandbox), add_commit(sandbox)
    overwrite_error = sandbox.tune(*offline_args(f"owner/teacher@{new_commit}"), "--overwrite").error
    assert all(text in overwrite_error for text in (f"owner/teacher@{new_commit}", commit, "teacher.logits_dir"))
    deleted = next(sandbox.directory.glob("logits/*/00000"))
    shutil.rmtree(deleted)
    incomplete_error = sandbox.tune(*offline_args("owner/teacher"), "--overwrite").error
    assert all(
        text in incomplete_error
        for text in ("owner/teacher", new_commit, "teacher.logits_dir", f"teacher.model=owner/teacher@{commit}")
    )
    pinned = sandbox.tune(*offline_args(f"owner/teacher@{commit}"), "--overwrite")
    assert pinned.code == 0 and "computing them" in pinned.err, pinned.err
    new_times = file_times(sandbox)
    changed = {file for file in files if new_times[file] != files[file]}
    assert changed == {file for file in files if file.startswith(f"{deleted}/")}


def test_stored_logits_are_used_without_the_hub(sandbox: Sandbox) -> None:
    sandbox.hub.put("owner/teacher", NANO)
    assert sandbox.tune(*offline_args("owner/teacher")).code == 0
    sandbox.hub.put("owner/teacher", {"config.json": b"{}"})
    for cache in ("home", "other"):
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(sandbox.directory / cache)}
        done = sandbox.tune(*offline_args("owner/teacher"), "--overwrite", **offline)
        assert done.code == 0 and "computing them" not in done.err, done.err
