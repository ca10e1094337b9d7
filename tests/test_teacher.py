"""A teacher that is not there is told before anybody is asked for it."""

from pathlib import Path

import pytest

from tunekit import cli
from tunekit.hub import fetch


def test_a_run_that_is_not_there_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(fetch, "download", lambda name, *_: asked.append(name) or tmp_path)
    assert cli.main(["validate", "nano/distill"]) == 2
    assert "error: teacher.model: no such folder: runs/nano-tools: train it first" in capsys.readouterr().err
    assert not asked
    (tmp_path / "runs/nano-tools").mkdir(parents=True)
    assert cli.main(["validate", "nano/distill"]) == 2
    assert "no such folder" not in capsys.readouterr().err
    assert cli.main(["validate", "nano/distill", "teacher.model=owner/teacher"]) == 2
    assert asked == ["owner/teacher"]
