"""Documentation of dataclass fields, read from the comments after or directly above them in the source."""

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import is_dataclass
from functools import cache

_TOOL_COMMENTS = ("noqa", "type:", "pyright:", "fmt:", "ruff:")


@cache
def field_comments(cls: type) -> dict[str, str]:
    """Comments of the fields that have one, including inherited fields."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            comments |= _class_field_comments(base)
    return comments


def class_comment(cls: type) -> str:
    """Docstring on one line; empty if there is none or only the one that `dataclass` generates."""
    text = " ".join((cls.__doc__ or "").split())
    return "" if text.startswith(f"{cls.__name__}(") else text


def _class_field_comments(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class defined in a notebook or in C has no file
        return {}
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    comment_lines = {line: text for line, text in comments.items() if lines[line - 1].lstrip().startswith("#")}
    field_texts = {}
    tree = ast.parse(source).body[0]
    for node in tree.body if isinstance(tree, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            trailing = comments.get(node.end_lineno or node.lineno, "")
            text = (
                trailing
                if trailing and not trailing.startswith(_TOOL_COMMENTS)
                else _comment_above(comment_lines, node.lineno)
            )
            field_texts |= {node.target.id: text} if text else {}
    return field_texts


def _comment_above(comment_lines: dict[int, str], line: int) -> str:
    """Comment lines directly above `line`."""
    first = line
    while first - 1 in comment_lines:
        first -= 1
    return " ".join(comment_lines[i] for i in range(first, line) if not comment_lines[i].startswith(_TOOL_COMMENTS))
