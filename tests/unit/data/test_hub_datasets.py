"""Datasets of a local Hub server through the real client: downloaded by `datasets`, or streamed."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.helpers.hub.server import Hub, User

ROWS = [{"text": f"row {number}", "id": number} for number in range(300)]
TOKEN = "hf_annsOwnSecretToken"
# A separate process, because the client reads its environment when it is imported.
PROGRAM = """
import json, sys
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import FileOffset
from tunekit.errors import UserError
for source, split, stream in json.loads(sys.argv[1]):
    try:
        table = open_dataset(source, split, streaming=stream)
        chunks = list(table.chunks())
        rows = [row for chunk in chunks for row in chunk.rows()]
        resumed = [row for chunk in table.chunks(FileOffset(*chunks[-1].position)) for row in chunk.rows()]
        assert resumed == rows[-len(resumed):]
        print(json.dumps([table.count, [row.fields for row in rows], rows[0].where, table.digest()]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def open_datasets(hub: Hub, home: Path, *requests: tuple[str, str, bool], program: str = PROGRAM) -> list:
    """Open each (source, split, streaming) and return row count, rows, first location and digest; or the error."""
    env_without_hf = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = env_without_hf | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-c", program, json.dumps(requests)]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.fixture
def hub():
    with Hub({TOKEN: User("ann")}) as hub:
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, row_group_size=100)
        lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        hub.put("ann/columns", {f"data/{name}-00000-of-00001.parquet": sink.getvalue() for name in ("train", "test")})
        hub.put("ann/lines", {"train.jsonl": lines, "test.jsonl": lines[: lines.index(b"\n") + 1]})
        card = (
            "---\nconfigs:\n- {config_name: a, data_files: a/*.jsonl}\n- {config_name: b, data_files: b/*.jsonl}\n---\n"
        )
        hub.put("ann/parts", {"README.md": card.encode(), "a/0.jsonl": lines, "b/0.jsonl": b'{"text": "b", "id": 7}\n'})
        hub.put("ann/other", {"train.txt": b"text\n"})
        yield hub


@pytest.mark.slow
def test_streamed_and_downloaded_rows_are_equal(hub: Hub, tmp_path: Path) -> None:
    names = ("ann/columns", "ann/lines", "ann/parts:a")
    first_results = open_datasets(
        hub, tmp_path, *((name, "train[5:250]", stream) for name in names for stream in (True, False))
    )
    for name, streamed, fetched in zip(names, first_results[::2], first_results[1::2], strict=True):
        assert streamed[1] == fetched[1] == ROWS[5:250]
        assert (streamed[0], fetched[0]) == (None, 245)
        assert (
            streamed[2].startswith(f"hf://datasets/{name.partition(':')[0]}/") and fetched[2] == f"{name} train row 6"
        )
    second_results = open_datasets(
        hub, tmp_path / "b", *((name, "train[5:250]", stream) for name in names for stream in (True, False))
    )
    assert [result[3] for result in second_results] == [result[3] for result in first_results]
    first = hub.repos["ann/lines"].refs["main"]
    hub.put("ann/lines", {"train.jsonl": b'{"text": "new", "id": 1}\n'})
    new, old = open_datasets(hub, tmp_path, ("ann/lines", "train", True), (f"ann/lines@{first}", "train[5:250]", True))
    assert new[1] == [{"text": "new", "id": 1}] and new[3] != first_results[2][3]
    assert old[1] == ROWS[5:250]


@pytest.mark.slow
def test_interleaved_columns_are_fetched_once(hub: Hub, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = pyarrow.table({name: [random.bytes(1000) for _ in range(8000)] for name in "abc"})
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, row_group_size=8000)
    hub.put("ann/large", {"train.parquet": sink.getvalue()})
    program = PROGRAM.replace("[row.fields for row in rows]", "len(rows)")
    ((_, count, *_),) = open_datasets(hub, tmp_path, ("ann/large", "train", True), program=program)
    assert count == 8000
    bounds = [
        request.range.removeprefix("bytes=").split("-")
        for request in hub.seen("GET", r"train\.parquet")
        if request.range
    ]
    fetched = sum(int(end) - int(start) + 1 for start, end in bounds)
    assert fetched < 1.1 * 2 * len(sink.getvalue())  # the program reads all rows, and resumes from the last chunk


@pytest.mark.slow
def test_missing_repo_split_or_config_is_a_one_line_error(hub: Hub, tmp_path: Path) -> None:
    cases = [
        ("ann/none", "train", "ann/none: .*'train'.*doesn't exist"),
        ("ann/lines", "dev", "ann/lines: .*'dev'.*test"),
        ("ann/lines@nope", "train", "ann/lines@nope: .*Revision 'nope' doesn't exist"),
        ("ann/parts:c", "train", "ann/parts:c: .*'c' not found"),
    ]
    requests = [(source, split, stream) for source, split, _ in cases for stream in (True, False)]
    lines = open_datasets(hub, tmp_path, *requests, ("ann/other", "train", True))
    for (*_, pattern), line in zip((case for case in cases for _ in range(2)), lines, strict=False):
        assert isinstance(line, str) and re.match(pattern, line), line
    assert lines[-1].startswith("ann/other: ") and "train.txt" in lines[-1] and "`streaming`" in lines[-1]
