"""Bundled data files equal the output of their generators and contain no duplicates."""

import json
from pathlib import Path

import pytest

from scripts.nano.bundle import DATASET_WRITERS
from tunekit import assets

SPLIT_SIZES = {"train": 1800, "test": 200}


@pytest.mark.parametrize("name", DATASET_WRITERS)
def test_bundled_files_equal_generator_output(name: str, tmp_path: Path) -> None:
    DATASET_WRITERS[name](tmp_path)
    bundled = {path.name: path.read_bytes() for path in (assets.BUNDLED / name).iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == bundled


@pytest.mark.parametrize("name", ["preferences", "tools"])
def test_datasets_have_no_duplicate_texts(name: str) -> None:
    texts: list[str] = []
    for split, size in SPLIT_SIZES.items():
        lines = (assets.DATA[f"tunekit/{name}"] / f"{split}.jsonl").read_text().splitlines()
        assert len(lines) == size
        texts += [message["content"] for line in lines for turns in json.loads(line).values() for message in turns]
    assert len(set(texts)) == len(texts)
