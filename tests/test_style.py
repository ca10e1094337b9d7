"""Style rules for the library: short files and functions, no hasattr, no getattr defaults, no broad except clauses."""

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
def test_files_and_functions_are_within_length_limits(file: str) -> None:
    text = FILES[file].read_text("utf-8")
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 40, f"{file}:{node.lineno} {node.name}"


@pytest.mark.parametrize("file", FILES)
def test_no_hasattr_no_getattr_default_no_bare_except(file: str) -> None:
    for node in ast.walk(ast.parse(FILES[file].read_text("utf-8"))):
        location = f"{file}:{node.lineno}" if isinstance(node, (ast.expr, ast.ExceptHandler)) else file
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", location
            assert node.func.id != "getattr" or len(node.args) == 2, location
        if isinstance(node, ast.ExceptHandler):
            names = (
                {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"Exception"}
            )
            assert not names & {"Exception", "BaseException"}, location


@pytest.mark.parametrize("file", FILES)
def test_modules_have_docstrings(file: str) -> None:
    assert ast.get_docstring(ast.parse(FILES[file].read_text("utf-8")))


def test_init_files_contain_only_docstrings_and_assignments() -> None:
    for file, path in FILES.items():
        if path.stem == "__init__":
            body = ast.parse(path.read_text("utf-8")).body
            assert all(isinstance(node, (ast.Expr, ast.Assign)) for node in body), (
                f"{file} contains more than docstring and assignments"
            )


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_passes(check: list[str]) -> None:
    pytest.importorskip("ruff")
    result = subprocess.run([sys.executable, "-m", "ruff", *check, ROOT], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
