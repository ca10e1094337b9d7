"""Chunks give the same rows from any offset, in any process, for every file format and slice."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.row_files import KINDS, small_chunks, write
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, FileOffset, Row, RowReader, require_row
from tunekit.errors import UserError

ROWS = [{"text": f"row {number}, né\n“{number}” " + "long " * (number % 5 * 9)} for number in range(40)]


def rows_from(dataset: RowReader, offset: FileOffset | None) -> list[Row | BadRow]:
    """Rows from an offset, with each chunk pickled as for another process."""
    return [row for chunk in dataset.chunks(offset) for row in pickle.loads(pickle.dumps(chunk)).rows()]


def check_resumes(dataset: RowReader) -> None:
    """Check that the offset of each chunk resumes at its rows, with the same chunks."""
    chunks, rows = list(dataset.chunks()), list(dataset.rows)
    assert sum(chunk.count for chunk in chunks) == len(rows)
    done = 0
    for number, chunk in enumerate(chunks):
        offset = FileOffset(*json.loads(json.dumps(chunk.position)))
        assert rows_from(dataset, offset) == rows[done:]
        resumed_chunks = list(dataset.chunks(offset))
        assert [(chunk.position, chunk.count) for chunk in resumed_chunks] == [
            (chunk.position, chunk.count) for chunk in chunks[number:]
        ]
        done += chunk.count


@pytest.mark.parametrize("kind", KINDS)
def test_reading_resumes_from_any_chunk(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}", ROWS)
    with small_chunks():
        dataset = open_dataset(str(path), "train")
        assert [require_row(row).fields for row in dataset.rows] == ROWS
        assert len(list(dataset.chunks())) > 10
        check_resumes(dataset)


@given(low=st.integers(0, 130), count=st.integers(1, 130), limit=st.none() | st.integers(1, 60), stream=st.booleans())
@settings(max_examples=25, deadline=None)
def test_slices_cross_file_boundaries(low: int, count: int, limit: int | None, stream: bool, tmp_path_factory) -> None:
    directory = tmp_path_factory.mktemp("rows")
    for number, kind in enumerate(("jsonl", "parquet", "csv.gz")):
        write(directory / f"{number}.{kind}", ROWS)
    expected = (ROWS * 3)[low : low + count][:limit]
    with small_chunks(5, 256):
        if not expected and not stream:
            with pytest.raises(UserError, match="120"):
                open_dataset(str(directory), f"train[{low}:{low + count}]", limit)
            return
        dataset = open_dataset(str(directory), f"train[{low}:{low + count}]", limit, stream)
        assert [require_row(row).fields for row in dataset.rows] == expected
        assert dataset.count == (None if stream else len(expected))
        check_resumes(dataset)


def test_files_before_a_slice_are_not_opened_and_those_after_it_not_counted(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", ROWS)
    write(tmp_path / "1.jsonl", ROWS)
    write(tmp_path / "2.jsonl", ROWS)
    dataset = open_dataset(str(tmp_path), "train[40:45]")
    (tmp_path / "0.parquet").unlink()
    (tmp_path / "2.jsonl").unlink()
    assert [require_row(row).fields for row in dataset.rows] == ROWS[:5]
    (tmp_path / "1.jsonl").write_bytes(b"[")
    write(tmp_path / "0.parquet", ROWS)
    assert open_dataset(str(tmp_path), "train", limit=40).count == 40


def test_stream_has_no_count_and_no_percent_slices(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    dataset = open_dataset(str(path), "train[30:]", streaming=True)
    assert dataset.count is None
    assert [require_row(row).fields for row in dataset.rows] == ROWS[30:]
    for split in ("train[:90%]", "train[-10:]"):
        with pytest.raises(UserError, match=str(path)):
            open_dataset(str(path), split, streaming=True)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_long_row_is_a_chunk(kind: str, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "x" * 10_000_000}, {"text": "b"}]
    dataset = open_dataset(str(write(tmp_path / f"rows.{kind}", rows)), "train")
    assert [require_row(row).fields for row in dataset.rows] == rows
    assert [chunk.count for chunk in dataset.chunks()] == [1, 1, 1]


def test_pickled_columnar_chunk_has_only_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", [{"text": "x" * 1000}] * 7)
    with small_chunks(1, 2000):
        first = next(iter(open_dataset(str(path), "train").chunks()))
    assert 1000 < len(pickle.dumps(first)) < 2000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_digest_depends_on_content_and_slice(kind: str, stream: bool, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    path, moved = write(tmp_path / f"rows.{kind}", ROWS), write(tmp_path / "moved" / f"b.{kind}", ROWS)
    digest = open_dataset(str(path), "train[:20]", streaming=stream).digest()
    assert open_dataset(str(path), "train", 20, streaming=stream).digest() == digest
    assert open_dataset(str(moved), "train[:20]", streaming=stream).digest() == digest
    assert open_dataset(str(path), "train[:21]", streaming=stream).digest() != digest
    write(path, [*ROWS[:-1], {"text": "another"}])
    assert open_dataset(str(path), "train[:20]", streaming=stream).digest() != digest


def test_digest_depends_on_every_byte_and_the_order_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunekit.data.readers.filesystem.SEGMENT_BYTES", 64)
    monkeypatch.setattr("tunekit.data.readers.filesystem.BLOCK_BYTES", 16)
    contents = write(tmp_path / "a.jsonl", ROWS).read_bytes()
    write(tmp_path / "b.jsonl", ROWS[:5])
    digests = {open_dataset(str(tmp_path), "train").digest()}
    for i in range(0, len(contents), 61):
        (tmp_path / "a.jsonl").write_bytes(contents[:i] + bytes([contents[i] ^ 1]) + contents[i + 1 :])
        digests.add(open_dataset(str(tmp_path), "train", streaming=False).shards[0].digest(True))
    assert len(digests) == 1 + len(range(0, len(contents), 61))
    (tmp_path / "a.jsonl").write_bytes(contents)
    (tmp_path / "a.jsonl").rename(tmp_path / "c.jsonl")
    assert open_dataset(str(tmp_path), "train").digest() not in digests


MEMORY_SCRIPT = """
import re, sys
from pathlib import Path
from tunekit.data.readers.open_dataset import open_dataset
for path in sys.argv[1:]:
    count = sum(1 for row in open_dataset(path, "train").rows)
    print(count, re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_peak_memory_does_not_grow_with_the_number_of_rows(kind: str, tmp_path: Path) -> None:
    """Compare peak memory in KiB of a process after it has read all rows of each file."""
    counts = 50_000, 650_000 if kind == "jsonl" else 150_000
    paths = [tmp_path / f"{count}.{kind}" for count in counts]
    for count, path in zip(counts, paths, strict=True):
        lines = (f'{{"text": "row {number}", "number": {number}}}' for number in range(count))
        prefix, separator, suffix = {"jsonl": ("", "\n", ""), "json": ("[", ",", "]"), "csv": ("a,b\n", "\n", "")}[kind]
        lines = (f'"row {number}",{number}' for number in range(count)) if kind == "csv" else lines
        path.write_text(prefix + separator.join(lines) + suffix)
    result = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, *paths], capture_output=True, text=True, check=True)
    (few, few_peak), (many, many_peak) = (map(int, line.split()) for line in result.stdout.splitlines())
    assert (few, many) == counts
    assert many_peak < few_peak + 4096


def test_require_row_raises_for_a_bad_row() -> None:
    with pytest.raises(UserError, match="^rows.jsonl:3: is broken$"):
        require_row(BadRow("rows.jsonl:3", "is broken"))
