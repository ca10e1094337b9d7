"""`tune selftest`: exit codes, the report, and a kernel that is broken on purpose."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.cli import main as cli
from tunekit.cli.commands.selftest import INDENT, format_row
from tunekit.kernels import rope
from tunekit.selftest import report
from tunekit.selftest.checklist import ALWAYS, CHECKS, SYSTEM
from tunekit.selftest.result import Outcome
from tunekit.selftest.system import VARIABLES

ROOT = Path(__file__).parents[3]
COMPILE = ALWAYS[1]
SECRET = "hf_" + "a1B2c3D4" * 4


def selftest(directory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tunekit.cli", "selftest", "--device", "cpu", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, env=env)


def statuses(file: Path) -> dict[str, str]:
    return {check["check"]: check["status"] for check in json.loads(file.read_text())["checks"]}


def test_the_report_has_no_secrets_names_or_paths(tmp_path: Path) -> None:
    home = tmp_path / "jane.doe"
    home.mkdir()
    private = {
        "HOME": str(home),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # has the C++ kernels
        "USER": "jane.doe",
        "LOGNAME": "jane.doe",
        "HF_TOKEN": SECRET,
        "WANDB_API_KEY": SECRET,
    }
    done = selftest(home, "--only", "float8", "--only", "packing", "--output", "report.json", **private)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {SYSTEM: "passed", "kernels.float8": "passed", "model.packing": "passed"}
    assert statuses(home / "report.json") == expected | {COMPILE: statuses(home / "report.json")[COMPILE]}
    system = json.loads((home / "report.json").read_text())["system"]
    assert {"python", "torch", "cpu", "memory", "device"} <= system.keys()
    for text in ((home / "report.json").read_text(), (home / "report.md").read_text()):
        assert "kernels.float8" in text
        for private_text in ("jane", SECRET, str(tmp_path)):
            assert private_text not in text


def test_a_broken_kernel_is_named(tmp_path: Path) -> None:
    """A copy of the package, in which keys and queries are rotated back in the wrong direction."""
    if rope.compiled() is None:
        pytest.skip("no C++ compiler")
    package, ignored = tmp_path / "tunekit", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tunekit", package, ignore=ignored)
    for part in ("kernels", "recipes", "configs"):
        shutil.copytree(ROOT / part, package / part, ignore=ignored)
    source = (package / "kernels/rope.py").read_text()
    broken = source.replace("-1.0 if inverse else 1.0", "1.0")
    assert broken != source
    (package / "kernels/rope.py").write_text(broken)
    done = selftest(tmp_path, "--only", "rope", "--only", "float8", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("failed: kernels.rope: ") and "gradient of q" in done.stderr
    expected = {SYSTEM: "passed", COMPILE: "passed", "kernels.rope": "failed", "kernels.float8": "passed"}
    assert statuses(tmp_path / "tunekit-selftest.json") == expected
    text = (tmp_path / "tunekit-selftest.md").read_text()
    assert "## Failed\n\n- **kernels.rope**: " in text and "\n\n## System" in text


def test_every_check_is_documented() -> None:
    text = (ROOT / "docs/selftest.md").read_text()
    named = {name for row in text.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)}
    assert named >= {check.short_name for check in CHECKS}


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["--only", "kernels.gluu"], "kernels.glu"),
        (["--output", "missing/report.json"], "--output missing/report.json"),
        (["--output", "."], "directory"),
        (["--output", "/proc/report.json"], "cannot write /proc/report.json"),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda", "--only", "float8"], "--device cuda"),
    ],
)
def test_usage_errors_exit_with_2(
    words: list[str], near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["selftest", *words]) == 2
    assert near in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_rows_are_wrapped_and_never_cut_off() -> None:
    detail = "limit 0.5 s (operations 0.5 s, memory 0.1 s); measured 0.7 s = 1.40 x the limit; 45 tokens/s"
    outcome = Outcome("speed.lora_step", "passed", 3.2, detail)
    lines = format_row(outcome, 80).splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].startswith(INDENT) and lines[-1].endswith("45 tokens/s")
    assert " ".join(" ".join(lines).split()) == " ".join(format_row(outcome, None).split())


def test_ctrl_c_says_that_there_is_no_report(tmp_path: Path) -> None:
    """The signal arrives after the second check; all others take a minute."""
    command = [sys.executable, "-P", "-m", "tunekit.cli", "selftest", "--device", "cpu"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=env, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        compiled = ("passed   kernels.compile", "skipped  kernels.compile")
        assert any(line.startswith(compiled) for line in process.stdout)
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
    match = re.fullmatch(r"\ninterrupted after (\d+) of (\d+) checks: no report was written\n", message)
    assert match and 2 <= int(match[1]) < int(match[2]), message
    assert process.returncode == 130 and not [*tmp_path.iterdir()]


def test_kernels_are_skipped_if_they_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    private = {"TUNEKIT_CACHE": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = selftest(tmp_path, "--only", "rope", **private)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {SYSTEM: "passed", COMPILE: "skipped", "kernels.rope": "skipped"}
    assert statuses(tmp_path / "tunekit-selftest.json") == expected
    assert "TUNEKIT_CACHE" in done.stdout


def test_paths_and_numbers_that_are_not_finite_are_redacted() -> None:
    values = {"log": ['File "/opt/env/lib/python3.12/site-packages/torch/nn.py", line 3'], "error": float("nan")}
    document = report.build_report([Outcome("kernels.glu", "failed", 1.0, "see /srv/jobs/x.log", values)], {}, 1.0)
    (check,) = document["checks"]
    assert check["detail"] == "see x.log" and check["values"]["error"] is None
    assert check["values"]["log"] == ['File "nn.py", line 3']


def test_environment_variables_with_names_or_secrets_are_not_collected() -> None:
    assert VARIABLES.fullmatch("OMP_NUM_THREADS") and VARIABLES.fullmatch("PYTORCH_CUDA_ALLOC_CONF")
    for name in ("HF_TOKEN", "HOME", "TORCH_HOME", "NCCL_SOCKET_IFNAME", "TRITON_CACHE_DIR"):
        assert not VARIABLES.fullmatch(name)
