"""Entries are whole or not there, made once however many want them, and removed only where nobody reads them."""

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import LIMIT, until
from tunekit.data.preprocess import cache
from tunekit.data.preprocess.tokenized_dataset import (
    ABOUT,
    Document,
    TokenizedChunk,
    TokenizedDatasetWriter,
    flatten_documents,
    is_complete,
)
from tunekit.errors import UserError

COUNT = 400
# Makes an entry of 400 documents in many small parts, as soon as it may. What it does and waits for stands in a file.
MAKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from tests.data import test_cache

def log(line):
    with Path(sys.argv[1]).open("a") as file:
        file.write(line + "\\n")

def make(folder):
    log("made")
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    test_cache.write(folder, float(sys.argv[2]))

found = test_cache.cache.get_or_build("key", make, log)
print(found.digest, len(found), flush=True)
"""


def write(folder: Path, seconds: float = 0.0, count: int = COUNT) -> None:
    with TokenizedDatasetWriter(folder) as writer:
        for number in range(count):
            one = Document(np.full(9, number, np.int32), np.ones(9, bool), 9)
            writer.add(TokenizedChunk(None, 1, 0, 0, 0, [], flatten_documents([one], [f"rows.jsonl:{number + 1}"])))
            time.sleep(seconds / count)
        writer.finish(source="rows.jsonl", split="train", made=time.time(), seconds=seconds)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries lie."""
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def start(log: Path, seconds: float, let: Path) -> subprocess.Popen[str]:
    """A process that wants the entry; it is made in so many seconds, once the file `let` is there."""
    line = [sys.executable, "-c", MAKER, str(log), str(seconds), str(let), str(Path(__file__).parents[2])]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def refuse(folder: Path) -> None:
    raise AssertionError("made again")


def test_an_entry_is_made_once(place: Path) -> None:
    made = cache.get_or_build("key", write, pytest.fail)
    again = cache.get_or_build("key", refuse, pytest.fail)
    assert (len(again), again.digest) == (COUNT, made.digest)
    assert again.where(COUNT - 1) == f"rows.jsonl:{COUNT}"
    assert sorted(path.name for path in place.iterdir()) == ["key", "key.lock"]


def test_of_several_processes_one_makes_it(place: Path, tmp_path: Path) -> None:
    log, let = tmp_path / "log", tmp_path / "let"
    processes = [start(log, 0.1, let) for _ in range(3)]
    until(lambda: len(said(log)) == 3, *processes)
    let.touch()
    told = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, told
    waiting = f"waiting for another process that prepares the same rows ({place / 'key'})"
    assert sorted(said(log)) == ["made", waiting, waiting]
    assert len({out for out, _ in told}) == 1
    assert sorted(path.name for path in place.iterdir()) == ["key", "key.lock"]


def test_who_is_killed_leaves_nothing_that_is_taken_for_whole(place: Path, tmp_path: Path) -> None:
    log, let = tmp_path / "log", tmp_path / "let"
    let.touch()
    for _ in range(6):
        with start(log, 0.5, let) as process:
            until(log.exists, process)
            time.sleep(random.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
        log.unlink()
        if is_complete(place / "key"):
            assert len(cache.get_or_build("key", refuse, pytest.fail)) == COUNT
            gc.collect()
            assert cache.remove_entry(place / "key")
        else:
            assert not cache.list_entries()
            assert cache.list_unfinished()
    found = cache.get_or_build("key", write, pytest.fail)
    assert found.tokens.tolist() == [number for number in range(COUNT) for _ in range(9)]
    assert not cache.list_unfinished(), "what others left goes with the next one"


@pytest.mark.parametrize("name", ["tokens", "bounds", ABOUT])
def test_a_damaged_entry_is_made_again(place: Path, name: str) -> None:
    cache.get_or_build("key", write, pytest.fail)
    file = place / "key" / name
    file.write_bytes(file.read_bytes()[:-3])
    assert len(cache.get_or_build("key", write, pytest.fail)) == COUNT
    assert is_complete(place / "key")


def test_a_mistake_leaves_nothing(place: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "tokens").write_bytes(b"1234")
        raise UserError("rows.jsonl:3: no")

    with pytest.raises(UserError, match="^rows.jsonl:3: no$"):
        cache.get_or_build("key", make, pytest.fail)
    assert [path.name for path in place.iterdir()] == ["key.lock"]


def test_where_nothing_can_be_kept_a_folder_for_now_does(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.parent.write_text("a file stands here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "now"))
    (tmp_path / "now").mkdir()
    told: list[str] = []
    found = cache.get_or_build("key", write, told.append)
    reason = f"cannot write {place} (not a directory); TUNEKIT_CACHE names another folder"
    assert told == [f"prepared rows are not kept: {reason}"]
    assert len(found) == COUNT
    del found
    gc.collect()
    assert not list((tmp_path / "now").iterdir())


def test_off_keeps_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", "off")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = cache.get_or_build("key", write, pytest.fail)
    assert len(found) == COUNT
    assert len(list(tmp_path.iterdir())) == 1
    del found
    gc.collect()
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError, match="made again"):
        cache.get_or_build("key", refuse, pytest.fail)
    assert not list(tmp_path.iterdir())


def test_what_is_read_or_written_is_not_removed(place: Path, tmp_path: Path) -> None:
    found = cache.get_or_build("key", write, pytest.fail)
    assert not cache.remove_entry(place / "key")
    del found
    gc.collect()
    assert cache.remove_entry(place / "key")
    assert not list(place.iterdir())
    with start(tmp_path / "log", 0.0, tmp_path / "never") as process:
        until(cache.list_unfinished, process)
        assert not any(map(cache.remove_entry, cache.list_unfinished()))
        process.kill()
    assert all(map(cache.remove_entry, cache.list_unfinished()))
    assert not cache.list_unfinished()


def test_entries_tell_what_they_hold(place: Path) -> None:
    assert not cache.list_entries()
    cache.get_or_build("old", write, pytest.fail)
    cache.get_or_build("new", write, pytest.fail)
    os.utime(place / "old" / ABOUT, (1000, 1000))
    new, old = cache.list_entries()
    assert (new.key, old.key, old.used) == ("new", "old", 1000)
    assert (old.about["documents"], old.about["tokens"], old.about["source"]) == (COUNT, 9 * COUNT, "rows.jsonl")
    assert old.size == sum(file.stat().st_size for file in (place / "old").iterdir())
    cache.get_or_build("old", refuse, pytest.fail)
    assert cache.list_entries()[0].key == "old", "used last"
