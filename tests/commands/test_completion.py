"""Completion scripts, in the shells that they are for."""

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
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_tune
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(shell: str, words: list[str]) -> set[str]:
    """What the shell offers when Tab is pressed behind these words; the last one may be unfinished."""
    command = {
        "bash": ["bash", "--norc", "-c", BASH, "bash", *words],
        "fish": ["fish", "-N", "-c", f"tune completion fish | source; complete -C '{' '.join(words)}'"],
    }[shell]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True)
    assert not done.stderr
    return {line.partition("\t")[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_tab_offers_what_may_stand_there(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    assert offered(shell, ["tune", "v"]) == {"validate"}
    assert offered(shell, ["tune", "run", "sf"]) == {"sft"}
    assert offered(shell, ["tune", "run", "sft", "qwen3/8"]) == {"qwen3/8b_full", "qwen3/8b_lora", "qwen3/8b_qlora"}
    assert offered(shell, ["tune", "run", "--config", "qwen3/8b_f"]) == {"qwen3/8b_full"}
    assert offered(shell, ["tune", "run", "sft", "--gp"]) == {"--gpus"}
    assert offered(shell, ["tune", "data", "qwen3/8b_f"]) == {"qwen3/8b_full"}
    assert offered(shell, ["tune", "data", "qwen3/8b_full", "--ro"]) == {"--row", "--rows"}
    assert offered(shell, ["tune", "completion", "z"]) == {"zsh"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_knows_the_place() -> None:
    assert offered("bash", ["tune", ""]) >= set(cli.VERBS)
    assert offered("bash", ["tune", "run", ""]) == set(registry.list_recipes())
    assert offered("bash", ["tune", "run", "--gpus", "2", ""]) == set(registry.list_recipes())
    assert offered("bash", ["tune", "run", "sft", ""]) == set(registry.list_configs())
    assert offered("bash", ["tune", "cat", ""]) == {*registry.list_recipes(), *registry.list_configs()}
    assert not offered("bash", ["tune", "run", "--import", ""]), "files, which the shell itself adds"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_accepts_the_script(tmp_path: Path) -> None:
    code = f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source <(tune completion zsh); print $_comps[tune]"
    done = subprocess.run(["zsh", "-fc", code], env=ENV, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("_tune\n", "")
