"""Benchmarks can be imported and print their help. They are run manually, so broken imports would go unnoticed."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tunekit.config.load import load_config
from tunekit.recipes.sft import SFTConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GPU_SCRIPTS = Path(__file__).parents[1] / "scripts/gpu"
SCRIPTS = sorted(file.stem for file in BENCHMARKS.glob("*.py") if "ArgumentParser(" in file.read_text("utf-8"))
REQUIRED_PACKAGES: dict[str, str] = dict.fromkeys(("ablation", "compare", "reward_curves", "scaling"), "matplotlib")
REQUIRED_PACKAGES |= dict.fromkeys(("triton_checks", "triton_compile"), "triton")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip(REQUIRED_PACKAGES.get(name, "torch"))
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_compared_configs_are_valid(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(BENCHMARKS)
    compare = runpy.run_path(str(BENCHMARKS / "compare.py"))
    setup, task = compare["RunSetup"](tmp_path, (), {}), compare["SFTTask"](method)
    config = compare["build_sft_config"](setup, task, tmp_path) | {"output_dir": str(tmp_path / "out")}
    (tmp_path / "sft.yaml").write_text(json.dumps(config))
    assert load_config(SFTConfig, tmp_path / "sft.yaml").max_steps == task.steps


def test_planned_configs_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    plan = runpy.run_path(str(BENCHMARKS / "plan.py"))
    workloads = [plan["build_workload"](name, 1) for name in plan["CONFIGS"]]
    assert {workload.global_batch_size for workload in workloads} == {2, 4}


def test_speed_suite_names_sections_of_the_gpu_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", "results")
    for directory in (BENCHMARKS, GPU_SCRIPTS):
        monkeypatch.syspath_prepend(directory)
    jobs, _ = runpy.run_path(str(GPU_SCRIPTS / "suites.py"))["SUITES"]["speed"]("cpu")
    sections = runpy.run_path(str(BENCHMARKS / "gpu.py"))["SECTIONS"]
    assert {job.name for job in jobs} <= sections.keys()
