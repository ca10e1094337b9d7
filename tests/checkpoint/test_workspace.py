"""The folder of a run belongs to one process and one config."""

import os
import signal
import subprocess
import time
from datetime import date

import pytest

from tests.waiting import until
from tunekit.checkpoint import atomic
from tunekit.checkpoint.run_dir import open_run_dir
from tunekit.errors import UserError

CONFIG = "recipe: sft\nseed: 1\nout: runs/a\noptimizer:\n  kind: adamw\n  lr: 0.0001\nlog:\n  every: 1\n"
LIVE = frozenset({"log"})


def names(folder):
    return {path.name for path in folder.iterdir()}


def leave_results(space):
    with atomic.AtomicDir(space.state / "00000001") as partial:
        (partial / "x").write_text("x")
    with atomic.AtomicDir(space.final) as partial:
        (partial / "x").write_text("x")
    space.metrics.write_text('{"step": 1}\n')


def body(space) -> str:
    """The config, behind the line that says when the run began."""
    first, _, rest = space.config.read_text().partition("\n")
    assert first == f"# began on {space.day}"
    return rest


def test_makes_and_takes_up_again(tmp_path):
    out = tmp_path / "runs" / "a"
    for _ in range(2):
        with open_run_dir(out, CONFIG, LIVE) as space:
            leave_results(space)
    assert body(space) == CONFIG
    assert names(out) == {".lock", "config.yaml", "metrics.jsonl", "state", "final"}


def test_another_config_names_every_key(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as space:
        leave_results(space)
    other = CONFIG.replace("seed: 1", "seed: 2").replace("0.0001", "0.0003").replace("every: 1", "every: 5")
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            open_run_dir(tmp_path / "a", other, LIVE)
        text = str(caught.value)
        assert "seed: 1 there, 2 now" in text
        assert "optimizer.lr: 0.0001 there, 0.0003 now" in text
        assert "every" not in text
        assert "--overwrite" in text
        assert "output_dir=" in text
        assert "\n" not in text
        assert body(space) == CONFIG


def test_live_keys_may_change(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as space:
        leave_results(space)
    other = CONFIG.replace("every: 1", "every: 5")
    open_run_dir(tmp_path / "a", other, LIVE).close()
    assert body(space) == other


def test_a_run_without_results_takes_any_config(tmp_path):
    open_run_dir(tmp_path / "a", CONFIG, LIVE).close()
    other = CONFIG.replace("seed: 1", "seed: 2")
    with open_run_dir(tmp_path / "a", other, LIVE) as space:
        assert body(space) == other


def test_config_that_is_no_yaml(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as space:
        leave_results(space)
    space.config.write_text("a: [1\n")
    with pytest.raises(UserError, match=r"config\.yaml.*--overwrite"):
        open_run_dir(tmp_path / "a", CONFIG, LIVE)


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="output_dir="):
        open_run_dir(tmp_path, CONFIG, LIVE)
    with pytest.raises(UserError, match="output_dir="):
        open_run_dir(tmp_path, CONFIG, LIVE, fresh=True)
    assert names(tmp_path) == {"thesis.tex"}


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "a").write_text("x")
    for out in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(UserError, match="output_dir="):
            open_run_dir(out, CONFIG, LIVE)


def test_second_process_is_told_the_first(tmp_path):
    child = os.fork()
    if child == 0:
        with open_run_dir(tmp_path / "a", CONFIG, LIVE):
            (tmp_path / "ready").touch()
            time.sleep(60)
        os._exit(0)
    until((tmp_path / "ready").exists)
    for fresh in (False, True):
        with pytest.raises(UserError, match=f"process {child}"):
            open_run_dir(tmp_path / "a", CONFIG, LIVE, fresh)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    open_run_dir(tmp_path / "a", CONFIG, LIVE).close()


def test_a_refused_config_frees_the_lock(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as space:
        leave_results(space)
    with pytest.raises(UserError, match="seed"):
        open_run_dir(tmp_path / "a", CONFIG.replace("seed: 1", "seed: 2"), LIVE)
    open_run_dir(tmp_path / "a", CONFIG, LIVE).close()


def test_starting_over_takes_what_the_run_wrote_when_it_begins(tmp_path):
    out = tmp_path / "a"
    with open_run_dir(out, CONFIG, LIVE) as space:
        leave_results(space)
    (out / "final.partial").mkdir()
    (out / "tensorboard").mkdir()
    (out / "notes.txt").write_text("mine")
    other, before = CONFIG.replace("seed: 1", "seed: 2"), names(out)
    open_run_dir(out, other, LIVE, fresh=True).close()  # something was wrong with what it should learn
    assert names(out) == before
    open_run_dir(out, CONFIG, LIVE).close()
    with open_run_dir(out, other, LIVE, fresh=True) as space:
        space.begin()
        assert names(out) == {".lock", "notes.txt", "config.yaml"}
    open_run_dir(out, other, LIVE).close()


def test_read_only_place(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=100k"]
    if subprocess.run([*options, "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        with open_run_dir(place / "a", CONFIG, LIVE) as space:
            leave_results(space)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        for act in (lambda: open_run_dir(place / "a", CONFIG, LIVE), lambda: open_run_dir(place / "b", CONFIG, LIVE)):
            with pytest.raises(UserError, match=r"Read-only file system.*output_dir="):
                act()
        with pytest.raises(UserError, match="Read-only"):
            open_run_dir(place / "a", CONFIG, LIVE, fresh=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_run_keeps_the_day_it_began_on(tmp_path):
    before = date.today()
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as space:
        assert space.day in (before, date.today()), "it may be midnight"
    config = tmp_path / "a" / "config.yaml"
    config.write_text(config.read_text().replace(str(space.day), "2020-02-29"))
    (tmp_path / "a" / "metrics.jsonl").touch()
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as space:
        assert space.day == date(2020, 2, 29)
        assert body(space) == CONFIG
