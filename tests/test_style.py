"""What a reader may count on: short files, short functions, and no word that hides a missing decision."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    str(path.relative_to(ROOT)): path
    for folder in ("tunekit", "recipes", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_are_short(file: str) -> None:
    text = FILES[file].read_text("utf-8")
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 40, f"{file}:{node.lineno} {node.name}"


@pytest.mark.parametrize("file", FILES)
def test_no_word_hides_a_decision(file: str) -> None:
    for node in ast.walk(ast.parse(FILES[file].read_text("utf-8"))):
        where = f"{file}:{node.lineno}" if isinstance(node, (ast.expr, ast.ExceptHandler)) else file
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", where
            assert node.func.id != "getattr" or len(node.args) == 2, where
        if isinstance(node, ast.ExceptHandler):
            names = (
                {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"Exception"}
            )
            assert not names & {"Exception", "BaseException"}, where


@pytest.mark.parametrize("file", FILES)
def test_modules_say_what_they_are_for(file: str) -> None:
    assert ast.get_docstring(ast.parse(FILES[file].read_text("utf-8")))


def test_only_the_spec_of_a_package_stands_in_its_init() -> None:
    for file, path in FILES.items():
        if path.stem == "__init__":
            body = ast.parse(path.read_text("utf-8")).body
            assert all(isinstance(node, (ast.Expr, ast.Assign)) for node in body), f"{file} holds more than a docstring"


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_passes(check: list[str]) -> None:
    pytest.importorskip("ruff")
    done = subprocess.run([sys.executable, "-m", "ruff", *check, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
