"""A directory is complete or absent: after an error, on a full disk, and after SIGKILL at any time."""

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


def write_files(directory: Path, version: int, files: int = 5) -> None:
    for index in range(files):
        (directory / f"{index}.txt").write_text(f"{version}\n" * 2000)


def read_version(directory: Path, files: int = 5) -> int:
    """Version number in all files of a directory."""
    versions = {line for index in range(files) for line in (directory / f"{index}.txt").read_text().split("\n")} - {""}
    assert len(versions) == 1
    assert all((directory / f"{index}.txt").stat().st_size == 2000 * (1 + len(*versions)) for index in range(files))
    return int(*versions)


def file_names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def write_version(directory: Path, version: int) -> None:
    with atomic.AtomicDir(directory) as partial:
        write_files(partial, version)


def test_directory_appears_when_complete(tmp_path):
    final = tmp_path / "a" / "final"
    with atomic.AtomicDir(final) as partial:
        write_files(partial, 1)
        assert not final.exists()
        assert not atomic.is_complete(partial)
    assert atomic.is_complete(final)
    assert read_version(final) == 1
    assert file_names(final.parent) == {"final"}


def test_files_have_the_permissions_of_the_directory(tmp_path):
    with atomic.AtomicDir(tmp_path / "final") as partial:
        save_file({"weight": torch.ones(2)}, partial / "model.safetensors")
        write_files(partial, 1, files=1)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "final").glob("*.*")}
    assert modes == {(tmp_path / "final").stat().st_mode & 0o666}


def test_old_partial_directory_is_removed(tmp_path):
    (tmp_path / "final.partial").mkdir()
    (tmp_path / "final.partial" / "stale").touch()
    write_version(tmp_path / "final", 1)
    assert "stale" not in file_names(tmp_path / "final")


def test_error_keeps_the_old_version(tmp_path):
    write_version(tmp_path / "final", 1)
    with pytest.raises(ZeroDivisionError), atomic.AtomicDir(tmp_path / "final") as partial:
        write_files(partial, 2)
        _ = 1 / 0
    assert read_version(tmp_path / "final") == 1
    assert file_names(tmp_path) == {"final"}


def exit_at(monkeypatch, call: int) -> None:
    """Exit the process at the n-th change of names or contents on the disk."""
    count = 0

    def exit_before(original):
        def wrapper(*values, **options):
            nonlocal count
            count += 1
            if count > call:
                os._exit(9)
            return original(*values, **options)

        return wrapper

    functions = [(os, "fsync"), (shutil, "rmtree")]
    functions += [(Path, name) for name in ("rename", "replace", "write_text", "unlink")]
    for module, name in functions:
        monkeypatch.setattr(module, name, exit_before(vars(module)[name]))


@pytest.mark.parametrize("old_is_complete", [True, False])
def test_kill_at_every_step_leaves_a_complete_version(tmp_path, monkeypatch, old_is_complete):
    """After a kill before each step, a reader sees the old or the new version, and the owner restores it."""
    versions = []
    for call in range(40):
        final = tmp_path / str(call) / "final"
        write_version(final, 1)
        if not old_is_complete:
            (final / atomic.MARK).unlink()
        child = os.fork()
        if child == 0:
            exit_at(monkeypatch, call)
            write_version(final, 2)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        complete_dir = atomic.find_complete_dir(final)
        assert complete_dir is not None or not old_is_complete
        version = read_version(complete_dir) if complete_dir else None
        atomic.remove_partial(final)
        assert atomic.is_complete(final) == (version is not None)
        assert atomic.is_complete(final) <= (file_names(final.parent) == {"final"})
        if version:
            assert read_version(final) == version
        write_version(final, 3)
        assert (read_version(final), file_names(final.parent)) == (3, {"final"})
        versions.append(version)
    else:
        pytest.fail("the writer never finished")
    assert set(versions) == ({1, 2} if old_is_complete else {None, 2})


def test_sigkill_while_replacing_leaves_a_complete_version(tmp_path):
    final = tmp_path / "final"
    write_version(final, 1)
    rng, last_version, kills = random.Random(0), 1, 0
    while kills < 12 or last_version == 1:
        child = os.fork()
        if child == 0:
            next_version = last_version
            while True:
                next_version += 1
                write_version(final, next_version)
        time.sleep(rng.uniform(0.002, 0.06) * 1.05**kills)  # a busy machine writes nothing in a short time
        kills += 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        complete_dir = atomic.find_complete_dir(final)
        assert complete_dir is not None
        version = read_version(complete_dir)
        assert version >= last_version
        atomic.remove_partial(final)
        assert read_version(final) == version
        assert file_names(tmp_path) == {"final"}
        last_version = version


