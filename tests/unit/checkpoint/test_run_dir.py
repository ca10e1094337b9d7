"""A run directory belongs to one process and one config."""

import os
import signal
import subprocess
import time
from datetime import date

import pytest

from tests.helpers.wait import wait_until
from tunekit.checkpoint import atomic
from tunekit.checkpoint.run_dir import check_final_files, open_run_dir
from tunekit.errors import UserError

CONFIG = """recipe: sft
seed: 1
out: runs/a
optimizer:
  kind: adamw
  lr: 0.0001
log:
  every: 1
data:
  source: rows.jsonl
  num_proc: 1
"""
LIVE = frozenset({"log", "*.num_proc"})


def file_names(directory):
    return {path.name for path in directory.iterdir()}


def write_results(run_dir):
    with atomic.AtomicDir(run_dir.folder / "state" / "00000001") as partial:
        (partial / "x").write_text("x")
    with atomic.AtomicDir(run_dir.folder / "final") as partial:
        (partial / "x").write_text("x")
    (run_dir.folder / "metrics.jsonl").write_text('{"step": 1}\n')


def config_text(run_dir) -> str:
    """Config text without the first line, which has the start date."""
    first, _, text = (run_dir.folder / "config.yaml").read_text().partition("\n")
    assert str(run_dir.started_on) in first and first.startswith("# ")
    return text


def test_directory_is_created_and_reopened(tmp_path):
    out = tmp_path / "runs" / "a"
    for _ in range(2):
        with open_run_dir(out, CONFIG, LIVE) as run_dir:
            write_results(run_dir)
    assert config_text(run_dir) == CONFIG
    assert file_names(out) == {".lock", "config.yaml", "metrics.jsonl", "state", "final"}


