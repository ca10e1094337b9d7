"""A folder is whole or it is not there: after an error, a full disk and SIGKILL at any instant."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tunekit.checkpoint import atomic
from tunekit.errors import UserError


def fill(folder: Path, version: int, files: int = 5) -> None:
    for index in range(files):
        (folder / f"{index}.txt").write_text(f"{version}\n" * 2000)


def version(folder: Path, files: int = 5) -> int:
    """The one version that all files of a folder are of."""
    found = {line for index in range(files) for line in (folder / f"{index}.txt").read_text().split("\n")} - {""}
    assert len(found) == 1
    assert all((folder / f"{index}.txt").stat().st_size == 2000 * (1 + len(*found)) for index in range(files))
    return int(*found)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(folder: Path, number: int) -> None:
    with atomic.AtomicDir(folder) as partial:
        fill(partial, number)


def test_appears_at_the_end(tmp_path):
    final = tmp_path / "a" / "final"
    with atomic.AtomicDir(final) as partial:
        fill(partial, 1)
        assert not final.exists()
        assert not atomic.is_complete(partial)
    assert atomic.is_complete(final)
    assert version(final) == 1
    assert names(final.parent) == {"final"}


def test_files_are_for_those_whom_the_folder_is_for(tmp_path):
    with atomic.AtomicDir(tmp_path / "final") as partial:
        save_file({"weight": torch.ones(2)}, partial / "model.safetensors")
        fill(partial, 1, files=1)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "final").glob("*.*")}
    assert modes == {(tmp_path / "final").stat().st_mode & 0o666}


def test_old_partial_is_removed(tmp_path):
    (tmp_path / "final.partial").mkdir()
    (tmp_path / "final.partial" / "stale").touch()
    write(tmp_path / "final", 1)
    assert "stale" not in names(tmp_path / "final")


def test_error_leaves_the_old_one(tmp_path):
    write(tmp_path / "final", 1)
    with pytest.raises(ZeroDivisionError), atomic.AtomicDir(tmp_path / "final") as partial:
        fill(partial, 2)
        _ = 1 / 0
    assert version(tmp_path / "final") == 1
    assert names(tmp_path) == {"final"}


def cut_at(monkeypatch, call: int) -> None:
    """Let the process end at the n-th change of names or contents on the disk."""
    count = 0

    def dying(true):
        def act(*values, **options):
            nonlocal count
            count += 1
            if count > call:
                os._exit(9)
            return true(*values, **options)

        return act

    ends = [(os, "fsync"), (shutil, "rmtree")]
    ends += [(Path, name) for name in ("rename", "replace", "write_text", "unlink")]
    for module, name in ends:
        monkeypatch.setattr(module, name, dying(vars(module)[name]))


@pytest.mark.parametrize("old_is_whole", [True, False])
def test_every_cut_leaves_a_whole_version(tmp_path, monkeypatch, old_is_whole):
    """Die before each single act of replacing; a reader finds the old or the new one, and the owner mends it."""
    seen = []
    for call in range(40):
        final = tmp_path / str(call) / "final"
        write(final, 1)
        if not old_is_whole:
            (final / atomic.MARK).unlink()
        child = os.fork()
        if child == 0:
            cut_at(monkeypatch, call)
            write(final, 2)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        place = atomic.find_complete_dir(final)
        assert place is not None or not old_is_whole
        before = version(place) if place else None
        atomic.remove_partial(final)
        assert atomic.is_complete(final) == (before is not None)
        assert atomic.is_complete(final) <= (names(final.parent) == {"final"})
        if before:
            assert version(final) == before
        write(final, 3)
        assert (version(final), names(final.parent)) == (3, {"final"})
        seen.append(before)
    else:
        pytest.fail("the writer never came to its end")
    assert set(seen) == ({1, 2} if old_is_whole else {None, 2})


def test_killed_while_replacing(tmp_path):
    final = tmp_path / "final"
    write(final, 1)
    dice, last, kills = random.Random(0), 1, 0
    while kills < 12 or last == 1:
        child = os.fork()
        if child == 0:
            number = last
            while True:
                number += 1
                write(final, number)
        time.sleep(dice.uniform(0.002, 0.06) * 1.05**kills)  # a busy machine writes nothing in so short a time
        kills += 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        place = atomic.find_complete_dir(final)
        assert place is not None
        found = version(place)
        assert found >= last
        atomic.remove_partial(final)
        assert version(final) == found
        assert names(tmp_path) == {"final"}
        last = found


def test_half_removed_is_not_whole(tmp_path, monkeypatch):
    write(tmp_path / "final", 1)
    child = os.fork()
    if child == 0:
        cut_at(monkeypatch, 2)  # the mark is gone, the rest is not
        atomic.remove_dir(tmp_path / "final")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(names(tmp_path / "final")) == 5
    assert not atomic.is_complete(tmp_path / "final")


def test_damage_is_seen(tmp_path):
    write(tmp_path / "final", 1)
    assert atomic.find_corrupt_file(tmp_path / "final") is None
    (tmp_path / "final" / "3.txt").write_text("2\n" * 2000)
    assert atomic.find_corrupt_file(tmp_path / "final") == tmp_path / "final" / "3.txt"
    (tmp_path / "final" / "2.txt").unlink()
    assert atomic.find_corrupt_file(tmp_path / "final") == tmp_path / "final" / "2.txt"


@pytest.fixture
def small_files():
    """No file over 64 kB: every write beyond says EFBIG, as a full disk says ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def with_python(folder: Path) -> None:
    (folder / "big").write_bytes(b"x" * 2**18)


