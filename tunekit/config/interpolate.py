"""Interpolation of `${key}` in configs by OmegaConf, such as `${output_dir}` and `${data.max_length}`.

OmegaConf can also call resolvers (`${oc.env:TOKEN}` reads the environment). A check before OmegaConf rejects references
that are not plain key names, cycles, and references that expand without bound.
"""

import re
from collections.abc import Iterator

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunekit.config.errors import ErrorCollector, Path
from tunekit.config.node import FAILED, YamlNode, to_node, to_plain

_OPEN = re.compile(r"(\\*)\$\{([^}]*)(\}?)")
_KEY = re.compile(r"\s*[\w-]+(?:\.[\w-]+|\[\d+\])*\s*")
_MAX_WEIGHT = 100_000  # values and characters of an expanded reference
_MAX_HOPS = 8  # length of a chain of references


def escape_references(text: str) -> str:
    """Escape `${`, so that loading returns the same text."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def resolve_references(root: YamlNode, problems: ErrorCollector) -> YamlNode:
    """Replace all references in the tree. After an error they are `FAILED`, which suppresses further errors."""
    if not _has_reference(root):
        return root
    if not ReferenceCheck(root, problems).passed():
        return _replace_references(root, FAILED)
    try:
        return _replace_references(root, OmegaConf.to_container(OmegaConf.create(to_plain(root)), resolve=True))
    except OmegaConfBaseException as error:
        problems.add(root.at, (), f"a reference cannot be resolved: {str(error).splitlines()[0]}")
        return _replace_references(root, FAILED)


def _has_reference(node: YamlNode) -> bool:
    if isinstance(node.value, str):
        return "${" in node.value
    return any(_has_reference(child) for child in node.children())


def _replace_references(node: YamlNode, value: object) -> YamlNode:
    """Replace strings that contain references. Other nodes keep their location and original text."""
    if isinstance(node.value, str) and "${" in node.value:
        return YamlNode(FAILED, node.at) if value is FAILED else to_node(value, node.at, ErrorCollector())
    if isinstance(node.value, dict):
        values = value if isinstance(value, dict) else dict.fromkeys(node.value, FAILED)
        return YamlNode({key: _replace_references(child, values[key]) for key, child in node.value.items()}, node.at)
    if isinstance(node.value, list):
        items = value if isinstance(value, list) else [FAILED] * len(node.value)
        return YamlNode(
            [_replace_references(child, item) for child, item in zip(node.value, items, strict=True)], node.at
        )
    return node


class ReferenceCheck:
    """Checks every reference once. The weight of a value is its size with all references expanded."""

    def __init__(self, root: YamlNode, problems: ErrorCollector) -> None:
        self.root, self.problems = root, problems
        self.weights: dict[Path, int] = {}
        self.open: set[Path] = set()

    def passed(self) -> bool:
        before = len(self.problems.lines)
        self.weight(self.root, (), 0)
        return len(self.problems.lines) == before

    def weight(self, node: YamlNode, path: Path, hops: int) -> int:
        if path not in self.weights:
            self.open.add(path)
            if isinstance(node.value, str):
                weight = len(node.value) + self.references(node, path, hops)
            else:
                weight = 1 + sum(self.weight(child, (*path, key), hops) for key, child in node.items())
            self.open.discard(path)
            self.weights[path] = weight
        return self.weights[path]

    def references(self, node: YamlNode, path: Path, hops: int) -> int:
        total = 0
        for key, end in find_references(node.value):
            if _KEY.fullmatch(key) and end:
                total += self.follow(node, path, key.strip(), hops + 1)
            else:
                message = f"'${{{key}{end}' is not allowed: references can only name keys, such as ${{output_dir}}"
                self.problems.add(node.at, path, message)
        if total > _MAX_WEIGHT:
            self.problems.add(node.at, path, f"references expand to more than {_MAX_WEIGHT} values")
            return 0
        return total

    def follow(self, node: YamlNode, path: Path, key: str, hops: int) -> int:
        target = split_key(key)
        current = self.root
        for part in target:
            child = get_child(current, part)
            if child is None:
                self.problems.add(node.at, path, f"${{{key}}} refers to a key that does not exist")
                return 0
            current = child
        if target in self.open:
            self.problems.add(node.at, path, f"${{{key}}} refers to itself")
            return 0
        if hops > _MAX_HOPS:
            self.problems.add(node.at, path, f"${{{key}}} is a chain of more than {_MAX_HOPS} references")
            return 0
        return self.weight(current, target, hops)


def find_references(text: str) -> Iterator[tuple[str, str]]:
    """The key and the closing brace of each reference. There may be some inside of an escaped one."""
    position = 0
    while match := _OPEN.search(text, position):
        escaped = len(match[1]) % 2
        position = match.start(2) if escaped else match.end()
        if not escaped:
            yield match[2], match[3]


def split_key(key: str) -> Path:
    """Split `a.b[0]` into a path."""
    return tuple(part for part in re.split(r"[.\[\]]", key.strip()) if part)


def get_child(node: YamlNode, part: str) -> YamlNode | None:
    """Value of a key of a mapping, or element of a list; None if it does not exist."""
    if isinstance(node.value, dict):
        return node.value.get(part)
    if isinstance(node.value, list) and part.isdecimal() and int(part) < len(node.value):
        return node.value[int(part)]
    return None


def referenced_keys(node: YamlNode) -> Iterator[Path]:
    """Keys that are referenced in `node` or below it."""
    if isinstance(node.value, str) and "${" in node.value:
        yield from (split_key(key) for key, _ in find_references(node.value) if _KEY.fullmatch(key))
    for child in node.children():
        yield from referenced_keys(child)
