"""`tune plan`, as a person types it."""

import json
from pathlib import Path

import pytest

from tunekit.cli import main as cli

CONFIG = (
    "model: tunekit/llama3_2_1b\ndata: {kind: text, source: rows.jsonl, max_length: 512}\n"
    "output_dir: run\nrecipe: sft\n"
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG)
    return "a.yaml"


def test_a_plan_needs_neither_weights_nor_rows_nor_a_gpu(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "max_steps=10", "--nproc-per-node", "2", "--gpu-type", "a100", "--gpu-hour-price", "2"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "tunekit/llama3_2_1b on 2 x A100 80 GB (79 GiB)" in text and "to need less" in text
    assert "costs" in text and "all-gather: weights, forward" in text


def test_a_plan_says_which_gpu_is_taken_where_none_is_named(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "max_steps=10"]
    taken = (
        "no --gpu-type is named: H100 with 79 GiB is taken; --gpu-type names another kind, --gpu-memory another size\n"
    )
    speed = "no --gpu-type is named: the speed of RTX 4090 is taken; --gpu-type names another kind\n"
    for more, told in ((["--nproc-per-node", "2"], taken), (["--nproc-per-node", "2", "--gpu-memory", "24G"], speed)):
        assert cli.main([*words, *more]) == 0
        assert capsys.readouterr().out.startswith(f"{told}\ntunekit/llama3_2_1b on 2 x ")
    assert cli.main([*words, "--nnodes", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["machine"] == "2 x H100 (79 GiB) on 2 hosts" and err == f"{taken}\n"
    for more in ([], ["--nproc-per-node", "2", "--gpu-type", "h100"], ["--nproc-per-node", "2", "--gpu-tflops", "99"]):
        assert cli.main([*words, *more]) == 0
        out, err = capsys.readouterr()
        assert "is taken" not in out + err


def test_a_plan_for_programs_and_one_that_fits(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "micro_batch_size=16", "--gpu-memory", "24G", "--output", "b.yaml", "--json"]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["fit"]["peak"] <= 24 * 2**30 and max(phase["total"] for phase in told["phases"].values()) == told["peak"]
    )
    assert cli.main(["plan", "b.yaml", "--gpu-memory", "24G", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] == told["fit"]["peak"]


def test_a_plan_that_does_not_fit_is_told_and_leaves_with_2(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "max_steps=10", "--gpu-type", "rtx4090", "--gpu-memory"]
    assert cli.main([*words, "2G"]) == 2
    out, err = capsys.readouterr()
    assert "does not fit: " in out and "to need less" in out
    assert err == "error: a.yaml does not fit 1 x RTX 4090 (2 GiB): --auto looks for the fastest way that does\n"
    assert cli.main([*words, "2G", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert cli.main([*words, "80G"]) == 0
    assert cli.main(["plan", config, "max_steps=10"]) == 0, "nobody says how much memory the CPU has"
    capsys.readouterr()
    tight = [*words[:-1], "micro_batch_size=16", "--gpu-memory", "24G"]
    assert cli.main(tight) == 2
    assert cli.main([*tight, "--auto"]) == 0, "what fits was found"


def test_a_preset_that_is_written_lacks_weights(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "--gpu-memory", "80G", "--output", "b.yaml"]
    lacks = "tunekit/llama3_2_1b has no weights: before it runs, name a checkpoint with model=, or say init=random"
    for more, told in (
        ([], f"written: b.yaml; {lacks}\n"),
        (["init=random"], "written: b.yaml\n"),
        (["model=tunekit/nano"], "written: b.yaml\n"),
    ):
        assert cli.main([*words, *more]) == 0
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu-type", "h10"], "did you mean h100?"),
        (["--gpu-memory", "much"], "--gpu-memory much: write a number and G, such as 80G"),
        (["--nproc-per-node", "8", "parallel.tp=3"], "there are 8 processes"),
        (["--auto"], "--auto: how much is there?"),
        (["--gpu-tflops", "0"], "must be a positive number, got '0'"),
    ],
)
def test_mistakes_are_told_in_a_line(
    config: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", config, *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_recipe_that_trains_nothing_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "nano/generate"]) == 2
    assert "trains no model" in capsys.readouterr().err
