"""Rows at URLs: an in-memory store, a web server and a local Hub. Failures are one-line errors."""

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

from tests.helpers.row_files import KINDS, encode_rows, small_chunks, write
from tests.unit.data.test_chunks import check_resumes
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
    """Run a web server and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_store_is_read_like_a_disk(kind: str, stream: bool, store: Any) -> None:
    store.pipe(f"/bucket/rows.{kind}", encode_rows(f"rows.{kind}", ROWS))
    with small_chunks(7, 200):
        table = open_dataset(f"memory://bucket/rows.{kind}", "train[:50]", streaming=stream)
        assert [require_row(row).fields for row in table.rows] == ROWS[:50]
        assert next(table.rows).where.startswith(f"memory://bucket/rows.{kind}")
        check_resumes(table)


def test_directories_and_patterns_of_a_store(store: Any) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl", "notes.txt"):
        store.pipe(f"/bucket/set/{name}", encode_rows("rows.jsonl", ROWS))
    assert find_data_files("memory://bucket/set", "train") == []
    assert open_dataset("memory://bucket/set", "train").count == 120
    assert open_dataset("memory://bucket/set/", "test").count == 60
    assert open_dataset("memory://bucket/*/t*.jsonl", "train").count == 180
    for source, split, pattern in (
        ("memory://bucket/set", "dev", "^memory://bucket/set: .*'dev'.* test, train"),
        ("memory://bucket/set/missing.jsonl", "train", "^memory://bucket/set/missing.jsonl: "),
        ("memory://bucket/set/notes.txt", "train", "notes.txt: "),
        ("memory://bucket/set/test.jsonl", "test", "test.jsonl: .*'train'"),
        ("memory://bucket/*.csv", "train", r"memory://bucket/\*.csv: "),
    ):
        with pytest.raises(UserError, match=pattern):
            open_dataset(source, split)


def test_digest_of_a_store_uses_its_file_info(store: Any) -> None:
    def digest() -> str:
        return open_dataset("memory://bucket/rows.jsonl", "train", 5).digest()

    store.pipe("/bucket/rows.jsonl", encode_rows("rows.jsonl", ROWS))
    before = digest()
    assert digest() == before
    store.pipe("/bucket/rows.jsonl", encode_rows("rows.jsonl", ROWS[:20]))
    assert digest() != before


def test_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "http": r"'fsspec\[http\]'", "https": r"'fsspec\[http\]'"}

    def missing(url: str) -> None:
        raise ImportError(f"no driver for {url}")

    monkeypatch.setattr(remote_files, "url_to_fs", missing)
    for protocol, package in packages.items():
        with pytest.raises(UserError, match=rf"^{protocol}://a/b.jsonl: .*pip install {package}"):
            open_dataset(f"{protocol}://a/b.jsonl", "train")


def test_unknown_protocol_is_an_error() -> None:
    with pytest.raises(UserError, match="^nonsense://a/b.jsonl: .*nonsense"):
        open_dataset("nonsense://a/b.jsonl", "train")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "jsonl.gz"])
def test_web_address_is_read_without_its_query(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write(tmp_path / f"rows.{kind}", ROWS)
    with serving(partial(Quiet, directory=str(tmp_path))) as address:
        table = open_dataset(f"{address}/rows.{kind}?token=hf_secret", "train[:90%]")
        rows = [require_row(row) for row in table.rows]
        assert [row.fields for row in rows] == ROWS[:54]
        assert "secret" not in rows[0].where and rows[0].where.startswith(f"{address}/rows.{kind}")
        with pytest.raises(UserError, match=f"^{address}/missing.{kind}: .*404"):
            open_dataset(f"{address}/missing.{kind}", "train")
    with pytest.raises(UserError, match=f"^{address}/rows.{kind}: .*onnect") as error:
        open_dataset(f"{address}/rows.{kind}?api_key=secret", "train")
    assert "secret" not in str(error.value)


def test_http_errors_have_their_status() -> None:
    pytest.importorskip("aiohttp")

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(int(self.path[1:4]))

        do_HEAD = do_GET
        log_message = Quiet.log_message

    with serving(Failing) as address:
        for code in (403, 500):
            with pytest.raises(UserError, match=f"^{address}/{code}.jsonl: .*{code}"):
                open_dataset(f"{address}/{code}.jsonl?signature=secret", "train")


class Shaky(io.BytesIO):
    """A file in which every other read fails."""

    reads = 0

    def read(self, count: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads % 2:
            raise ConnectionResetError("the peer hung up")
        return super().read(count)


def test_failed_read_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "RETRY_DELAYS", (0.0,))
    encoded = encode_rows("rows.jsonl", ROWS)
    with io.BufferedReader(remote_files.RetryingFile(Shaky(encoded)), 64) as file:
        skip_bytes(file, "rows", 10)
        assert file.read() == encoded[10:]
    monkeypatch.setattr(remote_files, "RETRY_DELAYS", ())
    with (
        io.BufferedReader(remote_files.RetryingFile(Shaky(encoded)), 64) as file,
        pytest.raises(OSError, match="hung up"),
    ):
        file.read(1)
