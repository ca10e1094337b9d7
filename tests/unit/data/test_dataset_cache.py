"""Cache entries are complete or absent, are built once by any number of processes, and are not removed in use."""

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.wait import TIMEOUT_SECONDS, wait_until
from tunekit.data.document import Document
from tunekit.data.preprocess import cache
from tunekit.data.preprocess.preprocess import read_bad_rows
from tunekit.data.preprocess.tokenized_dataset import (
    METADATA_FILE,
    PreprocessSummary,
    TokenizedChunk,
    TokenizedDatasetWriter,
    flatten_documents,
    is_complete,
)
from tunekit.data.readers.row_reader import BadRow
from tunekit.errors import UserError

COUNT = 400
# Builds an entry of 400 documents in many small chunks once the file argv[3] exists. argv[1] is its log.
MAKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from tests.unit.data import test_dataset_cache

def log(line):
    with Path(sys.argv[1]).open("a") as file:
        file.write(line + "\\n")

def build(directory):
    log("made")
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    test_dataset_cache.write_entry(directory, float(sys.argv[2]))

entry = test_dataset_cache.cache.get_or_build("key", build, log)
print(entry.fingerprint, len(entry), flush=True)
"""


def write_entry(directory: Path, seconds: float = 0.0, count: int = COUNT, bad_rows: Sequence[BadRow] = ()) -> None:
    with TokenizedDatasetWriter(directory) as writer:
        for number in range(count):
            document = Document(np.full(9, number, np.int32), np.ones(9, bool), 9)
            flat = flatten_documents([document], [f"rows.jsonl:{number + 1}"])
            writer.add(TokenizedChunk(None, PreprocessSummary(rows=1), [*bad_rows], flat))
            time.sleep(seconds / count)
        writer.finish(source="rows.jsonl", split="train", made=time.time(), seconds=seconds)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the cache entries."""
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def start_builder(log: Path, seconds: float, start_file: Path) -> subprocess.Popen[str]:
    """Start a process that gets the entry; building takes `seconds` once the file `let` exists."""
    command = [sys.executable, "-c", MAKER, str(log), str(seconds), str(start_file), str(Path(__file__).parents[3])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_log(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def fail_on_build(directory: Path) -> None:
    raise AssertionError("made again")


def test_entry_is_built_once(cache_dir: Path) -> None:
    built = cache.get_or_build("key", write_entry, pytest.fail)
    loaded = cache.get_or_build("key", fail_on_build, pytest.fail)
    assert (len(loaded), loaded.fingerprint) == (COUNT, built.fingerprint)
    assert loaded.row_location(COUNT - 1) == f"rows.jsonl:{COUNT}"
    assert sorted(path.name for path in cache_dir.iterdir()) == ["key", "key.lock"]


def test_one_of_several_processes_builds_the_entry(cache_dir: Path, tmp_path: Path) -> None:
    log, start_file = tmp_path / "log", tmp_path / "let"
    processes = [start_builder(log, 0.1, start_file) for _ in range(3)]
    wait_until(lambda: len(read_log(log)) == 3, *processes)
    start_file.touch()
    outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, outputs
    *waiting, last = sorted(read_log(log), key=lambda line: line == "made")
    assert last == "made" and len(waiting) == 2 and all(str(cache_dir / "key") in line for line in waiting)
    assert len({out for out, _ in outputs}) == 1
    assert sorted(path.name for path in cache_dir.iterdir()) == ["key", "key.lock"]


def test_sigkill_leaves_no_partial_entry(cache_dir: Path, tmp_path: Path) -> None:
    log, start_file = tmp_path / "log", tmp_path / "let"
    start_file.touch()
    for _ in range(6):
        with start_builder(log, 0.5, start_file) as process:
            wait_until(log.exists, process)
            time.sleep(random.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
        log.unlink()
        if is_complete(cache_dir / "key"):
            assert len(cache.get_or_build("key", fail_on_build, pytest.fail)) == COUNT
            gc.collect()
            assert cache.remove_entry(cache_dir / "key")
        else:
            assert not cache.list_entries()
            assert cache.list_unfinished()
    entry = cache.get_or_build("key", write_entry, pytest.fail)
    assert entry.tokens.tolist() == [number for number in range(COUNT) for _ in range(9)]
    assert not cache.list_unfinished(), "unfinished entries are removed by the next build"


@pytest.mark.parametrize("name", ["tokens", "bounds", METADATA_FILE])
def test_damaged_entry_is_rebuilt(cache_dir: Path, name: str) -> None:
    cache.get_or_build("key", write_entry, pytest.fail)
    file = cache_dir / "key" / name
    file.write_bytes(file.read_bytes()[:-3])
    assert len(cache.get_or_build("key", write_entry, pytest.fail)) == COUNT
    assert is_complete(cache_dir / "key")


def test_failed_build_leaves_nothing(cache_dir: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "tokens").write_bytes(b"1234")
        raise UserError("rows.jsonl:3: no")

    with pytest.raises(UserError, match="^rows.jsonl:3: no$"):
        cache.get_or_build("key", build, pytest.fail)
    assert [path.name for path in cache_dir.iterdir()] == ["key.lock"]


def test_unwritable_cache_falls_back_to_a_temporary_directory(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir.parent.write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "now"))
    (tmp_path / "now").mkdir()
    messages: list[str] = []
    entry = cache.get_or_build("key", write_entry, messages.append)
    assert len(messages) == 1 and str(cache_dir) in messages[0] and "TUNEKIT_CACHE" in messages[0]
    assert len(entry) == COUNT
    del entry
    gc.collect()
    assert not list((tmp_path / "now").iterdir())


def test_disabled_cache_keeps_nothing(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", "off")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    entry = cache.get_or_build("key", write_entry, pytest.fail)
    assert not list(tmp_path.iterdir())  # a killed process leaves nothing
    assert [document.tokens[0] for document in entry] == list(range(COUNT))
    with pytest.raises(AssertionError, match="made again"):
        cache.get_or_build("key", fail_on_build, pytest.fail)
    assert not list(tmp_path.iterdir())


def test_disabled_cache_keeps_bad_rows_for_the_dataset(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", "off")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bad_row = BadRow("rows.jsonl:7", "no text")
    entry = cache.get_or_build("key", partial(write_entry, bad_rows=[bad_row]), pytest.fail)
    assert entry.summary.bad_rows is not None
    assert [*read_bad_rows(entry.summary.bad_rows)] == COUNT * [bad_row]
    assert [path.name for path in tmp_path.glob("*/*")] == [entry.summary.bad_rows.name]
    del entry
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_entry_in_use_is_not_removed(cache_dir: Path, tmp_path: Path) -> None:
    entry = cache.get_or_build("key", write_entry, pytest.fail)
    assert not cache.remove_entry(cache_dir / "key")
    del entry
    gc.collect()
    assert cache.remove_entry(cache_dir / "key")
    assert not list(cache_dir.iterdir())
    with start_builder(tmp_path / "log", 0.0, tmp_path / "never") as process:
        wait_until(cache.list_unfinished, process)
        assert not any(map(cache.remove_entry, cache.list_unfinished()))
        process.kill()
    assert all(map(cache.remove_entry, cache.list_unfinished()))
    assert not cache.list_unfinished()


def test_entries_may_be_listed_and_removed_while_they_are_built(cache_dir: Path) -> None:
    def build() -> None:
        for _ in range(40):
            assert len(cache.get_or_build("key", partial(write_entry, count=1), lambda message: None)) == 1

    def list_all() -> None:
        for path in (*(entry.path for entry in cache.list_entries()), *cache.list_unfinished()):
            assert cache.dir_bytes(path) >= 0

    def remove_all() -> None:
        for path in (cache_dir / "key", *cache.list_unfinished()):
            cache.remove_entry(path)

    with ThreadPoolExecutor(4) as pool:
        builders = [pool.submit(build) for _ in range(2)]
        others = [pool.submit(repeat_until_done, builders, function) for function in (list_all, remove_all)]
    for future in (*builders, *others):
        future.result()


def repeat_until_done(futures: Sequence[Future[None]], function: Callable[[], None]) -> None:
    while not all(future.done() for future in futures):
        function()


def test_list_entries_describes_contents_and_last_use(cache_dir: Path) -> None:
    assert not cache.list_entries()
    cache.get_or_build("old", write_entry, pytest.fail)
    cache.get_or_build("new", write_entry, pytest.fail)
    for key, used in (("old", 1000), ("new", 2000)):
        os.utime(cache_dir / key / METADATA_FILE, (used, used))
    new, old = cache.list_entries()
    assert (new.key, new.used, old.key, old.used) == ("new", 2000, "old", 1000)
    assert (old.metadata["documents"], old.metadata["tokens"], old.metadata["source"]) == (
        COUNT,
        9 * COUNT,
        "rows.jsonl",
    )
    assert old.size == sum(file.stat().st_size for file in (cache_dir / "old").iterdir())
    cache.get_or_build("old", fail_on_build, pytest.fail)
    assert cache.list_entries()[0].key == "old", "used last"
