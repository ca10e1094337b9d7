"""The command line: arguments, startup time and errors."""

import importlib
import json
import keyword
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit import assets
from tunekit.cli import main as cli
from tunekit.cli import registry

TUNE = Path(sys.executable).with_name("tune")
HEAVY_PACKAGES = ("torch", "numpy", "omegaconf", "yaml", "huggingface_hub", "transformers")


def run_with_error(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must fail with a one-line error; return the line."""
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and not out, out + err
    return err


@pytest.mark.parametrize(
    "args", [["ls"], ["--help"], ["run", "--help"], ["cat", "qwen3/8b_lora"], ["completion", "zsh"]]
)
def test_light_verbs_import_no_heavy_packages(args: list[str]) -> None:
    code = f"""
import sys
from tunekit.cli import main as cli
try:
    cli.main({args})
except SystemExit as end:
    assert end.code == 0
print("heavy:", *(name for name in {HEAVY_PACKAGES} if name in sys.modules), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = "heavy: yaml" if args == ["ls"] else "heavy:"  # the recipes of configs
    assert result.stdout and result.stderr.strip() == expected


def test_too_many_processes_are_refused_before_torch_is_imported() -> None:
    """On a machine without a GPU."""
    code = """
import sys
from tunekit import system
from tunekit.cli import main as cli
system.GPU_FILES = ()
assert cli.main(["run", "sft", "nano/tools_lora", "--nproc-per-node", "9999"]) == 2
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.startswith("error: --nproc-per-node 9999: must be <= ")
    assert result.stderr.count("\n") == 1


def test_ls_takes_at_most_0_2_s() -> None:
    """Compared with the start of Python, which takes 0.03 s on a fast machine, in CPU time: other tests run too."""

    def seconds(*command: str | Path) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds(TUNE, "ls"), seconds(sys.executable, "-c", "pass")) for _ in range(5)]
    assert min(ls for ls, _ in pairs) < 6.5 * min(start for _, start in pairs)


def test_each_verb_has_a_module() -> None:
    for verb in cli.VERBS:
        name = f"{verb}_" if keyword.iskeyword(verb) else verb
        assert callable(importlib.import_module(f"tunekit.cli.commands.{name}").main)


def test_help_is_shown_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    output = capsys.readouterr().out
    assert all(f"    {verb}" in output for verb in cli.VERBS)


def test_version_includes_torch_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("tunekit 0", "torch 2", "Python 3"))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["rnu"], "'run'?"),
        (["run", "sfft", "qwen3/8b_lora"], "'sft'?"),
        (["run", "sft", "qwen3/8b_loar"], "'qwen3/8b_lora'?"),
        (["cat", "8b_lora"], "/8b_lora'"),
        (["ls", "quen3"], "'qwen3'?"),
        (["ls", "--jsno"], "'--json'?"),
        (["run", "sft", "qwen3/8b_lora", "--gpu", "1"], "'--gpus'?"),
        (["run", "sft"], "CONFIG [key=value ...]"),
        (["run", "sft", "epochs=1"], "CONFIG [key=value ...]"),
        (["run", "sft", "qwen3/8b_lora", "epochs"], "key=value"),
        (["run", "sft", "--config"], "--config"),
        (["run", "sft", "nope.yaml"], "nope.yaml: no such file"),
        (["run", "qwen3/8b_loar"], "'qwen3/8b_lora'?"),
        (["run", "nope.yaml"], "nope.yaml: no such file"),
        (["run", "sft", "dir/8b_laro.yml"], "dir/8b_laro.yml: no such file"),
        (["run", "--nproc_per_node", "0", "sft", "qwen3/8b_lora"], "must be a positive integer, got '0'"),
        (["validate", "qwen3/8b_lora", "adapter=qlora"], "adapter=lora quantization=nf4"),
        (["validate", "qwen3/8b_lora", "quantization=4bit"], "'nf4'?"),
        (["run", "nope.py", "qwen3/8b_lora"], "no recipe 'nope.py'"),
        (["run", "sft", "--nproc-per-node", "0", "qwen3/8b_lora"], "must be a positive integer, got '0'"),
        (["run"], "RECIPE"),
        (["validate", "qwen3/8b_lora", "--import", "nope.py"], "nope.py: no such file"),
        (["validate", "nano/tools_full", "parallel.ep=2"], "parallel.ep: this model has no experts"),
        (["validate", "nano/tools_full", "parallel.tp=5"], "parallel.tp: "),
        (["validate", "nano/generate", "parallel.tp=5"], "parallel.tp: "),
        (["completion", "tcsh"], "bash"),
    ],
)
def test_usage_errors_are_one_line(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in run_with_error(capsys, *args)


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cat", "nope", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_closed_stdout_is_not_an_error() -> None:
    tune = subprocess.Popen([TUNE, "ls"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    tune.stdout.close()
    assert tune.stderr.read() == b"" and tune.wait() == 141


def test_ls_shows_each_name_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(names) == sorted([*registry.list_recipes(), *registry.list_configs()])


def test_ls_filters_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "QWEN3/8B", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [config["name"] for row in rows for config in row["configs"]] == [
        "qwen3/8b_full",
        "qwen3/8b_lora",
        "qwen3/8b_qlora",
    ]
    assert all(row["about"] for row in rows)


def test_ls_shows_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*assets.PRESETS]
    assert cli.main(["ls", "presets", "--json"]) == 0
    assert {row["preset"] for row in json.loads(capsys.readouterr().out)} == set(assets.PRESETS)


@pytest.mark.parametrize("name", ["sft", "sft.py", "qwen3/8b_lora", "qwen3/8b_lora.yaml"])
def test_cat_prints_the_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cat", name]) == 0
    assert capsys.readouterr().out == registry.find_recipe_or_config(name).read_text()


def test_cp_creates_directories_and_adds_the_suffix(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dest, created in (
        ("a/b/mine", "a/b/mine.yaml"),
        ("my.v2", "my.v2.yaml"),
        ("a/", "a/8b_lora.yaml"),
        (".", "8b_lora.yaml"),
    ):
        assert cli.main(["cp", "qwen3/8b_lora", dest]) == 0
        assert (count / created).read_bytes() == registry.find_config("qwen3/8b_lora").read_bytes()
        assert created in capsys.readouterr().out


def test_cp_overwrites_only_when_forced(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--force" in run_with_error(capsys, "cp", "sft", "count.py")
    assert (count / "count.py").read_text().startswith('"""Counting')
    assert cli.main(["cp", "sft", "count.py", "--force"]) == 0
    assert (count / "count.py").read_bytes() == registry.find_recipe("sft").read_bytes()


def test_local_config_takes_precedence(count: Path) -> None:
    (count / "qwen3").mkdir()
    (count / "qwen3" / "8b_lora.yaml").write_text("recipe: sft\n")
    assert registry.find_config("qwen3/8b_lora") == Path("qwen3/8b_lora.yaml")
    assert registry.find_config("qwen3/8b_full").is_relative_to(registry.CONFIGS)


def test_overrides_and_options_can_be_mixed(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = (
        ["count.py", "count", "word=a=b", "to=2"],
        ["count.py", "--config", "count.yaml", "word=a=b", "to=2"],
        ["count.py", "count", "word=x", "--debug", "word=a=b", "to=2"],
    )
    for args in variants:
        assert cli.main(["run", *args]) == 0
        assert capsys.readouterr().out == "a=b a=b\n"


def test_run_finds_the_recipe_in_the_config(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tune run sft count.yaml" in run_with_error(capsys, "run", "count.yaml")
    assert cli.main(["run", "count.py", "count.yaml"]) == 0
    (count / "other.yaml").write_text("recipe: sft\nword: sheep\n")
    capsys.readouterr()
    assert cli.main(["run", "other", "seed=1"]) == 2
    assert "output_dir: is required" in capsys.readouterr().err  # a key of sft


def test_options_may_have_underscores(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--nproc_per_node=1", "--max_restarts", "0", "count.py", "count", "word=--node_rank"]) == 0
    assert "--node_rank" in capsys.readouterr().out
    assert "'--nproc-per-node'?" in run_with_error(capsys, "run", "--nproc_per_nod", "1", "count.py", "count")


def test_run_checks_before_it_runs(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "too long" in run_with_error(capsys, "run", "count.py", "count", "to=101")
    assert "too long" in run_with_error(capsys, "validate", "count", "to=101", "--recipe", "count.py")
    assert cli.main(["validate", "count", "to=100", "--recipe", "count.py"]) == 0
    assert capsys.readouterr().out == "valid: count.yaml\n"


def test_validate_reports_all_errors(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "count", "wrod=x", "to=many", "--recipe", "count.py"]) == 2
    err = capsys.readouterr().err
    assert "wrod" in err and "'word'?" in err and "many" in err and "Traceback" not in err


def test_exception_in_user_code_names_file_and_line(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (count / "count.py").read_text().replace("if cfg.to == 0:", "if 1 / cfg.to < 0:")
    (count / "count.py").write_text(text)
    line = text.splitlines().index("    if 1 / cfg.to < 0:") + 1
    assert cli.main(["run", "count.py", "count", "to=0"]) == 1
    first, *stack = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and first.endswith(f"count.py:{line}: ZeroDivisionError: division by zero")
    assert "in main" in stack[0] and "Traceback" not in stack[0]


def test_config_of_another_recipe_is_an_error(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (count / "other.yaml").write_text("recipe: dpo\nword: sheep\n")
    assert "written for the recipe 'dpo'" in run_with_error(capsys, "run", "sft", "other")
    assert "--recipe" in run_with_error(capsys, "validate", "count")
    (count / "half.py").write_text('"""Half a recipe."""\n\nCONFIG = int\n')
    assert "check, main" in run_with_error(capsys, "run", "half.py", "count")


def test_more_processes_than_devices_is_an_error(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nproc-per-node 400" in run_with_error(capsys, "run", "count.py", "count", "--nproc-per-node", "400")


def test_overwrite_erases_the_run(count: Path) -> None:
    (count / "counted" / "state").mkdir(parents=True)
    (count / "counted" / "config.yaml").write_text("word: sheep\n")
    assert cli.main(["run", "count.py", "count", "--overwrite"]) == 0
    assert not (count / "counted" / "state").exists()


def test_ctrl_c_prints_nothing(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "count.py", "count", "to=0"]) == 130
    assert capsys.readouterr() == ("", "")


def test_threads_of_the_user_end_with_a_failed_command() -> None:
    code = """
import threading
from tunekit.cli import main as cli
cli.THREAD_SECONDS = 0
threading.Thread(target=threading.Event().wait, name="watcher").start()
print("buffered")
cli.end_threads(3)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (3, "buffered\n") and "watcher" in result.stderr


def test_options_lists_all_fields(count: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["options", "count.py", "--all"]) == 0
    reference = capsys.readouterr().out
    assert all(name in reference for name in ("word", "to", "output_dir"))
    assert cli.main(["options", "count.py", "--schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) >= {"word", "to", "output_dir"}


@pytest.mark.parametrize(
    ("code", "error"),
    [("1 / 0", "ZeroDivisionError"), ("def (", "SyntaxError"), ("raise SystemExit", "SystemExit")],
)
def test_recipe_that_cannot_be_imported_names_the_line(
    count: Path, capsys: pytest.CaptureFixture[str], code: str, error: str
) -> None:
    text = (count / "count.py").read_text() + f"\n{code}\n"
    (count / "count.py").write_text(text)
    line = text.splitlines().index(code) + 1
    assert f"count.py:{line}: cannot be imported: {error}" in run_with_error(capsys, "run", "count.py", "count")
