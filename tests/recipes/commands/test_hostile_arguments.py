"""Arguments, files and streams that no run can use: one line, exit code 2, and no secret on the disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.cli import main as cli

TUNE = (sys.executable, "-m", "tunekit.cli")
NAME_TOO_LONG = "x" * 300
INVALID = {
    "a name of 300 bytes": ([f"output_dir={NAME_TOO_LONG}"], "output_dir: a name in a path has at most 255 bytes"),
    "a model of 300 bytes": ([f"model=/{NAME_TOO_LONG}"], "File name too long"),
    "a template of 300 bytes": ([f"data.chat_template=/{NAME_TOO_LONG}"], "ame too long"),
    "a path that is not UTF-8": ([os.fsdecode(b"output_dir=caf\xe9")], "output_dir: must be UTF-8 text"),
    "a null character": (["output_dir=a\0b"], "output_dir: must not contain a null character"),
    "not a number": (["max_grad_norm=.nan"], "max_grad_norm: expected a number, got nan"),
    "a negative epsilon": (["optimizer.eps=-1"], "optimizer.eps: must be > 0"),
    "an escape sequence": (["model=\x1b[31mred"], "\\x1b[31mred"),
}


@pytest.mark.parametrize(("overrides", "message"), INVALID.values(), ids=INVALID)
def test_invalid_values_are_one_line(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "nano/tools_lora", *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "\x1b" not in error


def test_config_in_utf16_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sft.yaml").write_text("recipe: sft\nmodel: tunekit/nano\n", encoding="utf-16")
    assert cli.main(["validate", str(tmp_path / "sft.yaml")]) == 2
    assert "sft.yaml: not UTF-8 text" in capsys.readouterr().err


def test_secret_of_an_address_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "data.source=https://user:SECRET@127.0.0.1:9/x.jsonl?X-Amz-Signature=SECRET"
    out = tmp_path / "out"
    assert cli.main(["run", "sft", "nano/tools_lora", source, f"output_dir={out}", "device=cpu"]) == 2
    assert "SECRET" not in capsys.readouterr().err
    assert "https://***@127.0.0.1:9/x.jsonl?X-Amz-Signature=***" in (out / "config.yaml").read_text()
    assert not [file for file in out.rglob("*") if file.is_file() and b"SECRET" in file.read_bytes()]
    assert cli.main(["run", "sft", str(out / "config.yaml"), f"output_dir={out}"]) == 2
    assert "its secret was not saved; pass the address again" in capsys.readouterr().err


def test_closed_streams(tmp_path: Path) -> None:
    """Schedulers and daemons start processes so. No file takes the place of a stream."""
    out = tmp_path / "out"
    command = (*TUNE, "run", "sft", "nano/tools_lora", "max_steps=1", "eval_data=null", f"output_dir={out}")
    assert subprocess.run(["sh", "-c", f"exec {' '.join(command)} 0<&- 1>&- 2>&-"]).returncode == 0
    assert (out / "final/adapter_model.safetensors").is_file()
