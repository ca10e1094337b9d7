"""`tune cache` shows what is kept, and removes what it is told to and nobody uses."""

import gc
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tunekit.cli import main as cli
from tunekit.data.preprocess import cache
from tunekit.data.preprocess.tokenized_dataset import (
    Document,
    TokenizedChunk,
    TokenizedDataset,
    TokenizedDatasetWriter,
    flatten_documents,
)

DAY = 86_400


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path))
    return tmp_path / "data"


def keep(key: str, tokens: int, used: float = 0, split: str = "train") -> TokenizedDataset:
    """An entry of one row that was made and used some days ago."""

    def make(folder: Path) -> None:
        one = Document(np.zeros(tokens, np.int32), np.ones(tokens, bool), tokens)
        with TokenizedDatasetWriter(folder) as writer:
            writer.add(TokenizedChunk(None, 1, 0, 0, 0, [], flatten_documents([one], ["rows.jsonl:1"])))
            writer.finish(source="rows.jsonl", split=split, made=time.time() - used * DAY - 1, seconds=1.0)

    found = cache.get_or_build(key, make, pytest.fail)
    about = cache.cache_dir() / key / ABOUT
    os.utime(about, (time.time() - used * DAY - 1,) * 2)
    return found


def tune(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    gc.collect()
    code = cli.main(["cache", *words])
    told = capsys.readouterr()
    return told.out if code == 0 else f"{code} {told.err}"


def test_shows_entries_and_their_total(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(capsys) == f"nothing is kept\n0 bytes in {place}\n"
    keep("a" * 32, 1000, used=9)
    keep("b" * 32, 2_000_000, split="test[:10%]")
    head, second, first, total = tune(capsys).splitlines()
    assert head.split() == ["key", "size", "rows", "tokens", "made", "used", "source"]
    assert " ".join(second.split()) == "bbbbbbbb 10 MB 1 2,000,000 now now rows.jsonl (test[:10%])"
    assert re.fullmatch(r"a{8} 5.\d+ kB 1 1,000 1w ago 1w ago rows.jsonl", " ".join(first.split())), first
    assert total == f"10 MB in {place}"


def test_clears_what_it_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, key in enumerate(("ab1", "ab2", "ac3", "ad4")):
        keep(key, 1000, used=10 * number)
    held = keep("ae5", 1000, used=99)
    assert "clear what? name keys" in tune(capsys, "clear")
    assert "'ab': several keys begin so" in tune(capsys, "clear", "ab")
    assert "'x': no key begins so" in tune(capsys, "clear", "ab1", "x")
    assert "--older-than: must be a number and m, h, d or w, such as 30d, got '3'" in tune(
        capsys, "clear", "--older-than", "3"
    )
    assert "only `tune cache clear` takes keys" in tune(capsys, "--all")
    assert len(cache.list_entries()) == 5, "a mistake removes nothing"
    assert re.fullmatch(r"removed 1, 5.\d+ kB\n", tune(capsys, "clear", "ab1"))
    assert re.fullmatch(r"removed 1, 5.\d+ kB; 1 in use left\n", tune(capsys, "clear", "--older-than", "25d"))
    assert [entry.key for entry in cache.list_entries()] == ["ab2", "ac3", "ae5"]
    (place / "af6-1234.partial").mkdir()
    assert ", and 0 bytes in 1 unfinished" in tune(capsys)
    assert len(held) == 1
    del held
    assert tune(capsys, "clear", "--all").startswith("removed 4, ")
    assert not list(place.iterdir())


def test_off_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", "off")
    assert tune(capsys) == "2 error: TUNEKIT_CACHE=off: prepared rows are not kept\n"
