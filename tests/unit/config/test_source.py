import json
import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config, mapping
from tunekit.config.yaml_parser import read_recipe


def lines(source) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        mapping(source)
    return [*caught.value.lines]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1\nb: 2", "line 2:2: "),
        ("a: b: c", "line 1:5: "),
        (
            "a:\n\tb: 1",
            "line 2:1: ",
        ),
        (
            "a: {b: ${c}}",
            "line 1:9: ",
        ),
        ("a: 1\nb: \x07", "line 2:4: "),
        ("a: 'x", "line 1:6: "),
        ("- a", "line 1: "),
        ("c.yaml", "line 1: "),
        ("", "is empty"),
        ("# nothing\n---\n", "is empty"),
        ("a: 1\n---\nb: 2", "line 2: "),
        ("a: 1\nb:\n  c: 2\n  c: 3", r"line 4: b\.c: "),
        ("a: 1\n'a': 1", "line 2: a: "),
        ("1: a", "line 1: 1: "),
        ("a: {null: b}", r"line 1: a\.null: "),
        ("? [a]\n: b", "line 1: "),
        ("a: *b", "line 1: a: "),
        ("a: &a [*a]", r"line 1: a\.0: "),
        ("a: {<<: 3}", r"line 1: a\.<<: "),
        ("a: !!map {}", "line 1: a: "),
        ("a: !x {b: 1}", "line 1: a: "),
    ],
)
def test_invalid_yaml_error_has_its_line(text, line):
    (error,) = lines(text)
    assert re.match(line, error)


def test_yaml_tags_are_refused():
    (line,) = lines("a: !!python/object/apply:os.system [echo]")
    assert "python/object/apply:os.system' is not allowed" in line


def test_unreadable_files_are_errors(tmp_path):
    latin1_file = tmp_path / "latin.yaml"
    latin1_file.write_bytes("a: 1\nb: ä".encode("latin-1"))
    assert lines(latin1_file) == [f"{latin1_file}:2: is not UTF-8 text; save it as UTF-8"]
    assert lines(tmp_path / "no.yaml") == [f"{tmp_path / 'no.yaml'}: no such file"]
    assert lines(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]


def test_missing_file_is_the_only_error(tmp_path, tree):
    with pytest.raises(ConfigError) as caught:
        load_config(tree.SFT, tmp_path / "no.yaml", ["global_batch_size=x"])
    assert caught.value.lines == (f"{tmp_path / 'no.yaml'}: no such file",)


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 100_000, "a: " + "{b: " * 100_000, "\n".join(" " * i + "a:" for i in range(500))]
)
def test_deep_nesting_is_refused_quickly(text):
    start = time.process_time()
    (line,) = lines(text)
    assert line.endswith("nested deeper than 32 levels")
    assert time.process_time() - start < 2


def test_deep_plain_data_is_refused():
    deep: list = []
    deep.append(deep)
    assert lines({"a": deep})[0].endswith("nested deeper than 32 levels")


def test_aliases_of_aliases_are_bounded():
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    (line,) = lines(text)
    assert line.startswith("line 5: a4.")
    assert line.endswith(": the config has more than 100000 values with aliases expanded")


def test_chain_of_aliases_is_bounded():
    text = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 2000))
    assert lines(text)[0].endswith("nested deeper than 32 levels")


# JSON writes characters outside the BMP as surrogate pairs, YAML does not.
BMP_CHARACTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs",))
KEY = st.text(BMP_CHARACTERS, max_size=100)  # escapes may have six characters each, and YAML limits keys to 1,024
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(BMP_CHARACTERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEY, JSON, max_size=4))
def test_json_is_yaml(data):
    text = json.dumps(data)
    assume("${" not in text)
    assert mapping(text) == data


@pytest.mark.parametrize(
    "text",
    [
        "recipe: sft",
        "\ufeffrecipe: sft",
        "recipe : sft",
        "recipe:\n  sft",
        "a: 1\n'recipe': &name \"sft\"  # of the package",
        "name: &name sft\nrecipe: *name",
        "<<: {recipe: sft}\na: 1",
        "? recipe\n: >-\n  sft",
        "a: |\n  recipe: reward\nb: {recipe: reward}\nrecipe: sft",
        "%YAML 1.1\n---\r\nrecipe: sft\r\n",
        '{"a": "😀", "recipe": "sft"}',
        '{\n\t"recipe": "sft"\n}',
    ],
)
def test_recipe_is_read_as_all_other_keys(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode())
    assert read_recipe(file) == mapping(file)["recipe"] == "sft"


@pytest.mark.parametrize("text", ["", "a: 1", "recipe:", "# recipe: sft", "a:\n  recipe: sft", "- recipe: sft"])
def test_configs_may_name_no_recipe(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    assert read_recipe(tmp_path / "c.yaml") is None


@pytest.mark.parametrize("text", [b"recipe: 5", b"recipe: [sft]", b"a: [\nrecipe: sft", b"# caf\xe9\nrecipe: sft"])
def test_unreadable_recipe_keys_are_errors(tmp_path, text):
    (tmp_path / "c.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"^\S+c.yaml:\d"):
        read_recipe(tmp_path / "c.yaml")


def test_escaped_surrogate_pairs_are_characters(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"a": "😀 café"}))
    assert mapping(tmp_path / "c.json") == {"a": "😀 café"}
