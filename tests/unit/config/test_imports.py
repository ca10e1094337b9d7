import contextlib
import inspect
import sys

import pytest

from tunekit.config.dump import dump_yaml
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.config.user_code import load_user_choices
from tunekit.training.config import TrainConfig

USER_CLASS = """
from dataclasses import dataclass

import house


@dataclass(frozen=True)
class Mine(house.{base}):
    power: float = 2.0  # of the update


@dataclass(frozen=True)
class Unrelated:
    x: int = 1
"""


def write_file(folder, text, name="my_losses.py"):
    file = folder / name
    file.write_text(text)
    return file


def test_user_class_becomes_a_choice(tmp_path, sft, tree):
    file = write_file(tmp_path, USER_CLASS.format(base="LoRA"))
    config = sft("adapter: {kind: mine, rank: 3}", "adapter.power=3", imports=[file])
    assert vars(config.adapter) == {"rank": 3, "alpha": 16.0, "targets": "all", "power": 3.0}
    assert isinstance(config.adapter, tree.LoRA)
    assert "# of the update" in inspect.getsource(type(config.adapter))
    reloaded = load_config(tree.SFT, dump_yaml(config), imports=[file])
    assert reloaded == config


def test_user_class_for_a_field_with_one_class(tmp_path, sft):
    file = write_file(tmp_path, USER_CLASS.format(base="Rows"))
    config = sft("validation: {kind: mine, source: v}", "data.kind=mine", "data.source=t", imports=[file])
    assert [type(rows).__name__ for rows in (config.data, config.validation)] == ["Mine", "Mine"]
    assert dump_yaml(config).count("kind: mine") == 2
    assert load_config(type(config), dump_yaml(config), imports=[file]) == config


def test_subclass_of_a_common_base_is_a_choice(tmp_path):
    text = """
from dataclasses import dataclass

class Base: ...

@dataclass(frozen=True)
class A(Base): ...

@dataclass(frozen=True)
class B(Base): ...

@dataclass(frozen=True)
class Recipe:
    part: A | B = A()
"""
    write_file(tmp_path, text, "shared_base.py")
    user_code = (
        "from dataclasses import dataclass\nimport shared_base\n@dataclass(frozen=True)\nclass C(shared_base.Base): ..."
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import shared_base

        config = load_config(shared_base.Recipe, "part: c", imports=[write_file(tmp_path, user_code)])
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("shared_base")
    assert type(config.part).__name__ == "C"


def test_class_that_is_not_imported_is_unknown(tmp_path, errors):
    write_file(tmp_path, USER_CLASS.format(base="LoRA"))
    assert errors("adapter: mine") == ["line 4: adapter: unknown kind 'mine'. Available: full, lora or dora"]
    file = write_file(tmp_path, USER_CLASS.format(base="LoRA"))
    assert errors("adapter: unrelated", imports=[file]) == [
        "line 4: adapter: unknown kind 'unrelated'. Available: mine, full, lora or dora"
    ]


def test_a_config_cannot_import(errors, tmp_path):
    file = write_file(tmp_path, "raise SystemExit('run')")
    assert all("unknown" in line for line in errors(f"import: {file}\nadapter: {{kind: {file}}}"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import house\n\n1 / 0\n", "{file}:3: cannot be imported: ZeroDivisionError: division by zero"),
        ("def f(:\n", "{file}:1: cannot be imported: SyntaxError: invalid syntax"),
        ("\nimport no_such\n", "{file}:2: cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
        ("import sys\nsys.exit('no')\n", "{file}:2: cannot be imported: SystemExit: no"),
        ("import house\ndef f():\n    raise OSError('a\\nb')\nf()\n", "{file}:3: cannot be imported: b"),
    ],
)
def test_error_in_an_imported_file_has_its_line(tmp_path, errors, text, line):
    file = write_file(tmp_path, text)
    (error,) = errors(imports=[file])
    assert error.startswith(line.format(file=file)[:-1])
    assert not [
        name
        for name in sys.modules
        if "my_losses" in name and str(tmp_path) in str(vars(sys.modules[name]).get("__file__"))
    ]


def test_invalid_import_paths_are_errors(tmp_path, errors):
    text = write_file(tmp_path, "", "a.txt")
    assert errors(imports=[tmp_path / "no.py", tmp_path, text]) == [
        f"{tmp_path / 'no.py'}: cannot be imported: No such file or directory",
        f"{tmp_path}: cannot be imported: Is a directory",
        f"{text}: cannot be imported: not a Python file (.py)",
    ]


def test_existing_kind_is_an_error(tmp_path, errors):
    file = write_file(tmp_path, USER_CLASS.format(base="LoRA").replace("Mine", "DoRA"))
    assert errors(imports=[file]) == [
        f"{file}: class DoRA: the kind 'dora' of adapter exists already; give the class another name",
        f"{file}: class DoRA: the kind 'dora' of other exists already; give the class another name",
    ]
    other = write_file(tmp_path, USER_CLASS.format(base="WandB"), "other.py")
    third = write_file(tmp_path, USER_CLASS.format(base="TensorBoard"), "third.py")
    assert errors(imports=[other, third]) == [
        f"{third}: class Mine: the kind 'mine' of log.to.0 exists already; give the class another name"
    ]


@pytest.mark.parametrize(
    ("base", "method", "problem"),
    [
        ("AdamWConfig", "build(self, groups)", r"build\(\) is called with \(self, trained, inner\): too many"),
        (
            "LRSchedulerConfig",
            "decay_factor(self, step, total)",
            r"decay_factor\(\) .*\(self, done\): missing.*'total'",
        ),
        ("LRSchedulerConfig", "decay_factor(self, *args)", None),
        ("AdamWConfig", "build(self, trained, inner=(), extra=1)", None),
        (
            "AdamWConfig",
            "curve(self, step): ...\n@dataclass(frozen=True)\nclass Other(Mine):\n    def curve(self)",
            None,
        ),
    ],
)
def test_signature_of_an_overridden_method_is_checked(tmp_path, base, method, problem):
    text = f"from tunekit.optim.config import {base}\nfrom dataclasses import dataclass\n"
    file = write_file(tmp_path, f"{text}@dataclass(frozen=True)\nclass Mine({base}):\n    def {method}: ...\n")
    with contextlib.nullcontext() if problem is None else pytest.raises(ConfigError, match=rf"py:5: class .*{problem}"):
        load_user_choices(TrainConfig, [file])


def test_missing_decorator_is_an_error(tmp_path, errors):
    file = write_file(tmp_path, "import house\nclass Mine(house.LoRA):\n    power: float = 2.0\n")
    assert errors(imports=[file]) == [f"{file}: class Mine is a choice; write @dataclass(frozen=True) above it"]
