"""Triton kernels in the source code of tunekit, and which of them are not compiled.

The source is parsed, not imported: functions that a decorator such as `triton.autotune` wraps, functions that are
defined inside other functions, and modules that are not in `LAUNCHES` are included.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
PACKAGE = "tunekit.kernels"


def list_kernels(directory: Path = KERNELS) -> dict[str, set[str]]:
    """Functions that Triton compiles, by "module.name", with the names of the functions that each may call.

    A use of `triton.jit` other than as a decorator is listed as "module:line", which never counts as compiled.
    """
    kernels: dict[str, set[str]] = {}
    for file in sorted(directory.rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        imports = read_imports(tree)
        decorators: set[ast.AST] = set()
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            if jit_nodes := {node for d in function.decorator_list for node in find_jit(d, imports)}:
                decorators |= jit_nodes
                kernels.setdefault(f"{file.stem}.{function.name}", set()).update(
                    find_references(function, file, imports)
                )
        kernels |= {f"{file.stem}:{node.lineno}": set() for node in find_jit(tree, imports) if node not in decorators}
    return kernels


def read_imports(tree: ast.AST) -> dict[str, str]:
    """Full names of the imports of a file, by local name."""
    imports = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, [PACKAGE if node.level else "", node.module]))
            imports |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
    return imports


def resolve_name(node: ast.AST, imports: dict[str, str]) -> str:
    """Full name of `name` or `module.name`, or an empty string."""
    if isinstance(node, ast.Name):
        return imports.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (parent := resolve_name(node.value, imports)):
        return f"{parent}.{node.attr}"
    return ""


def find_jit(tree: ast.AST, imports: dict[str, str]) -> Iterator[ast.AST]:
    """Uses of `triton.jit`, by any import name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and resolve_name(node, imports) in (
            "triton.jit",
            "triton.runtime.jit",
        ):
            yield node


def find_references(function: ast.FunctionDef, file: Path, imports: dict[str, str]) -> set[str]:
    """Functions of the same file and of other kernel modules that a function refers to, as "module.name"."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    local = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {resolve_name(node, imports) for node in nodes} - local
    return {name.removeprefix(f"{PACKAGE}.") if "." in name else f"{file.stem}.{name}" for name in names if name}


def find_uncovered(compiled: Iterable[str], directory: Path = KERNELS) -> list[str]:
    """Kernels of a directory that are neither compiled nor called by those that are, as "module.name"."""
    kernels = list_kernels(directory)
    reached: set[str] = set()
    pending = set(compiled) & set(kernels)
    while pending:
        reached |= pending
        pending = {name for kernel in pending for name in kernels[kernel] if name in kernels} - reached
    return sorted(set(kernels) - reached)
