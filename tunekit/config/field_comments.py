"""What the fields of a dataclass mean: the comments beside or just above them, which readers of the source see too."""

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import is_dataclass
from functools import cache

_FOR_TOOLS = ("noqa", "type:", "pyright:", "fmt:", "ruff:")


@cache
def field_comments(cls: type) -> dict[str, str]:
    """The comment of every field that has one, inherited fields too."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            found |= _own(base)
    return found


def class_comment(cls: type) -> str:
    """The docstring on one line; empty if there is none but the one that dataclasses make up."""
    text = " ".join((cls.__doc__ or "").split())
    return "" if text.startswith(f"{cls.__name__}(") else text


def _own(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class made in a notebook or in C has no file
        return {}
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    alone = {line: text for line, text in comments.items() if lines[line - 1].lstrip().startswith("#")}
    found = {}
    for node in _body(source):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = comments.get(node.end_lineno or node.lineno, "")
            text = beside if beside and not beside.startswith(_FOR_TOOLS) else _above(alone, node.lineno)
            found |= {node.target.id: text} if text else {}
    return found


def _body(source: str) -> list[ast.stmt]:
    tree = ast.parse(source).body[0]
    return tree.body if isinstance(tree, ast.ClassDef) else []


def _above(alone: dict[int, str], line: int) -> str:
    """The comment lines that end just above `line`."""
    first = line
    while first - 1 in alone:
        first -= 1
    return " ".join(alone[i] for i in range(first, line) if not alone[i].startswith(_FOR_TOOLS))
