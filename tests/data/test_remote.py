"""Rows behind URLs: a store in memory, a web server and a Hub on loopback; what goes wrong there is told in a line."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest

from tests.data.sources import KINDS, content, small_chunks, write
from tests.data.test_table import resumes
from tunekit.data.readers import remote_files
from tunekit.data.readers.filesystem import skip_bytes
from tunekit.data.readers.open_dataset import find_data_files, open_dataset
from tunekit.data.readers.row_reader import require_row
from tunekit.errors import UserError

ROWS = [{"text": f"row {number} né"} for number in range(60)]


@pytest.fixture
def store() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    store.pseudo_dirs[:] = [""]
    store.store.clear()
    yield store
    store.store.clear()


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    """A web server; its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_store_is_read_as_a_disk_is(kind: str, stream: bool, store: Any) -> None:
    store.pipe(f"/bucket/rows.{kind}", content(f"rows.{kind}", ROWS))
    with small_chunks(7, 200):
        table = open_dataset(f"memory://bucket/rows.{kind}", "train[:50]", stream=stream)
        assert [require_row(row).fields for row in table.rows] == ROWS[:50]
        assert next(table.rows).where.startswith(f"memory://bucket/rows.{kind}")
        resumes(table)


def test_folders_and_patterns_of_a_store(store: Any) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl", "notes.txt"):
        store.pipe(f"/bucket/set/{name}", content("rows.jsonl", ROWS))
    assert find_data_files("memory://bucket/set", "train") == []
    assert open_dataset("memory://bucket/set", "train").count == 120
    assert open_dataset("memory://bucket/set/", "test").count == 60
    assert open_dataset("memory://bucket/*/t*.jsonl", "train").count == 180
    for source, split, says in (
        ("memory://bucket/set", "dev", "^memory://bucket/set: no split 'dev'; it has test, train$"),
        ("memory://bucket/set/gone.jsonl", "train", "^memory://bucket/set/gone.jsonl: no such file or folder$"),
        ("memory://bucket/set/notes.txt", "train", "notes.txt: rows are read from "),
        ("memory://bucket/set/test.jsonl", "test", "test.jsonl: a file has only the split 'train'"),
        ("memory://bucket/*.csv", "train", r"memory://bucket/\*.csv: matches no "),
    ):
        with pytest.raises(UserError, match=says):
            open_dataset(source, split)


def test_the_digest_of_a_store_is_what_it_tells_of_its_files(store: Any) -> None:
    def digest() -> str:
        return open_dataset("memory://bucket/rows.jsonl", "train", 5).digest()

    store.pipe("/bucket/rows.jsonl", content("rows.jsonl", ROWS))
    before = digest()
    assert digest() == before
    store.pipe("/bucket/rows.jsonl", content("rows.jsonl", ROWS[:20]))
    assert digest() != before


def test_a_driver_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "http": r"'fsspec\[http\]'", "https": r"'fsspec\[http\]'"}

    def missing(url: str) -> None:
        raise ImportError(f"no driver for {url}")

    monkeypatch.setattr(remote_files, "url_to_fs", missing)
    for protocol, package in wanted.items():
        with pytest.raises(
            UserError, match=rf"^{protocol}://a/b.jsonl: {protocol}:// wants a driver: pip install {package}$"
        ):
            open_dataset(f"{protocol}://a/b.jsonl", "train")


def test_a_protocol_that_nobody_knows_is_told() -> None:
    with pytest.raises(UserError, match="^nonsense://a/b.jsonl: Protocol not known: nonsense$"):
        open_dataset("nonsense://a/b.jsonl", "train")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "jsonl.gz"])
def test_a_web_address(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write(tmp_path / f"rows.{kind}", ROWS)
    with serving(partial(Quiet, directory=str(tmp_path))) as address:
        table = open_dataset(f"{address}/rows.{kind}?token=hf_secret", "train[:90%]")
        rows = [require_row(row) for row in table.rows]
        assert [row.fields for row in rows] == ROWS[:54]
        assert "secret" not in rows[0].where and rows[0].where.startswith(f"{address}/rows.{kind}")
        with pytest.raises(UserError, match=f"^{address}/gone.{kind}: cannot be read: 404"):
            open_dataset(f"{address}/gone.{kind}", "train")
    with pytest.raises(UserError, match=f"^{address}/rows.{kind}: cannot be read: .*onnect") as told:
        open_dataset(f"{address}/rows.{kind}?api_key=secret", "train")
    assert "secret" not in str(told.value)


def test_a_server_that_fails_or_refuses_is_told() -> None:
    pytest.importorskip("aiohttp")

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(int(self.path[1:4]))

        do_HEAD = do_GET
        log_message = Quiet.log_message

    with serving(Failing) as address:
        for code in (403, 500):
            with pytest.raises(UserError, match=f"^{address}/{code}.jsonl: cannot be read: .*{code}"):
                open_dataset(f"{address}/{code}.jsonl?signature=secret", "train")


class Shaky(io.BytesIO):
    """A file whose every other read fails."""

    reads = 0

    def read(self, count: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads % 2:
            raise ConnectionResetError("the peer hung up")
        return super().read(count)


def test_a_read_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PAUSES", (0.0,))
    raw = content("rows.jsonl", ROWS)
    with io.BufferedReader(remote_files.RetryingFile(Shaky(raw)), 64) as file:
        skip_bytes(file, "rows", 10)
        assert file.read() == raw[10:]
    monkeypatch.setattr(remote_files, "PAUSES", ())
    with io.BufferedReader(remote_files.RetryingFile(Shaky(raw)), 64) as file, pytest.raises(OSError, match="hung up"):
        file.read(1)
