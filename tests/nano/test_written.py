"""Data sets that come with the toolkit are what their generators write, and say nothing twice."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tunekit import assets
from tunekit.nano import preferences, tools

SIZES = {"train": 1800, "test": 200}


@pytest.mark.parametrize(("name", "write"), [("preferences", preferences.write), ("tools", tools.write)])
def test_the_files_are_what_the_generator_writes(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == SIZES.keys()
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (assets.DATA[f"tunekit/{name}"] / file.name).read_bytes()


@pytest.mark.parametrize("name", ["preferences", "tools"])
def test_no_text_stands_in_the_data_twice(name: str) -> None:
    texts: list[str] = []
    for split, size in SIZES.items():
        lines = (assets.DATA[f"tunekit/{name}"] / f"{split}.jsonl").read_text().splitlines()
        assert len(lines) == size
        texts += [message["content"] for line in lines for turns in json.loads(line).values() for message in turns]
    assert len(set(texts)) == len(texts)
