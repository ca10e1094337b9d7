import contextlib

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
    assert str(caught.value).splitlines() == [
        "command line: 'seed' has no '='; write key=value",
        f"{file}:4: data.lenght: unknown key, did you mean 'length'?",
        "command line: data.pakc: unknown key, did you mean 'pack'?",
        f"{file}:5: batch: expected a whole number, got 'many'",
        f"{file}:6: adapter: unknown kind 'lorra', did you mean 'lora'? there is full, lora or dora",
        f"{file}:7: lr: unknown key: 'lr' is a key of optimizer: write optimizer.lr",
        f"{file}: out: is required, but missing",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("batch: 1.0", "batch: expected a whole number, got 1.0; write 1"),
        ("batch: true", "batch: expected a whole number, got true"),
        ("batch: '8'", "batch: expected a whole number, got '8'"),
        ("batch: 012", "batch: expected a whole number, got '012'"),
        ("batch: null", "batch: expected a whole number, got null"),
        ("batch: [1]", "batch: expected a whole number, got a list"),
        ("batch: {a: 1}", "batch: expected a whole number, got a mapping"),
        ("clip: true", "clip: expected a number or null, got true"),
        ("clip: None", "clip: expected a number or null, got 'None'; write null for nothing"),
        ("name: None", "name: expected text or null, got 'None'; write null for nothing"),
        ("name: 2e5", "name: expected text or null, got 200000.0; put text in quotes: '2e5'"),
        ("compile: on", "compile: expected true or false, got 'on'; write true"),
        ("compile: No", "compile: expected true or false, got 'No'; write false"),
        ("compile: 1", "compile: expected true or false, got 1"),
        ("dtype: bf61", "dtype: expected one of 'bf16', 'fp32', got 'bf61'"),
        ("loss: {weights: x}", "loss.weights: expected a list of a number, got 'x'; a list is written [x]"),
        ("log: {to: wandbb}", "log.to: unknown kind 'wandbb', did you mean 'wandb'? there is tensorboard or wandb"),
        ("log: {to: {kind: wandb, projekt: x}}", "log.to.projekt: unknown key, did you mean 'project'?"),
        ("optimizer: {betas: [1]}", "optimizer.betas: expected a list of 2, got 1 elements"),
        ("optimizer: {betas: [1, x]}", "optimizer.betas.1: expected a number, got 'x'"),
        ("optimizer: null", "optimizer: expected adamw or sgd, got null"),
        ("optimizer: 3", "optimizer: expected adamw or sgd, got 3"),
        ("optimizer: []", "optimizer: expected adamw or sgd, got a list"),
        ("optimizer: {kind: 3}", "optimizer.kind: unknown kind '3'; there is adamw or sgd"),
        (
            "optimizer: {kind: AdamW}",
            "optimizer.kind: unknown kind 'AdamW', did you mean 'adamw'? there is adamw or sgd",
        ),
        ("other: {rank: 2}", "other: no kind is given; write `kind:` with one of lora, dora"),
        ("validation: {length: 2}", "validation.source: is required, but missing"),
        ("validation: words", "validation: expected keys of rows or null, got 'words'"),
        ("words: {a: 1}", "words.a: expected text, got 1; put text in quotes: '1'"),
        ("words: x", "words: expected a mapping, got 'x'"),
        (
            "adapter: {rank: 3}",
            "adapter.rank: unknown key: 'rank' belongs to lora, dora; the kind here is full: name another",
        ),
        (
            "other: {kind: lora, magnitude: true}",
            "other.magnitude: unknown key: 'magnitude' belongs to dora; the kind here is lora: name another",
        ),
        ("log: {batch: 3}", "log.batch: unknown key: 'batch' is a key of the top level: write batch"),
        ("length: 3", "length: unknown key: 'length' is a key of data and validation: write data.length"),
        ("project: x", "project: unknown key: 'project' is a key of log.to.0: write log.to.0.project"),
        ("wieghts: []", "wieghts: unknown key, did you mean 'loss.weights'?"),
        ("data.length: 3", "data.length: unknown key: in YAML, write `data:` and below it, indented, `length:`"),
        ("log: {zzz: 3}", "log.zzz: unknown key; the keys here are every and to"),
        ("adapter: {zzz: 3}", "adapter.zzz: unknown key; there are no keys here"),
        ("adapter: {kind: lora, rank: 0}", "adapter.rank: must be 1 or more"),
        ("adapter: {kind: lora, alpha: -1}", "adapter: alpha is negative"),
        ("loss: {parts: [{rank: 1}, {rank: 0}]}", "loss.parts.1.rank: must be 1 or more"),
    ],
)
def test_error_is_one_line_with_the_key(errors, text, line):
    assert errors(text) == [f"line 4: {line}"]


def test_error_of_a_dataclass_has_the_line_of_its_key(errors):
    assert errors("adapter:\n  kind: lora\n  alpha: 2\n  rank: 0") == ["line 7: adapter.rank: must be 1 or more"]
    assert errors("adapter: lora", "adapter.rank=-1") == ["command line: adapter.rank: must be 1 or more"]


def test_invalid_value_does_not_hide_other_errors(errors):
    assert errors("adapter: {kind: lora, rank: 0}\nbatch: x") == [
        "line 4: adapter.rank: must be 1 or more",
        "line 5: batch: expected a whole number, got 'x'",
    ]


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
