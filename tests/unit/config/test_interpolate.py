import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tunekit.config.interpolate import escape_references
from tunekit.config.load import load_config, mapping


def test_references_keep_their_type(sft, tree):
    text = "validation: {source: 'x-${data.source}', length: '${batch}'}\nbatch: 3\ndtype: fp32\n"
    text += "name: ${out}/${dtype}-${batch}"
    config = sft(text, "size='${validation.length}'")
    assert (config.validation, config.name, config.size) == (tree.Rows("x-s", 3), "o/fp32-3", 3)


def test_reference_to_a_mapping(sft, tree):
    assert sft("validation: ${data}").validation == tree.Rows("s")
    assert sft("log: {to: [wandb, '${log.to[0]}', '${log.to.0}']}").log.to == (tree.WandB(),) * 3


def test_reference_to_an_omitted_key_is_its_default(sft, tree):
    config = sft(
        "validation: {source: v, length: '${data.length}'}\nclip: ${optimizer.lr}\nadapter: lora\nsize: ${adapter.rank}"
    )
    assert (config.validation, config.clip, config.size) == (tree.Rows("v", 2048), 3e-4, 8)
    assert (config.adapter, config.optimizer) == (tree.LoRA(), tree.AdamW(3e-4))


def test_overrides_are_applied_before_references(sft):
    assert sft("name: ${out}/x", "out=y").name == "y/x"
    assert sft("", "name=${out}/x").name == "o/x"


def test_reference_to_the_recipe(sft):
    assert sft("recipe: sft\nname: runs/${recipe}").name == "runs/sft"


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "a ${oc.env:HOME,x}",
        "${ oc.env:HOME}",
        "${oc.decode:'1'}",
        "${${name}:HOME}",
        "${oc.${x}:HOME}",
    ]
    + ["${a", "${}", "${.out}", "${words.*}"],
)
def test_resolvers_are_refused(errors, monkeypatch, text):
    monkeypatch.setenv("HOME", "secret")
    (line,) = errors(f"words: {{out: oc.env, a: '{text.replace(chr(39), chr(39) * 2)}'}}")
    assert line.startswith("line 4: words.a: '${")
    assert line.endswith("is not allowed: references can only name keys, such as ${output_dir}")
    assert "secret" not in line


def test_registered_resolvers_are_not_called(errors):
    called = []
    OmegaConf.register_resolver("tunekit_test", lambda: called.append(1), replace=True)
    try:
        errors("name: ${tunekit_test:}")
    finally:
        OmegaConf.clear_resolver("tunekit_test")
    assert not called


def test_reference_inside_an_escaped_one_cannot_read_the_environment(errors):
    (line,) = errors(r"name: \${a${oc.env:HOME}}")
    assert "'${oc.env:HOME}' is not allowed" in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: ${nope}", "name: ${nope} refers to a key that does not exist"),
        ("name: ${data.lenght}", "name: ${data.lenght} refers to a key that does not exist"),
        ("name: ${adapter.rank}", "name: ${adapter.rank} refers to a key that does not exist"),
        ("name: ${validation.source}", "name: ${validation.source} refers to a key that does not exist"),
        ("name: ${name}", "name: ${name} refers to itself"),
        ("words: {a: '${words}'}", "words.a: ${words} refers to itself"),
        ("words: {a: '${words.b}', b: '${words.a}'}", "words.b: ${words.a} refers to itself"),
    ],
)
def test_invalid_references_are_errors(errors, text, line):
    first, second = errors(text + "\nbatch: x")
    assert first == f"line 4: {line}" and second.startswith("line 5: batch: ")


def test_references_are_bounded(errors):
    start = time.process_time()
    doubling = ", ".join(f"k{i}: '${{words.k{i + 1}}}${{words.k{i + 1}}}'" for i in range(30))
    assert any("chain of more than 8 references" in line for line in errors(f"words: {{{doubling}, k30: x}}"))
    wide = ", ".join(f"k{i}: '{f'${{words.k{i + 1}}}' * 50}'" for i in range(5))
    assert any("more than 100000 values" in line for line in errors(f"words: {{{wide}, k5: x}}"))
    long = ", ".join(f"k{i}: '${{words.k{i + 1}}}'" for i in range(5000))
    assert any("chain of more than 8 references" in line for line in errors(f"words: {{{long}, k5000: x}}"))
    assert time.process_time() - start < 10


def test_wrong_type_of_a_reference_has_the_line_of_the_reference(errors):
    (error,) = errors("batch: ${out}")
    assert error.startswith("line 4: batch: ")


def test_escaped_reference_is_text():
    assert mapping(r"a: \${b}") == {"a": "${b}"}


@given(st.text(st.sampled_from("\\${}ab.:'\" ")) | st.text())
def test_escaped_text_is_read_back(text):
    assert OmegaConf.to_container(OmegaConf.create({"a": escape_references(text) + ""}), resolve=True) == {"a": text}
    assert mapping({"a": escape_references(text)}) == {"a": text}


def test_omegaconf_syntax_in_data_is_text(tree):
    assert load_config(tree.SFT, {"model": "???", "data": {"source": "s"}, "out": "${data.source}"}).model == "???"