def test_changed_config_names_every_key(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    other = CONFIG.replace("seed: 1", "seed: 2").replace("0.0001", "0.0003").replace("every: 1", "every: 5")
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            open_run_dir(tmp_path / "a", other, LIVE)
        text = str(caught.value)
        assert all(part in text for part in ("seed: 1", "2", "optimizer.lr: 0.0001", "0.0003"))
        assert "every" not in text
        assert "--overwrite" in text
        assert "output_dir" in text
        assert "\n" not in text
        assert config_text(run_dir) == CONFIG


def test_live_keys_may_change(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    other = CONFIG.replace("every: 1", "every: 5").replace("num_proc: 1", "num_proc: 2")
    open_run_dir(tmp_path / "a", other, LIVE).close()
    assert config_text(run_dir) == other


def test_a_file_may_be_named_by_another_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "copy.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    for source in ("./rows.jsonl", str(tmp_path / "rows.jsonl")):
        open_run_dir(tmp_path / "a", CONFIG.replace("rows.jsonl", source), LIVE).close()
    for source in ("copy.jsonl", "missing.jsonl", "x" * 300):
        with pytest.raises(UserError, match=r"data\.source"):
            open_run_dir(tmp_path / "a", CONFIG.replace("rows.jsonl", source), LIVE)


def test_run_without_results_accepts_any_config(tmp_path):
    open_run_dir(tmp_path / "a", CONFIG, LIVE).close()
    other = CONFIG.replace("seed: 1", "seed: 2")
    with open_run_dir(tmp_path / "a", other, LIVE) as run_dir:
        assert config_text(run_dir) == other


def test_invalid_yaml_is_an_error(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    (run_dir.folder / "config.yaml").write_text("a: [1\n")
    with pytest.raises(UserError, match=r"config\.yaml.*--overwrite"):
        open_run_dir(tmp_path / "a", CONFIG, LIVE)


def test_directory_with_other_files_is_rejected(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="output_dir"):
        open_run_dir(tmp_path, CONFIG, LIVE)
    with pytest.raises(UserError, match="output_dir"):
        open_run_dir(tmp_path, CONFIG, LIVE, overwrite=True)
    assert file_names(tmp_path) == {"thesis.tex"}


def test_file_as_directory_is_rejected(tmp_path):
    (tmp_path / "a").write_text("x")
    for out in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(UserError, match="output_dir"):
            open_run_dir(out, CONFIG, LIVE)


def test_second_process_gets_the_id_of_the_first(tmp_path):
    child = os.fork()
    if child == 0:
        with open_run_dir(tmp_path / "a", CONFIG, LIVE):
            (tmp_path / "ready").touch()
            time.sleep(60)
        os._exit(0)
    wait_until((tmp_path / "ready").exists)
    for fresh in (False, True):
        with pytest.raises(UserError, match=f"process {child}"):
            open_run_dir(tmp_path / "a", CONFIG, LIVE, fresh)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    open_run_dir(tmp_path / "a", CONFIG, LIVE).close()


def test_rejected_config_releases_the_lock(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    with pytest.raises(UserError, match="seed"):
        open_run_dir(tmp_path / "a", CONFIG.replace("seed: 1", "seed: 2"), LIVE)
    open_run_dir(tmp_path / "a", CONFIG, LIVE).close()


def test_overwrite_erases_results_when_the_run_starts(tmp_path):
    out = tmp_path / "a"
    with open_run_dir(out, CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    (out / "final.partial").mkdir()
    (out / "tensorboard").mkdir()
    (out / "notes.txt").write_text("mine")
    other, before = CONFIG.replace("seed: 1", "seed: 2"), file_names(out)
    open_run_dir(out, other, LIVE, overwrite=True).close()  # closed before it started, for example after a data error
    assert file_names(out) == before
    open_run_dir(out, CONFIG, LIVE).close()
    with open_run_dir(out, other, LIVE, overwrite=True) as run_dir:
        run_dir.start()
        assert file_names(out) == {".lock", "notes.txt", "config.yaml"}
    open_run_dir(out, other, LIVE).close()


def test_read_only_disk_is_an_error(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=100k"]
    if subprocess.run([*options, "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs requires root")
    try:
        with open_run_dir(disk / "a", CONFIG, LIVE) as run_dir:
            write_results(run_dir)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for open_dir in (
            lambda: open_run_dir(disk / "a", CONFIG, LIVE),
            lambda: open_run_dir(disk / "b", CONFIG, LIVE),
        ):
            with pytest.raises(UserError, match=r"Read-only file system.*output_dir"):
                open_dir()
        with pytest.raises(UserError, match="Read-only"):
            open_run_dir(disk / "a", CONFIG, LIVE, overwrite=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_start_date_is_kept(tmp_path):
    before = date.today()
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        assert run_dir.started_on in (before, date.today()), "the date can change during the test"
    config = tmp_path / "a" / "config.yaml"
    config.write_text(config.read_text().replace(str(run_dir.started_on), "2020-02-29"))
    (tmp_path / "a" / "metrics.jsonl").touch()
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        assert run_dir.started_on == date(2020, 2, 29)
        assert config_text(run_dir) == CONFIG


def test_complete_states_are_used_without_the_config(tmp_path, capsys):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    (tmp_path / "a/config.yaml").unlink()
    open_run_dir(tmp_path / "a", CONFIG, LIVE).close()
    assert f"{tmp_path}/a/config.yaml is missing" in capsys.readouterr().err
    assert config_text(run_dir) == CONFIG
    with pytest.raises(UserError, match="different config"):
        open_run_dir(tmp_path / "a", CONFIG.replace("seed: 1", "seed: 2"), LIVE)


def test_deleted_file_of_the_result_is_named(tmp_path):
    with open_run_dir(tmp_path / "a", CONFIG, LIVE) as run_dir:
        write_results(run_dir)
    check_final_files(tmp_path / "a")
    (tmp_path / "a/final/x").unlink()
    with pytest.raises(UserError, match=r"final/x: .*state/00000001"):
        check_final_files(tmp_path / "a")
    atomic.remove_dir(tmp_path / "a/state/00000001")
    with pytest.raises(UserError, match="no training state is left"):
        check_final_files(tmp_path / "a")
