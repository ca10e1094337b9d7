"""Completion scripts, run in their shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.cli import main as cli
from tunekit.cli import registry

ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
BASH = """
source <(tune completion bash)
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9; COMPREPLY=()
_python_argcomplete tune
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(shell: str, args: list[str]) -> set[str]:
    """Completions of the last word."""
    command = {
        "bash": ["bash", "--norc", "-c", BASH, "bash", *args],
        "fish": ["fish", "-N", "-c", f"tune completion fish | source; complete -C '{' '.join(args)}'"],
    }[shell]
    result = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True)
    assert not result.stderr
    return {line.partition("\t")[0].strip() for line in result.stdout.splitlines() if line}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_completes_commands_options_and_names(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    assert complete(shell, ["tune", "v"]) == {"validate"}
    assert complete(shell, ["tune", "run", "sf"]) == {"sft"}
    assert complete(shell, ["tune", "run", "sft", "qwen3/8"]) == {"qwen3/8b_full", "qwen3/8b_lora", "qwen3/8b_qlora"}
    assert complete(shell, ["tune", "run", "--config", "qwen3/8b_f"]) == {"qwen3/8b_full"}
    assert complete(shell, ["tune", "data", "qwen3/8b_full", "--ro"]) == {"--row"}
    assert complete(shell, ["tune", "completion", "z"]) == {"zsh"}
    assert complete(shell, ["tune", "selftest", "--device", "cu"]) == {"cuda"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completes_by_position() -> None:
    assert complete("bash", ["tune", ""]) == set(cli.VERBS)
    assert complete("bash", ["tune", "run", ""]) == set(registry.list_recipes())
    assert complete("bash", ["tune", "run", "--max-restarts", "2", ""]) == set(registry.list_recipes())
    assert complete("bash", ["tune", "run", "sft", ""]) == set(registry.list_configs())
    assert complete("bash", ["tune", "cat", ""]) == {*registry.list_recipes(), *registry.list_configs()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completes_files_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zebra.yaml").touch()
    for args in (["run", "sft", "zeb"], ["run", "sft", "--import", "zeb"], ["merge", "zeb"]):
        assert complete("bash", ["tune", *args]) == {"zebra.yaml"}


def test_completion_imports_nothing_heavy() -> None:
    """Completion runs at each press of Tab."""
    code = "import sys; from tunekit.cli.main import make_parser; from tunekit.cli.commands import completion"
    code += "; completion.complete(*make_parser()); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "huggingface_hub", "yaml"} & set(result.stdout.split())


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_accepts_the_script(tmp_path: Path) -> None:
    code = f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source <(tune completion zsh); print $_comps[tune]"
    result = subprocess.run(["zsh", "-fc", code], env=ENV, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("_python_argcomplete\n", "")
