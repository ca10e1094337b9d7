"""Style rules that ruff and pyright do not check. One test per rule."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for package in ("tunekit", "recipes", "kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
}
CPP = {path.name: path.read_text("utf-8") for pattern in ("*.cpp", "*.h") for path in (ROOT / "kernels").glob(pattern)}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def trees() -> dict[str, ast.Module]:
    return {file: ast.parse(text) for file, text in SOURCES.items()}


def nodes(*types: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for file, tree in trees().items():
        yield from ((file, node) for node in ast.walk(tree) if isinstance(node, types))


def test_files_have_at_most_500_lines() -> None:
    assert not [file for file, text in (SOURCES | CPP).items() if text.count("\n") > 500]


def test_lines_of_cpp_have_at_most_120_columns() -> None:
    """Ruff checks those of Python."""
    assert not [f"{file}: {line}" for file, text in CPP.items() for line in text.splitlines() if len(line) > 120]


def test_functions_have_at_most_40_lines() -> None:
    """Except the training loops: each is read from top to bottom in its recipe."""
    long = [
        f"{file}:{node.lineno} {node.name}"
        for file, node in nodes(*FUNCTIONS)
        if node.end_lineno - node.lineno >= 40 and not (file.startswith("recipes/") and node.name == "train")
    ]
    assert not long


def test_recipes_are_short() -> None:
    """Training recipes, which have a training loop, have at most 120 lines, the others 170."""
    recipes = {file: text for file, text in SOURCES.items() if file.startswith("recipes/")}
    limits = {file: 120 if "loop.start(" in text else 170 for file, text in recipes.items()}
    assert sum(limit == 120 for limit in limits.values()) == 7
    assert not {file for file, text in recipes.items() if text.count("\n") > limits[file]}


def test_no_hasattr_and_no_getattr_with_default() -> None:
    calls = [
        f"{file}:{node.lineno}"
        for file, node in nodes(ast.Call)
        if isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) != 2))
    ]
    assert not calls


def test_no_handler_catches_every_exception() -> None:
    broad = [
        f"{file}:{node.lineno}"
        for file, node in nodes(ast.ExceptHandler)
        if node.type is None
        or {"Exception", "BaseException"} & {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
    ]
    assert not broad


def test_modules_have_docstrings() -> None:
    assert not [file for file, tree in trees().items() if not ast.get_docstring(tree)]


def test_packages_export_nothing() -> None:
    """An `__init__.py` has a docstring, and constants at most. That of tunekit has the names of the Python API."""
    files = [file for file in trees() if file.endswith("__init__.py") and file != "tunekit/__init__.py"]
    inits = {file: trees()[file].body for file in files}
    assert not [file for file, body in inits.items() if not all(isinstance(n, (ast.Expr, ast.Assign)) for n in body)]


def test_vocabulary() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/check_vocabulary.py", ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_passes(check: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "ruff", *check, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
