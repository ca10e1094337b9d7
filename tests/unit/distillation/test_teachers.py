"""Teachers: missing ones are reported before any download, and stored logits belong to one version of a teacher."""

import json
from pathlib import Path
from typing import Any

import pytest

from tunekit.cli import main as cli
from tunekit.distillation import teacher, teacher_logits
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.hub import download

COMMIT_A, COMMIT_B = ({"commit": letter * 40} for letter in "ab")
FILES = {"model.safetensors": [10, 1]}


def test_missing_run_directory_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    downloads: list[str] = []
    monkeypatch.setattr(download, "download_repo", lambda name, *_: downloads.append(name) or tmp_path)
    assert cli.main(["validate", "nano/distill"]) == 2
    err = capsys.readouterr().err
    assert "error: teacher.model: " in err
    assert "names that begin with runs/ are directories of runs and are never looked up on the Hub" in err
    assert not downloads
    (tmp_path / "runs/nano-tools").mkdir(parents=True)
    assert cli.main(["validate", "nano/distill"]) == 2
    assert "directory not found" not in capsys.readouterr().err
    assert cli.main(["validate", "nano/distill", "teacher.model=owner/teacher"]) == 2
    assert downloads == ["owner/teacher"]


def test_only_hub_names_have_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ann@corp/one", "owner/model@v1"):
        (tmp_path / name).mkdir(parents=True)
    local_names = (
        f"{tmp_path}/ann@corp/one",
        f"{tmp_path}/ann@corp/gone",
        "ann@corp/one",
        "./ann@corp/gone",
        "~/ann@corp/gone",
    )
    for name in (*local_names, "owner/model@v1", "runs/tools@1", "a/b/c@d", "tunekit/nano"):
        assert teacher.without_revision(name) == name and download.split_repo_revision(name) is None
    for name, expected in {
        "owner/model@v2": ("owner/model", "v2"),
        "owner/model@refs/pr/1": ("owner/model", "refs/pr/1"),
        "owner/model": ("owner/model", None),
        "gpt2@main": ("gpt2", "main"),
    }.items():
        assert download.split_repo_revision(name) == expected and teacher.without_revision(name) == expected[0]


def write_logit_sets(
    folder: Path, *fingerprints: dict[str, Any], missing_blocks: int = 0, model: str = "owner/t"
) -> list[Path]:
    """Directories of logits of teachers with these fingerprints. They are complete if `missing_blocks` is 0."""
    info = {"top": 4, "temperature": 1.0, "ids": 9, "total": 9, "model": model, "blocks": missing_blocks}
    paths = [folder / str(number) for number in range(len(fingerprints))]
    for path, fingerprint in zip(paths, fingerprints, strict=True):
        path.mkdir()
        (path / teacher_logits.INFO_FILE).write_text(json.dumps({**info, "seen": fingerprint}))
    return paths


def resume_logits(
    paths: list[Path], fingerprint: dict[str, Any], model: str = "owner/t"
) -> teacher_logits.TopKLogits | None:
    return teacher.OfflineTeacherConfig(model=model, logits_dir="kept").find_existing(
        paths, fingerprint, DistributedContext.single_process()
    )


def test_complete_logits_of_an_earlier_commit_are_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_logit_sets(tmp_path, COMMIT_A, COMMIT_A)
    assert resume_logits(paths, COMMIT_B) == teacher_logits.TopKLogits(4, 1.0, 9, 9)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(text in err for text in (*COMMIT_A.values(), *COMMIT_B.values()))
    for fingerprint in (COMMIT_A, {}):
        assert resume_logits(paths, fingerprint) and not capsys.readouterr().err
    with pytest.raises(UserError, match=r"a{5}.*teacher\.logits_dir"):
        resume_logits(paths, COMMIT_B, model="owner/t@v2")


def test_moved_branch_is_treated_like_no_revision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume_logits(
        write_logit_sets(tmp_path, COMMIT_A, COMMIT_A, model="owner/t@v2"), COMMIT_B, model="owner/t@v2"
    )
    assert "owner/t@v2 is at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fingerprints", [(COMMIT_A, COMMIT_A), (COMMIT_A, COMMIT_B), ({}, COMMIT_A)], ids=["one", "two", "unknown"]
)
def test_incomplete_logits_of_another_commit_are_refused(
    tmp_path: Path, fingerprints: tuple[dict[str, Any], ...]
) -> None:
    incomplete = write_logit_sets(tmp_path, *fingerprints, missing_blocks=1)
    with pytest.raises(UserError, match=r"a{5}.*teacher\.logits_dir"):
        resume_logits(incomplete, COMMIT_B)
    (tmp_path / "other").mkdir()
    complete = write_logit_sets(tmp_path / "other", *fingerprints)
    with pytest.raises(UserError, match="a{5}"):
        resume_logits([*complete, tmp_path / "nothing"], COMMIT_B)


def test_unknown_commit_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that were written before commits were recorded."""
    assert resume_logits(write_logit_sets(tmp_path, {}, {}), COMMIT_B) and not capsys.readouterr().err
    (tmp_path / "half").mkdir()
    assert resume_logits(write_logit_sets(tmp_path / "half", {}, missing_blocks=1), COMMIT_B) is None


def test_changed_teacher_directory_is_refused(tmp_path: Path) -> None:
    paths = write_logit_sets(tmp_path, FILES, model="teacher")
    assert resume_logits(paths, FILES, model="teacher")
    with pytest.raises(UserError, match=r"teacher\.logits_dir"):
        resume_logits(paths, {"model.safetensors": [10, 2]}, model="teacher")
