"""A data set of a Hub on loopback, through the client as it is: fetched whole by `datasets`, or read as it comes."""

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

from tests.hub.server import Hub, User

ROWS = [{"text": f"row {number}", "id": number} for number in range(300)]
TOKEN = "hf_annsOwnSecretToken"
# The client reads its environment when it is imported: a process of its own.
PROGRAM = """
import json, sys
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import FileOffset
from tunekit.errors import UserError
for source, split, stream in json.loads(sys.argv[1]):
    try:
        table = open_dataset(source, split, stream=stream)
        chunks = list(table.chunks())
        rows = [row for chunk in chunks for row in chunk.rows()]
        again = [row for chunk in table.chunks(FileOffset(*chunks[-1].place)) for row in chunk.rows()]
        assert again == rows[-len(again):]
        print(json.dumps([table.count, [row.fields for row in rows], rows[0].where, table.digest()]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def ask(hub: Hub, home: Path, *asked: tuple[str, str, bool], program: str = PROGRAM) -> list:
    """What comes of opening each: count, rows, the place of the first and the digest; or the mistake."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = clean | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", program, json.dumps(asked)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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
def test_streams_and_fetched_sets_have_the_same_rows(hub: Hub, tmp_path: Path) -> None:
    names = ("ann/columns", "ann/lines", "ann/parts:a")
    told = ask(hub, tmp_path, *((name, "train[5:250]", stream) for name in names for stream in (True, False)))
    for name, streamed, fetched in zip(names, told[::2], told[1::2], strict=True):
        assert streamed[1] == fetched[1] == ROWS[5:250]
        assert (streamed[0], fetched[0]) == (None, 245)
        assert (
            streamed[2].startswith(f"hf://datasets/{name.partition(':')[0]}/") and fetched[2] == f"{name} train row 6"
        )
    again = ask(hub, tmp_path / "b", *((name, "train[5:250]", stream) for name in names for stream in (True, False)))
    assert [one[3] for one in again] == [one[3] for one in told]
    first = hub.repos["ann/lines"].refs["main"]
    hub.put("ann/lines", {"train.jsonl": b'{"text": "new", "id": 1}\n'})
    new, old = ask(hub, tmp_path, ("ann/lines", "train", True), (f"ann/lines@{first}", "train[5:250]", True))
    assert new[1] == [{"text": "new", "id": 1}] and new[3] != told[2][3]
    assert old[1] == ROWS[5:250]


@pytest.mark.slow
def test_columns_that_are_read_in_turns_are_fetched_once(hub: Hub, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = pyarrow.table({name: [random.bytes(1000) for _ in range(8000)] for name in "abc"})
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, row_group_size=8000)
    hub.put("ann/large", {"train.parquet": sink.getvalue()})
    program = PROGRAM.replace("[row.fields for row in rows]", "len(rows)")
    ((_, count, *_),) = ask(hub, tmp_path, ("ann/large", "train", True), program=program)
    assert count == 8000
    bounds = [seen.range.removeprefix("bytes=").split("-") for seen in hub.seen("GET", r"train\.parquet") if seen.range]
    fetched = sum(int(last) - int(first) + 1 for first, last in bounds)
    assert fetched < 1.1 * 2 * len(sink.getvalue())  # the program reads all, and goes on from the last chunk


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_told_in_a_line(hub: Hub, tmp_path: Path) -> None:
    asked = [
        ("ann/none", "train", "ann/none: no such file or folder, and no split 'train' from the Hub: .*doesn't exist"),
        ("ann/lines", "dev", "ann/lines: .*no split 'dev' (from|on) the Hub.*test"),
        ("ann/lines@nope", "train", "ann/lines@nope: .*Revision 'nope' doesn't exist"),
        ("ann/parts:c", "train", "ann/parts:c: .*'c' not found"),
    ]
    cases = [(source, split, stream) for source, split, _ in asked for stream in (True, False)]
    told = ask(hub, tmp_path, *cases, ("ann/other", "train", True))
    for (*_, says), line in zip((one for one in asked for _ in range(2)), told, strict=False):
        assert isinstance(line, str) and re.match(says, line), line
    assert told[-1] == "ann/other: files such as train.txt cannot be streamed; leave out `streaming`"
