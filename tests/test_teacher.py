"""A teacher that is not there is told before anybody is asked for it; one of the same name is known from another."""

import json
from pathlib import Path
from typing import Any

import pytest

from tunekit.cli import main as cli
from tunekit.distillation import teacher, teacher_logits
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.hub import download

A, B = ({"commit": letter * 40} for letter in "ab")
FILES = {"model.safetensors": [10, 1]}


def test_a_run_that_is_not_there_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(download, "download_repo", lambda name, *_: asked.append(name) or tmp_path)
    assert cli.main(["validate", "nano/distill"]) == 2
    told = capsys.readouterr().err
    assert "error: teacher.model: no such folder: runs/nano-tools: train it first" in told
    assert "names that begin with runs/ are directories of runs and are never looked up on the Hub" in told
    assert not asked
    (tmp_path / "runs/nano-tools").mkdir(parents=True)
    assert cli.main(["validate", "nano/distill"]) == 2
    assert "no such folder" not in capsys.readouterr().err
    assert cli.main(["validate", "nano/distill", "teacher.model=owner/teacher"]) == 2
    assert asked == ["owner/teacher"]


def test_only_names_of_the_hub_lose_their_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ann@corp/one", "owner/model@v1"):
        (tmp_path / name).mkdir(parents=True)
    own = (
        f"{tmp_path}/ann@corp/one",
        f"{tmp_path}/ann@corp/gone",
        "ann@corp/one",
        "./ann@corp/gone",
        "~/ann@corp/gone",
    )
    for name in (*own, "owner/model@v1", "runs/tools@1", "a/b/c@d", "tunekit/nano"):
        assert teacher.unpinned(name) == name and download.split_repo_revision(name) is None
    for name, parts in {
        "owner/model@v2": ("owner/model", "v2"),
        "owner/model@refs/pr/1": ("owner/model", "refs/pr/1"),
        "owner/model": ("owner/model", None),
        "gpt2@main": ("gpt2", "main"),
    }.items():
        assert download.split_repo_revision(name) == parts and teacher.unpinned(name) == parts[0]


def sets(folder: Path, *seen: dict[str, Any], blocks: int = 0, model: str = "owner/t") -> list[Path]:
    """Sets of files that a teacher wrote when it was `seen` so. They are whole if they are of no blocks."""
    about = {"top": 4, "temperature": 1.0, "ids": 9, "total": 9, "model": model, "blocks": blocks}
    places = [folder / str(number) for number in range(len(seen))]
    for place, one in zip(places, seen, strict=True):
        place.mkdir()
        (place / teacher_logits.ABOUT).write_text(json.dumps({**about, "seen": one}))
    return places


def there(places: list[Path], now: dict[str, Any], model: str = "owner/t") -> teacher_logits.TopKLogits | None:
    return teacher.OfflineTeacherConfig(model=model, logits_dir="kept").there(places, now, DistributedContext.alone())


def test_whole_files_of_an_earlier_commit_are_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = sets(tmp_path, A, A)
    assert there(whole, B) == teacher_logits.TopKLogits(4, 1.0, 9, 9)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and all(text in told for text in (*A.values(), *B.values(), "going on with them"))
    for now in (A, {}):
        assert there(whole, now) and not capsys.readouterr().err
    with pytest.raises(UserError, match="these files are of a+: give another teacher.logits_dir, or delete them"):
        there(whole, B, model="owner/t@v2")


def test_a_branch_that_has_moved_is_as_a_name_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert there(sets(tmp_path, A, A, model="owner/t@v2"), B, model="owner/t@v2")
    assert "owner/t@v2 is at" in capsys.readouterr().err


@pytest.mark.parametrize("seen", [(A, A), (A, B), ({}, A)], ids=["one", "two", "unknown"])
def test_where_some_is_missing_no_other_commit_goes_on(tmp_path: Path, seen: tuple[dict[str, Any], ...]) -> None:
    half = sets(tmp_path, *seen, blocks=1)
    with pytest.raises(UserError, match="these files are of a+: give another teacher.logits_dir"):
        there(half, B)
    (tmp_path / "other").mkdir()
    whole = sets(tmp_path / "other", *seen)
    with pytest.raises(UserError, match="these files are of a+: "):
        there([*whole, tmp_path / "nothing"], B)


def test_what_was_not_written_down_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of before commits were kept."""
    assert there(sets(tmp_path, {}, {}), B) and not capsys.readouterr().err
    (tmp_path / "half").mkdir()
    assert there(sets(tmp_path / "half", {}, blocks=1), B) is None


def test_a_folder_that_has_changed_is_refused(tmp_path: Path) -> None:
    places = sets(tmp_path, FILES, model="teacher")
    assert there(places, FILES, model="teacher")
    with pytest.raises(
        UserError, match="another teacher wrote these files: give another teacher.logits_dir, or delete"
    ):
        there(places, {"model.safetensors": [10, 2]}, model="teacher")