def with_torch(folder: Path) -> None:
    with (folder / "big.pt").open("wb") as stream:
        torch.save({"x": torch.zeros(2**18)}, stream)


def with_safetensors(folder: Path) -> None:
    save_file({"x": torch.zeros(2**18)}, folder / "big.safetensors")


WAYS = [with_python, with_torch, with_safetensors]


@pytest.mark.parametrize("way", WAYS)
def test_refused_write_is_one_line(tmp_path, small_files, way):
    write(tmp_path / "state" / "00000005", 1)
    with pytest.raises(UserError) as caught, atomic.AtomicDir(tmp_path / "state" / "00000010") as partial:
        way(partial)
    text = str(caught.value)
    assert "\n" not in text
    for part in ("00000010", os.strerror(errno.EFBIG).lower(), "free", "nothing old was touched"):
        assert part in text
    assert f"the last complete state is {tmp_path / 'state' / '00000005'}" in text
    assert names(tmp_path / "state") == {"00000005"}


@pytest.fixture
def tiny_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("way", WAYS)
def test_full_disk(tiny_disk, way):
    write(tiny_disk / "state" / "00000005", 1)
    said = pytest.raises(UserError, match=r"no space left on device.*last complete state is .*00000005")
    with said as caught, atomic.AtomicDir(tiny_disk / "state" / "00000010") as partial:
        way(partial)
    assert "\n" not in str(caught.value)
    assert names(tiny_disk / "state") == {"00000005"}
    assert version(tiny_disk / "state" / "00000005") == 1


def test_read_only_disk(tiny_disk):
    write(tiny_disk / "final", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(UserError, match="read-only file system"):
        write(tiny_disk / "final", 2)
    with pytest.raises(UserError, match="read-only file system"):
        atomic.write_text_atomic(tiny_disk / "config.yaml", "a: 1\n")
    assert version(tiny_disk / "final") == 1


def test_room_is_asked_for_before_writing(tmp_path):
    room = shutil.disk_usage(tmp_path).free
    atomic.check_free_space(tmp_path / "not" / "there" / "yet", room // 2)
    with pytest.raises(UserError, match="free.*nothing old was touched"):
        atomic.check_free_space(tmp_path / "not" / "there" / "yet", room * 2)
    assert names(tmp_path) == set()


def test_small_file_is_replaced(tmp_path, small_files):
    file = tmp_path / "config.yaml"
    atomic.write_text_atomic(file, "lr: 1\n")
    atomic.write_text_atomic(file, "lr: 2  # é\n")
    with pytest.raises(UserError, match="cannot write"):
        atomic.write_text_atomic(file, "x" * 2**18)
    assert file.read_text(encoding="utf-8") == "lr: 2  # é\n"
    assert names(tmp_path) == {"config.yaml"}
