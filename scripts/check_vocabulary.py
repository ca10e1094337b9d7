"""Check names and prose for the banned words of vocabulary.txt.

python scripts/check_vocabulary.py [PATH ...]     # default: the whole repository

Checks names that are defined in Python, all names in C++ and JavaScript, string literals, docstrings, comments and
Markdown. Text between `<!-- vocabulary: off -->` and `<!-- vocabulary: on -->`, and lines with `vocabulary: ignore`,
are skipped. The exit code is 1 if there are hits.
"""

import ast
import functools
import io
import os
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SKIPPED_DIRS = {".git", ".venv", "build", "dist", "runs", "results", "vendor", "__pycache__", "node_modules"}
SKIPPED_FILES = {"CHANGELOG.md", "check_vocabulary.py"}
CORPUS_DIRS = {"nano"}  # string literals are training text of the bundled model
COMMENT = {".cpp": r"//(.*)", ".h": r"//(.*)", ".js": r"//(.*)", ".yaml": r"(?:^|\s)#(.*)"}
NAME = {  # outside of strings and comments, and not names of the standard library
    ".cpp": r"//.*|\"[^\"]*\"|std::\w+|\b([A-Za-z_]\w*)",
    ".js": r"//.*|\"[^\"]*\"|`[^`]*`|\.\w+|\b([A-Za-z_]\w*)",
}
NAME[".h"] = NAME[".cpp"]
NAMED_NODES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.Name, ast.Attribute)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
OFF, ON, IGNORE = "<!-- vocabulary: off -->", "<!-- vocabulary: on -->", "vocabulary: ignore"


class Patterns(NamedTuple):
    """Regular expressions with their replacements, and their union, which is faster if nothing matches."""

    pairs: list[tuple[re.Pattern[str], str]]
    union: re.Pattern[str]


class Hit(NamedTuple):
    """A banned word, its location, and the suggested replacement."""

    path: Path
    line: int
    word: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word} -> {self.replacement}"


class Vocabulary:
    """Banned words of vocabulary.txt."""

    def __init__(self, path: Path) -> None:
        sections: dict[str, dict[str, str]] = defaultdict(dict)
        section = ""
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line.strip() and not line.startswith("#"):
                words, _, replacement = line.partition(" -> ")
                sections[section] |= {word.strip(): replacement.strip() for word in words.split(" / ")}
        self.names, self.name_parts = sections["name"], sections["name-part"]
        self.spelling = compile_patterns(sections["spelling"], r"\b(?:{})\b", re.IGNORECASE)
        self.prose = compile_patterns(sections["prose"] | sections["spelling"], r"\b(?:{})\b", re.IGNORECASE)
        self.docstring_start = compile_patterns(sections["docstring-start"], r"^(?:{})\b", re.NOFLAG)

    @functools.cache  # noqa: B019 (there is one vocabulary)
    def find_replacement(self, name: str) -> str | None:
        """The replacement of an identifier; None if the identifier is allowed."""
        words = [word.lower() for word in WORD.findall(name)]
        candidates = [self.names.get(name.strip("_").lower()), *map(self.name_parts.get, words)]
        candidates += [
            replacement for pattern, replacement in self.spelling.pairs for word in words if pattern.fullmatch(word)
        ]
        return next((candidate for candidate in candidates if candidate is not None), None)


def compile_patterns(entries: dict[str, str], template: str, flags: re.RegexFlag) -> Patterns:
    pairs = [(re.compile(template.format(pattern), flags), replacement) for pattern, replacement in entries.items()]
    return Patterns(pairs, re.compile(template.format("|".join(entries)), flags))


def find_hits(root: Path, vocabulary: Vocabulary) -> Iterator[Hit]:
    """All hits in the files below `root`."""
    for path in iter_files(root) if root.is_dir() else [root]:
        if path.suffix in {".py", ".md", *COMMENT} and path.name not in SKIPPED_FILES:
            text = path.read_text("utf-8")
            ignored = {number for number, line in enumerate(text.splitlines(), 1) if IGNORE in line}
            check = check_python if path.suffix == ".py" else check_text
            yield from (hit for hit in check(text, path, vocabulary) if hit.line not in ignored)


def iter_files(root: Path) -> Iterator[Path]:
    """All files below a directory, without `SKIPPED_DIRS`."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - SKIPPED_DIRS)
        yield from (Path(directory, name) for name in sorted(names))


def check_python(text: str, path: Path, vocabulary: Vocabulary) -> Iterator[Hit]:
    nodes = [*ast.walk(ast.parse(text))]
    docstrings = {id(node) for node in iter_docstrings(nodes)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield from find_matches(vocabulary.docstring_start, node.value.strip(), node.lineno, path)
            if id(node) in docstrings or not CORPUS_DIRS.intersection(path.parts):
                yield from find_matches(vocabulary.prose, node.value, node.lineno, path)
        for name in iter_defined_names(node) if isinstance(node, NAMED_NODES) else ():
            if (replacement := vocabulary.find_replacement(name)) is not None:
                yield Hit(path, getattr(node, "lineno", 1), name, replacement)
    if any("#" in line and vocabulary.prose.union.search(line) for line in text.splitlines()):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield from find_matches(vocabulary.prose, token.string, token.start[0], path)


def iter_docstrings(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def iter_defined_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef():
            yield node.name
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if not (node.name == "tell" and len(node.args.args) == 1):  # of io.RawIOBase; vocabulary: ignore
                yield node.name
        case ast.arg():
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr


def check_text(text: str, path: Path, vocabulary: Vocabulary) -> Iterator[Hit]:
    """Markdown, the comments of YAML files, and comments and names of C++ and JavaScript files."""
    active, comment, name = True, COMMENT.get(path.suffix), NAME.get(path.suffix, r"(?!)")
    for number, line in enumerate(text.splitlines(), 1):
        active = (active or ON in line) and OFF not in line
        for word in filter(None, re.findall(name, line)) if active else ():
            if (replacement := vocabulary.find_replacement(word)) is not None:
                yield Hit(path, number, word, replacement)
        for prose in ([line] if comment is None else re.findall(comment, line)) if active else ():
            yield from find_matches(vocabulary.prose, prose, number, path)


def find_matches(patterns: Patterns, text: str, line: int, path: Path) -> Iterator[Hit]:
    for pattern, replacement in patterns.pairs if patterns.union.search(text) else ():
        for match in pattern.finditer(text):
            yield Hit(path, line + text.count("\n", 0, match.start()), " ".join(match[0].split()), replacement)


def main(paths: list[str]) -> int:
    vocabulary = Vocabulary(Path(__file__).with_name("vocabulary.txt"))
    hits = [hit for path in paths or [str(ROOT)] for hit in find_hits(Path(path), vocabulary)]
    print(*hits, f"{len(hits)} hits", sep="\n")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
