"""`tune plan` on the command line."""

import json
from pathlib import Path

import pytest

from tunekit import assets
from tunekit.cli import main as cli
from tunekit.plan import hardware

CONFIG = (
    "model: tunekit/llama3_2_1b\ndata: {kind: text, source: rows.jsonl, max_length: 64}\noutput_dir: run\nrecipe: sft\n"
)


@pytest.fixture
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG)
    return "a.yaml"


def test_plan_needs_no_weights_rows_or_gpu(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", config_path, "max_steps=10", "--nproc-per-node", "2", "--gpu-type", "a100", "--gpu-hour-price", "2"]
    assert cli.main(args) == 0
    text = capsys.readouterr().out
    assert "tunekit/llama3_2_1b on 2 x A100 80 GB (79 GiB)" in text and "options that use less memory" in text
    assert "cost: " in text and "all-gather: weights, forward" in text


def test_assumed_gpu_is_reported(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", config_path, "max_steps=10"]
    assumed_gpu = "no --gpu-type given: assuming H100, 79 GiB; set --gpu-type for another GPU\n"
    assumed_speed = "no --gpu-type given: assuming RTX 4090, 24 GiB; set --gpu-type for another GPU\n"
    for extra_args, expected in (
        (["--nproc-per-node", "2"], assumed_gpu),
        (["--nproc-per-node", "2", "--gpu-memory", "24G"], assumed_speed),
    ):
        assert cli.main([*args, *extra_args]) == 0
        assert capsys.readouterr().out.startswith(f"{expected}\ntunekit/llama3_2_1b on 2 x ")
    assert cli.main([*args, "--nnodes", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["hardware"] == "2 x H100 (79 GiB) on 2 nodes" and err == f"{assumed_gpu}\n"
    for extra_args in (
        [],
        ["--nproc-per-node", "2", "--gpu-type", "h100"],
        ["--nproc-per-node", "2", "--gpu-tflops", "99"],
    ):
        assert cli.main([*args, *extra_args]) == 0
        out, err = capsys.readouterr()
        assert "assuming" not in out + err


def test_json_output_and_config_that_fits(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", config_path, "micro_batch_size=16", "--gpu-memory", "24G", "--output", "b.yaml", "--json"]
    assert cli.main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["auto"]["peak"] <= 24 * 2**30
        and max(phase["total"] for phase in result["phases"].values()) == result["peak"]
    )
    assert cli.main(["plan", "b.yaml", "--gpu-memory", "24G", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] == result["auto"]["peak"]


def test_config_that_does_not_fit_exits_with_2(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", config_path, "max_steps=10", "--gpu-type", "rtx4090", "--gpu-memory"]
    assert cli.main([*args, "2G"]) == 2
    out, err = capsys.readouterr()
    assert "short by " in out and "options that use less memory" in out
    assert err.startswith("error: a.yaml: does not fit 1 x RTX 4090 (2 GiB).") and "--auto" in err
    assert err.count("\n") == 1
    assert cli.main([*args, "2G", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert cli.main([*args, "80G"]) == 0
    assert cli.main(["plan", config_path, "max_steps=10"]) == 0, "no memory limit is known for the CPU"
    capsys.readouterr()
    tight = [*args[:-1], "micro_batch_size=16", "data.max_length=512", "--gpu-memory", "24G"]
    assert cli.main(tight) == 2
    assert cli.main([*tight, "--auto"]) == 0, "--auto found a config that fits"


def test_written_config_of_a_preset_has_a_warning(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", config_path, "--gpu-memory", "80G", "--output", "b.yaml"]
    warning = "tunekit/llama3_2_1b has no weights: set model= to a checkpoint or init=random before running it"
    for extra_args, expected in (
        ([], f"written: b.yaml; {warning}\n"),
        (["init=random"], "written: b.yaml\n"),
        (["model=tunekit/nano"], "written: b.yaml\n"),
    ):
        assert cli.main([*args, *extra_args]) == 0
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--gpu-type", "h10"], "h100"),
        (["--gpu-memory", "much"], "--gpu-memory"),
        (["--nproc-per-node", "8", "parallel.tp=3"], "8"),
        (["--auto"], "--auto"),
        (["--gpu-tflops", "0"], "got '0'"),
    ],
)
def test_usage_errors_are_one_line(
    config_path: str, args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", config_path, *args]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_recipe_without_training_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "nano/generate"]) == 2
    assert "trains no model" in capsys.readouterr().err


def test_preset_replaces_a_model_that_cannot_be_downloaded(
    config_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert cli.main(["plan", config_path, "max_steps=10", "model=Qwen/Qwen3-0.6B"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("tunekit/qwen3_0_6b on") and err.startswith("Qwen/Qwen3-0.6B: ") and err.count("\n") == 1
    for name in ("Qwen/Qwen3-0.7B", "./Qwen3-0.6B"):
        assert cli.main(["plan", config_path, "max_steps=10", f"model={name}"]) == 2


@pytest.mark.parametrize(("name", "preset"), [
    ("meta-llama/Llama-3.1-8B-Instruct", "llama3_1_8b"), ("google/gemma-3-1b-it", "gemma3_1b"),
    ("allenai/OLMo-2-1124-7B-Instruct", "olmo2_7b"), ("Qwen/Qwen2.5-0.5B@abc", "qwen2_5_0_5b"),
    ("microsoft/Phi-3-mini-4k-instruct", "phi3_mini"), ("zai-org/GLM-4.5-Air", "glm4_5_air"),
    ("Qwen/Qwen3-8B-FP8", None), ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
])  # fmt: skip
def test_presets_are_found_by_the_names_of_models(name: str, preset: str | None) -> None:
    assert assets.find_preset(name) == (preset and f"tunekit/{preset}")


def test_search_on_the_cpu_is_refused_at_once(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", config_path, "max_steps=10", "--auto"]) == 2
    out, err = capsys.readouterr()
    assert "--gpu-type" in err and not out


def test_gpu_of_unknown_size_has_no_name() -> None:
    assert hardware.gpu_by_memory(hardware.GIB).label == "GPU with H100 speed"


def test_longest_rows_are_printed_with_their_limit(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", config_path, "max_steps=10", "adapter=lora", "--gpu-type", "rtx4090", "--max-length"]
    assert cli.main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    length = result["max_length"]["tokens"]
    assert result["max_length"]["limited_by"] == "memory" and result["max_length"]["peak"] <= result["device_memory"]
    assert cli.main(args) == 0
    assert f"data.max_length={length}" in capsys.readouterr().out
    assert (
        cli.main(
            ["plan", config_path, "max_steps=10", f"data.max_length={length}", "adapter=lora", *args[4:6], "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["peak"] == result["max_length"]["peak"]


def test_longest_rows_are_those_of_this_machine_by_default(
    config_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = hardware.ClusterSpec(memory=4 * hardware.GIB)
    monkeypatch.setattr(hardware, "this_machine", lambda num_devices: cluster)
    assert cli.main(["plan", config_path, "max_steps=10", "model=tunekit/nano", "--max-length", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["hardware"] == "the CPU" and result["max_length"]["tokens"] > 0
    assert cli.main(["plan", config_path, "--max-length", "--auto"]) == 2
