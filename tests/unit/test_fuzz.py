"""Mutated files of checkpoints, adapters, configs and rows are read or refused: no other exception, crash or hang."""

from pathlib import Path

import pytest

from tests.helpers.fuzz import TARGETS, fuzz_file, write_corpus


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    TARGETS[name][0](tmp_path)  # the unchanged file is valid
    outcomes, findings = fuzz_file(name, 40, tmp_path)
    assert not findings
    assert outcomes["refused"] or name == "rows.jsonl"
