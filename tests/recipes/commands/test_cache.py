"""`tune cache` shows cached datasets, and removes selected ones that are not in use."""

import gc
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tunekit.cli import main as cli
from tunekit.data.document import Document
from tunekit.data.preprocess import cache
from tunekit.data.preprocess.tokenized_dataset import (
    METADATA_FILE,
    PreprocessSummary,
    TokenizedChunk,
    TokenizedDataset,
    TokenizedDatasetWriter,
    flatten_documents,
)

DAY = 86_400


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path))
    return tmp_path / "data"


def make_entry(key: str, tokens: int, days_ago: float = 0, split: str = "train") -> TokenizedDataset:
    """Cache entry with one row that was last used `days_ago` days ago."""

    def write_dataset(folder: Path) -> None:
        document = Document(np.zeros(tokens, np.int32), np.ones(tokens, bool), tokens)
        with TokenizedDatasetWriter(folder) as writer:
            flat = flatten_documents([document], ["rows.jsonl:1"])
            writer.add(TokenizedChunk(None, PreprocessSummary(rows=1), [], flat))
            writer.finish(source="rows.jsonl", split=split, made=time.time() - days_ago * DAY - 1, seconds=1.0)

    dataset = cache.get_or_build(key, write_dataset, pytest.fail)
    info_file = cache.cache_dir() / key / METADATA_FILE
    os.utime(info_file, (time.time() - days_ago * DAY - 1,) * 2)
    return dataset


def run_tune_cache(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    gc.collect()
    code = cli.main(["cache", *args])
    output = capsys.readouterr()
    return output.out if code == 0 else f"{code} {output.err}"


def test_entries_and_total_size_are_shown(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tune_cache(capsys) == f"the cache is empty\n0 bytes in {cache_dir}\n"
    make_entry("a" * 32, 1000, days_ago=9)
    make_entry("b" * 32, 2_000_000, split="test[:10%]")
    head, second, first, total = run_tune_cache(capsys).splitlines()
    assert head.split() == ["key", "size", "rows", "tokens", "made", "used", "source"]
    assert " ".join(second.split()) == "bbbbbbbb 10 MB 1 2,000,000 now now rows.jsonl (test[:10%])"
    assert re.fullmatch(r"a{8} 5.\d+ kB 1 1,000 1w ago 1w ago rows.jsonl", " ".join(first.split())), first
    assert total == f"10 MB in {cache_dir}"


def test_clear_removes_selected_entries(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, key in enumerate(("ab1", "ab2", "ac3", "ad4")):
        make_entry(key, 1000, days_ago=10 * number)
    open_entry = make_entry("ae5", 1000, days_ago=99)
    assert "--older-than 30d, or --all" in run_tune_cache(capsys, "clear")
    assert "'ab': matches 2 keys" in run_tune_cache(capsys, "clear", "ab")
    assert "'x': matches no key" in run_tune_cache(capsys, "clear", "ab1", "x")
    assert "--older-than: must be a number and m, h, d or w, such as 30d, got '3'" in run_tune_cache(
        capsys, "clear", "--older-than", "3"
    )
    assert "`tune cache clear`" in run_tune_cache(capsys, "--all")
    assert len(cache.list_entries()) == 5, "a mistake removes nothing"
    assert re.fullmatch(r"removed 1, 5.\d+ kB\n", run_tune_cache(capsys, "clear", "ab1"))
    assert re.fullmatch(r"removed 1, 5.\d+ kB; 1 in use .*\n", run_tune_cache(capsys, "clear", "--older-than", "25d"))
    assert [entry.key for entry in cache.list_entries()] == ["ab2", "ac3", "ae5"]
    (cache_dir / "af6-1234.partial").mkdir()
    assert ", and 0 bytes in 1 unfinished" in run_tune_cache(capsys)
    assert len(open_entry) == 1
    del open_entry
    assert run_tune_cache(capsys, "clear", "--all").startswith("removed 4, ")
    assert not list(cache_dir.iterdir())


def test_disabled_cache_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", "off")
    assert run_tune_cache(capsys) == "2 error: TUNEKIT_CACHE=off: the cache is disabled\n"
