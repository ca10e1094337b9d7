"""Arguments, files and streams that no run can use: one line, exit code 2, and no secret on the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.assets import BUNDLED
from tunekit.cli import main as cli

TUNE = (sys.executable, "-m", "tunekit.cli")
RUN = (*TUNE, "run", "sft", "nano/tools_lora", "max_steps=1", "data.max_samples=32", "eval_data=null")
BUNDLED_MODEL = BUNDLED / "model"
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
    error = capsys.readouterr().err
    assert "sft.yaml" in error and "not UTF-8 text" in error


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
    command = (*RUN, f"output_dir={out}")
    assert subprocess.run(["sh", "-c", f"exec {' '.join(command)} 0<&- 1>&- 2>&-"]).returncode == 0
    assert (out / "final/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("limit", "message"), [("-n 8", "Too many open files"), ("-v 1200000", "of address space")])
def test_low_limits_of_the_system_are_one_line(tmp_path: Path, limit: str, message: str) -> None:
    command = (*RUN, f"output_dir={tmp_path}/out")
    done = subprocess.run(["bash", "-c", f"ulimit {limit}; exec {' '.join(command)}"], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: ") and message in last and "Traceback" not in done.stderr


def write_model(folder: Path, **files: str) -> None:
    """Write the bundled model with other contents of some files."""
    folder.mkdir()
    for file in BUNDLED_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    for stem, text in files.items():
        file = next(folder.glob(f"{stem}.*"))
        file.unlink()
        file.write_text(text)


def test_prompt_without_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", chat_template="")
    assert cli.main(["run", "generate", "nano/generate", f"model={tmp_path}/model"]) == 2
    assert "chat_template.jinja: the chat template renders the prompt as an empty text" in capsys.readouterr().err


def test_pattern_of_a_tokenizer_without_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    write_model(tmp_path / "model", tokenizer=json.dumps(content | {"pre_tokenizer": split}))
    prompt = f"prompts=[{'a' * 60}b]"
    assert cli.main(["run", "generate", "nano/generate", f"model={tmp_path}/model", prompt]) == 2
    assert "the tokenizer fails on a text (Onig: Regex search error" in capsys.readouterr().err


def test_markup_and_control_characters_of_a_file_name_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a`<img src=x onerror=alert(7)>`b\x1b[31m\u202e.jsonl"
    rows = (BUNDLED / "tools/train.jsonl").read_text().splitlines(keepends=True)
    Path(name).write_text("".join(rows[:4]))
    config = ["nano/tools_lora", f"data.source={name}", "eval_data=null", "output_dir=out\x1b[31m"]
    assert cli.main(["run", "sft", *config, "max_steps=1", "device=cpu"]) == 0
    assert cli.main(["data", *config, "--no-color", "--html", "page.html"]) == 0
    card, page = Path("out\x1b[31m/final/README.md").read_text(), Path("page.html").read_text()
    output = "".join(capsys.readouterr())
    assert not any(character in text for text in (output, card, page) for character in "\x1b\u202e")
    assert "``a`<img src=x onerror=alert(7)>`b\\x1b[31m\\u202e.jsonl``" in card and "<img" not in page


def test_normalizer_that_multiplies_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"String": "h"}, "content": "h" * 100}
    normalizer = {"type": "Sequence", "normalizers": [replace] * 5}
    write_model(tmp_path / "model", tokenizer=json.dumps(content | {"normalizer": normalizer}))
    assert cli.main(["run", "generate", "nano/generate", f"model={tmp_path}/model", "prompts=[hi]"]) == 2
    assert "tokenizer.json: the normalizer can make a text more than 1000 times longer" in capsys.readouterr().err
