"""Whatever `source` is, it gives rows or a one-line error, within seconds."""

import os
from itertools import islice
from pathlib import Path

import fsspec
import pytest

from tests.helpers.fuzz import time_limit
from tunekit.data.readers import data_files
from tunekit.data.readers.open_dataset import find_data_files, open_dataset
from tunekit.errors import UserError

PATTERNS = ("****x", "***", "**", "**/", "*" * 500, "**/" * 200 + "*.jsonl", "[", "[]", "[!]", "[[", "[z-a].jsonl",
            "[a-" * 200 + ".jsonl", "none/****x", "none/**/**/x", "?" * 300, "loop/**/*.csv",
            "*/*/*/*.csv", "locked/*.csv", "a\0*", "\ud800*.jsonl", "../*.none")  # fmt: skip
PATHS = ("a\0b.jsonl", "\0", "\ud800", "x" * 5000 + ".jsonl", "x/" * 3000, "..", ".", "/dev/null", "/dev/zero",
         "/dev/stdin",
         "self.jsonl", "zero.jsonl", "loop", "fifo", "fifo/train.jsonl", "/proc/self/mem", "~missing/x.jsonl",
         "x.jsonl.bz2", ":", "a:", "@", "owner/name:", "-", "%s", "\x1b[31m", "\u202e.jsonl", " ", "\n", "tunekit/",
         "a/b/c/d", "link.csv", "file://", "file://x", "file:///a\0", "data:,x", "::", "a::b")  # fmt: skip
URLS = ("http://[::1", "http://", "http://:99999/x", "http://\n", "http://127.0.0.1:1/x.jsonl",
        "http://127.0.0.1:1/?x=*", "http://\ud800/x", "dir:///etc", "dir://", "zip://", "zip://a::b",
        "zip://*::/etc/passwd", "zip://::/etc/passwd",
        "tar://x::/etc/passwd", "memory://", "memory://x.jsonl", "memory://**", "memory://[", "memory://a\0", "memory://\ud800",
        "local://x.jsonl", "s3://", "s3://b/x.jsonl", "s3://b/**", "gs://b", "abfs://c@a/x?y=*", "hf://", "hf://x",
        "hf://datasets/", "hf://datasets/a", "hf://spaces/x", "hf://buckets/x", "a::b://c", "::://", "://", "a://", "1://a",
        "nonsense://a", "HTTP://x", "filecache://x", "simplecache::http://127.0.0.1:1/x.jsonl", "reference://x", "cached://x",
        "github://x", "jupyter://x", "dbfs://x", "data://x", "generic://x", "async_wrapper://x", "git://x")  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with links and files that never end."""
    for name in ("loop", "fifo", "locked"):
        (tmp_path / name).mkdir()
    for link, target in {
        "loop/loop": ".",
        "self.jsonl": "self.jsonl",
        "zero.jsonl": "/dev/zero",
        "link.csv": "x",
    }.items():
        (tmp_path / link).symlink_to(target)
    os.mkfifo(tmp_path / "fifo/train.jsonl")
    (tmp_path / "locked").chmod(0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("kind", ["patterns", "paths", "urls"])
def test_source_gives_rows_or_a_one_line_error(kind: str) -> None:
    for source in {"patterns": PATTERNS, "paths": PATHS, "urls": URLS}[kind]:
        for open_source in (find_data_files, lambda source, split: list(islice(open_dataset(source, split).rows, 3))):
            try:
                with time_limit():
                    assert not open_source(source, "train"), source
            except UserError as error:
                assert str(error).isprintable() or not source.isprintable(), source
                assert "\n" not in str(error) and source[:2].strip("*?\n\0") in str(error), (source, error)


@pytest.mark.parametrize(
    "source", ["http://[::1", "dir:///etc", "s3://b/x.jsonl", "nonsense://a", "zip://*::/etc/passwd"]
)
def test_unusable_url_is_found_without_reading_it(source: str) -> None:
    with pytest.raises(UserError):
        find_data_files(source, "train")


def test_password_is_not_in_the_message() -> None:
    for source in ("http://ann:pass@[::1", "simplecache::http://ann:pass@127.0.0.1:1/x.jsonl?token=pass"):
        with pytest.raises(UserError) as error:
            open_dataset(source, "train")
        assert "pass" not in str(error.value)


@pytest.mark.parametrize("address", ["", "memory://"])
def test_search_of_a_pattern_ends(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing matches: 30 entries in 7 directories."""
    monkeypatch.setattr(data_files, "MAX_ENTRIES", 20)
    store = fsspec.filesystem("memory")
    for group in "abcdef":
        for number in range(4):
            path = tmp_path / group / f"{number}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text('{"text": "Hello!"}\n')
            store.pipe(str(path), path.read_bytes())
    for pattern in ("**/*", "**/*.none", "*/*.jsonl"):
        with pytest.raises(UserError, match=r"more than 20 files"):
            open_dataset(f"{address}{tmp_path}/{pattern}", "train")
    monkeypatch.setattr(data_files, "MAX_ENTRIES", 1000)
    assert open_dataset(f"{address}{tmp_path}/**/*", "train").count == 24
    assert open_dataset(f"{address}{tmp_path}/[ab]/?.jsonl", "train").count == 8
    store.rm(str(tmp_path), recursive=True)


def test_links_to_directories_are_followed_except_by_double_stars(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"text": "Hello!"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    (tmp_path / "rows/up").symlink_to(tmp_path)
    assert find_data_files(f"{tmp_path}/l*/*.jsonl", "train") == [tmp_path / "link/a.jsonl"]
    assert find_data_files(f"{tmp_path}/**/a.jsonl", "train") == [tmp_path / "rows/a.jsonl"]
