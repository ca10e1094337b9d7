"""Chunks: the same rows wherever reading goes on, in whatever process, for every kind of file and every slice."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sources import KINDS, small_chunks, write
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, FileOffset, Row, RowReader, require_row
from tunekit.errors import UserError

ROWS = [{"text": f"row {number}, né\n“{number}” " + "long " * (number % 5 * 9)} for number in range(40)]


def rows_from(table: RowReader, place: FileOffset | None) -> list[Row | BadRow]:
    """Rows from a place, as another process has them."""
    return [row for chunk in table.chunks(place) for row in pickle.loads(pickle.dumps(chunk)).rows()]


def resumes(table: RowReader) -> None:
    """Every chunk's place leads to its rows and those behind it, in the same chunks."""
    chunks, rows = list(table.chunks()), list(table.rows)
    assert sum(chunk.count for chunk in chunks) == len(rows)
    done = 0
    for number, chunk in enumerate(chunks):
        place = FileOffset(*json.loads(json.dumps(chunk.place)))
        assert rows_from(table, place) == rows[done:]
        again = list(table.chunks(place))
        assert [(one.place, one.count) for one in again] == [(one.place, one.count) for one in chunks[number:]]
        done += chunk.count


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_from_any_chunk(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}", ROWS)
    with small_chunks():
        table = open_dataset(str(path), "train")
        assert [require_row(row).fields for row in table.rows] == ROWS
        assert len(list(table.chunks())) > 10
        resumes(table)


@given(low=st.integers(0, 130), taken=st.integers(1, 130), limit=st.none() | st.integers(1, 60), stream=st.booleans())
@settings(max_examples=25, deadline=None)
def test_slices_go_over_many_files(low: int, taken: int, limit: int | None, stream: bool, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for number, kind in enumerate(("jsonl", "parquet", "csv.gz")):
        write(folder / f"{number}.{kind}", ROWS)
    wanted = (ROWS * 3)[low : low + taken][:limit]
    with small_chunks(5, 256):
        if not wanted and not stream:
            with pytest.raises(UserError, match=r"holds no row \(of 120\)"):
                open_dataset(str(folder), f"train[{low}:{low + taken}]", limit)
            return
        table = open_dataset(str(folder), f"train[{low}:{low + taken}]", limit, stream)
        assert [require_row(row).fields for row in table.rows] == wanted
        assert table.count == (None if stream else len(wanted))
        resumes(table)


def test_files_before_a_slice_are_not_opened_and_those_after_it_not_counted(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", ROWS)
    write(tmp_path / "1.jsonl", ROWS)
    write(tmp_path / "2.jsonl", ROWS)
    table = open_dataset(str(tmp_path), "train[40:45]")
    (tmp_path / "0.parquet").unlink()
    (tmp_path / "2.jsonl").unlink()
    assert [require_row(row).fields for row in table.rows] == ROWS[:5]
    (tmp_path / "1.jsonl").write_bytes(b"[")
    write(tmp_path / "0.parquet", ROWS)
    assert open_dataset(str(tmp_path), "train", limit=40).count == 40


def test_a_stream_is_not_counted_and_takes_no_shares(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    table = open_dataset(str(path), "train[30:]", stream=True)
    assert table.count is None
    assert [require_row(row).fields for row in table.rows] == ROWS[30:]
    for split in ("train[:90%]", "train[-10:]"):
        with pytest.raises(UserError, match="wants to know how many rows there are"):
            open_dataset(str(path), split, stream=True)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_a_long_row_is_a_chunk_of_its_own(kind: str, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "x" * 10_000_000}, {"text": "b"}]
    table = open_dataset(str(write(tmp_path / f"rows.{kind}", rows)), "train")
    assert [require_row(row).fields for row in table.rows] == rows
    assert [chunk.count for chunk in table.chunks()] == [1, 1, 1]


def test_a_chunk_of_columns_travels_without_its_neighbours(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", [{"text": "x" * 1000}] * 7)
    with small_chunks(1, 2000):
        first = next(iter(open_dataset(str(path), "train").chunks()))
    assert 1000 < len(pickle.dumps(first)) < 2000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_digest_is_of_the_content_and_the_slice(kind: str, stream: bool, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    path, moved = write(tmp_path / f"rows.{kind}", ROWS), write(tmp_path / "moved" / f"b.{kind}", ROWS)
    digest = open_dataset(str(path), "train[:20]", stream=stream).digest()
    assert open_dataset(str(path), "train", 20, stream=stream).digest() == digest
    assert open_dataset(str(moved), "train[:20]", stream=stream).digest() == digest
    assert open_dataset(str(path), "train[:21]", stream=stream).digest() != digest
    write(path, [*ROWS[:-1], {"text": "another"}])
    assert open_dataset(str(path), "train[:20]", stream=stream).digest() != digest


def test_the_digest_sees_every_byte_and_the_order_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunekit.data.readers.filesystem.SEGMENT", 64)
    monkeypatch.setattr("tunekit.data.readers.filesystem.EDGE", 16)
    raw = write(tmp_path / "a.jsonl", ROWS).read_bytes()
    write(tmp_path / "b.jsonl", ROWS[:5])
    digests = {open_dataset(str(tmp_path), "train").digest()}
    for at in range(0, len(raw), 61):
        (tmp_path / "a.jsonl").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        digests.add(open_dataset(str(tmp_path), "train", stream=False).parts[0].digest(True))
    assert len(digests) == 1 + len(range(0, len(raw), 61))
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "a.jsonl").rename(tmp_path / "c.jsonl")
    assert open_dataset(str(tmp_path), "train").digest() not in digests


PEAK = """
import re, sys
from pathlib import Path
from tunekit.data.readers.open_dataset import open_dataset
table = open_dataset(sys.argv[1], "train", stream=sys.argv[2] == "stream")
count = sum(1 for row in table.rows)
print(count, re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory of a process")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_million_rows_want_no_more_memory_than_few(kind: str, tmp_path: Path) -> None:
    """Kilobytes at the peak of a process that reads them all."""
    peaks = []
    for count in (100_000, 1_000_000 if kind == "jsonl" else 200_000):
        path = tmp_path / f"{count}.{kind}"
        lines = (f'{{"text": "row {number}", "number": {number}}}' for number in range(count))
        begin, between, end = {"jsonl": ("", "\n", ""), "json": ("[", ",", "]"), "csv": ("a,b\n", "\n", "")}[kind]
        lines = (f'"row {number}",{number}' for number in range(count)) if kind == "csv" else lines
        path.write_text(begin + between.join(lines) + end)
        told = subprocess.run([sys.executable, "-c", PEAK, path, "count"], capture_output=True, text=True, check=True)
        read, peak = map(int, told.stdout.split())
        assert read == count
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 4096


def test_a_fault_stops_who_insists() -> None:
    with pytest.raises(UserError, match="^rows.jsonl:3: is broken$"):
        require_row(BadRow("rows.jsonl:3", "is broken"))
