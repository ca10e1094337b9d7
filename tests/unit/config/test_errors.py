import contextlib
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.errors import UserError


def test_all_errors_are_reported_with_file_and_line(tmp_path, tree):
    file = tmp_path / "c.yaml"
    file.write_text("model: m\ndata:\n  source: s\n  lenght: 3\nbatch: many\nadapter: lorra\nlr: 2e-4\n")
    with pytest.raises(UserError) as caught:
        load_config(tree.SFT, file, ["data.pakc=true", "seed"])
    prefixes = (
        "command line: 'seed'",
        f"{file}:4: data.lenght: ",
        "command line: data.pakc: ",
        f"{file}:5: batch: ",
        f"{file}:6: adapter: ",
        f"{file}:7: lr: ",
        f"{file}: out: ",
    )
    lines = str(caught.value).splitlines()
    assert len(lines) == len(prefixes)
    assert all(line.startswith(prefix) for line, prefix in zip(lines, prefixes, strict=True))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("batch: 1.0", "batch: "),
        ("batch: true", "batch: "),
        ("batch: '8'", "batch: "),
        ("batch: 012", "batch: "),
        ("batch: null", "batch: "),
        ("batch: [1]", "batch: "),
        ("batch: {a: 1}", "batch: "),
        ("clip: true", "clip: "),
        ("clip: None", "clip: "),
        ("name: None", "name: "),
        ("name: 2e5", "name: "),
        ("compile: on", "compile: "),
        ("compile: No", "compile: "),
        ("compile: 1", "compile: "),
        ("dtype: bf61", "dtype: "),
        ("loss: {weights: x}", r"loss\.weights: "),
        ("log: {to: wandbb}", r"log\.to: .*'wandb'"),
        ("log: {to: {kind: wandb, projekt: x}}", r"log\.to\.projekt: .*'project'"),
        ("optimizer: {betas: [1]}", r"optimizer\.betas: "),
        ("optimizer: {betas: 0.5}", r"optimizer\.betas: .*2 elements, each a number.*\[0\.5, \.\.\.\]"),
        ("optimizer: {betas: [1, x]}", r"optimizer\.betas\.1: "),
        ("optimizer: null", "optimizer: "),
        ("optimizer: 3", "optimizer: "),
        ("optimizer: []", "optimizer: "),
        ("optimizer: {kind: 3}", r"optimizer\.kind: "),
        (
            "optimizer: {kind: AdamW}",
            r"optimizer\.kind: .*'adamw'",
        ),
        ("other: {rank: 2}", "other: "),
        ("validation: {length: 2}", r"validation\.source: "),
        ("validation: words", "validation: "),
        ("words: {a: 1}", r"words\.a: "),
        ("words: x", "words: "),
        (
            "adapter: {rank: 3}",
            r"adapter\.rank: ",
        ),
        (
            "other: {kind: lora, magnitude: true}",
            r"other\.magnitude: ",
        ),
        ("log: {batch: 3}", r"log\.batch: "),
        ("length: 3", "length: "),
        ("project: x", "project: "),
        ("wieghts: []", "wieghts: .*'loss.weights'"),
        ("data.length: 3", r"data\.length: "),
        ("log: {zzz: 3}", r"log\.zzz: "),
        ("adapter: {zzz: 3}", r"adapter\.zzz: "),
        ("adapter: {kind: lora, rank: 0}", r"adapter\.rank: "),
        ("adapter: {kind: lora, alpha: -1}", "adapter: "),
        ("loss: {parts: [{rank: 1}, {rank: 0}]}", r"loss\.parts\.1\.rank: "),
    ],
)
def test_error_is_one_line_with_the_key(errors, text, line):
    (error,) = errors(text)
    assert re.match(f"line 4: {line}", error)


def test_error_of_a_dataclass_has_the_line_of_its_key(errors):
    assert errors("adapter:\n  kind: lora\n  alpha: 2\n  rank: 0") == ["line 7: adapter.rank: must be 1 or more"]
    assert errors("adapter: lora", "adapter.rank=-1") == ["command line: adapter.rank: must be 1 or more"]


def test_invalid_value_does_not_hide_other_errors(errors):
    first, second = errors("adapter: {kind: lora, rank: 0}\nbatch: x")
    assert first == "line 4: adapter.rank: must be 1 or more" and second.startswith("line 5: batch: ")


def test_missing_key_has_the_line_of_its_mapping(errors):
    assert errors("{}", base="") == [f"{key}: is required, but missing" for key in ("model", "data", "out")]
    assert errors("out: o\nmodel: m\ndata:\n  length: 3", base="") == ["line 3: data.source: is required, but missing"]


def test_unsupported_python_objects_are_refused(tree):
    with pytest.raises(ConfigError) as caught:
        load_config(tree.Log, {"every": object(), 3: 4, "to": [{"a": b"x"}]})
    assert caught.value.lines[:3] == (
        "3: keys are text, got 3",
        "every: expected plain data, got object",
        "to.0.a: expected plain data, got bytes",
    )


KEYS = [
    "adapter",
    "kind",
    "lora",
    "rank",
    "optimizer",
    "lr",
    "log",
    "to",
    "0",
    "project",
    "words",
    "a",
    "loss",
    "parts",
    "validation",
    "source",
    "out",
    "<<",
]
TOKENS = st.sampled_from([*KEYS, *"{}[]:,-?&*!|>#'.=1\" \n", "&a", "*a", "${out}", "${", "2e-4", "null", ": ", "\n  "])
TEXTS = st.lists(TOKENS, max_size=14).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(text=TEXTS, overrides=st.lists(st.builds("{}={}".format, st.lists(st.sampled_from(KEYS)).map(".".join), TEXTS)))
def test_any_text_gives_a_config_or_a_config_error(tree, text, overrides):
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(tree.SFT, "model: m\ndata: {source: s}\nout: o\n" + text, overrides), tree.SFT)


def test_long_value_is_truncated_in_the_error(errors):
    (line,) = errors(f"batch: {'x' * 1000}")
    assert len(line) < 120