def test_partially_removed_directory_is_incomplete(tmp_path, monkeypatch):
    write_version(tmp_path / "final", 1)
    child = os.fork()
    if child == 0:
        exit_at(monkeypatch, 2)  # after the marker is removed, before the other files are
        atomic.remove_dir(tmp_path / "final")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(file_names(tmp_path / "final")) == 5
    assert not atomic.is_complete(tmp_path / "final")


def test_corrupt_and_missing_files_are_found(tmp_path):
    write_version(tmp_path / "final", 1)
    assert atomic.find_corrupt_file(tmp_path / "final") is None
    (tmp_path / "final" / "3.txt").write_text("2\n" * 2000)
    assert atomic.find_corrupt_file(tmp_path / "final") == tmp_path / "final" / "3.txt"
    (tmp_path / "final" / "2.txt").unlink()
    assert atomic.find_corrupt_file(tmp_path / "final") == tmp_path / "final" / "2.txt"


@pytest.fixture
def small_files():
    """Limit files to 64 kB: larger writes fail with EFBIG, as they do with ENOSPC on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_with_python(directory: Path) -> None:
    (directory / "big").write_bytes(b"x" * 2**18)


def write_with_torch(directory: Path) -> None:
    with (directory / "big.pt").open("wb") as stream:
        torch.save({"x": torch.zeros(2**18)}, stream)


def write_with_safetensors(directory: Path) -> None:
    save_file({"x": torch.zeros(2**18)}, directory / "big.safetensors")


WRITERS = [write_with_python, write_with_torch, write_with_safetensors]


@pytest.mark.parametrize("write_large", WRITERS)
def test_failed_write_is_a_one_line_error(tmp_path, small_files, write_large):
    write_version(tmp_path / "state" / "00000005", 1)
    with pytest.raises(UserError) as caught, atomic.AtomicDir(tmp_path / "state" / "00000010") as partial:
        write_large(partial)
    text = str(caught.value)
    assert "\n" not in text
    for part in ("00000010", os.strerror(errno.EFBIG).lower(), "free", str(tmp_path / "state" / "00000005")):
        assert part in text
    assert file_names(tmp_path / "state") == {"00000005"}


@pytest.fixture
def tiny_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs requires root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("write_large", WRITERS)
def test_full_disk_keeps_the_last_state(tiny_disk, write_large):
    write_version(tiny_disk / "state" / "00000005", 1)
    with (
        pytest.raises(UserError, match=r"no space left on device.*00000005") as caught,
        atomic.AtomicDir(tiny_disk / "state" / "00000010") as partial,
    ):
        write_large(partial)
    assert "\n" not in str(caught.value)
    assert file_names(tiny_disk / "state") == {"00000005"}
    assert read_version(tiny_disk / "state" / "00000005") == 1


def test_read_only_disk_is_an_error(tiny_disk):
    write_version(tiny_disk / "final", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(UserError, match="read-only file system"):
        write_version(tiny_disk / "final", 2)
    with pytest.raises(UserError, match="read-only file system"):
        atomic.write_text_atomic(tiny_disk / "config.yaml", "a: 1\n")
    assert read_version(tiny_disk / "final") == 1


def test_free_space_is_checked_before_writing(tmp_path):
    free_bytes = shutil.disk_usage(tmp_path).free
    atomic.check_free_space(tmp_path / "missing" / "parent" / "directory", free_bytes // 2)
    with pytest.raises(UserError, match="free"):
        atomic.check_free_space(tmp_path / "missing" / "parent" / "directory", free_bytes * 2)
    assert file_names(tmp_path) == set()


def test_only_regular_files_are_replaced(tmp_path):
    """A pipe or device of this name, such as /dev/null, would become a file. Links are written through."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    (tmp_path / "link_to_pipe").symlink_to(pipe)
    for path in (pipe, tmp_path / "link_to_pipe", tmp_path, Path()):
        for call in (atomic.check_writable, lambda path: atomic.write_text_atomic(path, "x")):
            with pytest.raises(UserError):
                call(path)
    assert pipe.is_fifo() and (tmp_path / "link_to_pipe").is_symlink()
    file.write_text("old")
    link.symlink_to(file)
    (tmp_path / "new_link").symlink_to(tmp_path / "new")
    for path in (link, tmp_path / "new_link"):
        atomic.check_writable(path)
        atomic.write_text_atomic(path, "new")
        assert path.is_symlink() and path.read_text() == "new"
    assert file_names(tmp_path) == {"pipe", "link", "file", "link_to_pipe", "new", "new_link"}


def test_small_file_is_replaced_atomically(tmp_path, small_files):
    path = tmp_path / "config.yaml"
    atomic.write_text_atomic(path, "lr: 1\n")
    atomic.write_text_atomic(path, "lr: 2  # é\n")
    with pytest.raises(UserError, match=r"config\.yaml"):
        atomic.write_text_atomic(path, "x" * 2**18)
    assert path.read_text(encoding="utf-8") == "lr: 2  # é\n"
    assert file_names(tmp_path) == {"config.yaml"}
