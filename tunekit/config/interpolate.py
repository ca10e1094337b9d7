"""Interpolation of `${key}` in configs by OmegaConf, such as `${output_dir}` and `${data.max_length}`.

OmegaConf's grammar can also call resolvers (`${oc.env:TOKEN}` reads the environment): everything that is not the plain
name of a key is refused before OmegaConf is asked, and so is what refers to itself or grows without bound.
"""

import re
from collections.abc import Iterator

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunekit.config.errors import ErrorCollector, Path
from tunekit.config.node import FAILED, YamlNode, to_node, to_plain

_OPEN = re.compile(r"(\\*)\$\{([^}]*)(\}?)")
_KEY = re.compile(r"\s*[\w-]+(?:\.[\w-]+|\[\d+\])*\s*")
_LARGEST = 100_000  # values and characters that a reference may stand for
_HOPS = 8  # references to references


def escape_references(text: str) -> str:
    """The text such that it is read back as it is, even if it holds `${`."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def resolve_references(root: YamlNode, problems: ErrorCollector) -> YamlNode:
    """The tree with all references replaced. After a mistake they are `FAILED`: no more is said of them."""
    if not _refers(root):
        return root
    if not ReferenceCheck(root, problems).passed():
        return _graft(root, FAILED)
    try:
        return _graft(root, OmegaConf.to_container(OmegaConf.create(to_plain(root)), resolve=True))
    except OmegaConfBaseException as error:
        problems.add(root.at, (), f"a reference cannot be resolved: {str(error).splitlines()[0]}")
        return _graft(root, FAILED)


def _refers(node: YamlNode) -> bool:
    if isinstance(node.value, str):
        return "${" in node.value
    return any(_refers(child) for child in node.children())


def _graft(node: YamlNode, value: object) -> YamlNode:
    """Only strings that hold a reference are replaced: the others keep their place and what was typed."""
    if isinstance(node.value, str) and "${" in node.value:
        return YamlNode(FAILED, node.at) if value is FAILED else to_node(value, node.at, ErrorCollector())
    if isinstance(node.value, dict):
        given = value if isinstance(value, dict) else dict.fromkeys(node.value, FAILED)
        return YamlNode({key: _graft(child, given[key]) for key, child in node.value.items()}, node.at)
    if isinstance(node.value, list):
        items = value if isinstance(value, list) else [FAILED] * len(node.value)
        return YamlNode([_graft(child, item) for child, item in zip(node.value, items, strict=True)], node.at)
    return node


class ReferenceCheck:
    """Follows every reference once. The weight of a value is what it would hold with its references written out."""

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
                own = len(node.value) + self.references(node, path, hops)
            else:
                own = 1 + sum(self.weight(child, (*path, key), hops) for key, child in _items(node))
            self.open.discard(path)
            self.weights[path] = own
        return self.weights[path]

    def references(self, node: YamlNode, path: Path, hops: int) -> int:
        total = 0
        for slashes, key, end in _OPEN.findall(node.value):
            if len(slashes) % 2:
                continue
            if _KEY.fullmatch(key) and end:
                total += self.follow(node, path, key.strip(), hops + 1)
            else:
                said = f"'${{{key}{end}' is refused: a config is data, it can only refer to keys, such as ${{out}}"
                self.problems.add(node.at, path, said)
        if total > _LARGEST:
            self.problems.add(node.at, path, f"the references stand for more than {_LARGEST} values")
            return 0
        return total

    def follow(self, node: YamlNode, path: Path, key: str, hops: int) -> int:
        target = parts_of(key)
        found = self.root
        for part in target:
            inner = get_child(found, part)
            if inner is None:
                self.problems.add(node.at, path, f"${{{key}}} refers to a key that does not exist")
                return 0
            found = inner
        if target in self.open:
            self.problems.add(node.at, path, f"${{{key}}} refers to itself")
            return 0
        if hops > _HOPS:
            self.problems.add(node.at, path, f"${{{key}}} is a reference through more than {_HOPS} others")
            return 0
        return self.weight(found, target, hops)


def parts_of(key: str) -> Path:
    """`a.b[0]` as a path."""
    return tuple(part for part in re.split(r"[.\[\]]", key.strip()) if part)


def get_child(node: YamlNode, part: str) -> YamlNode | None:
    """The value under a key, or an element of a list."""
    if isinstance(node.value, dict):
        return node.value.get(part)
    if isinstance(node.value, list) and part.isdecimal() and int(part) < len(node.value):
        return node.value[int(part)]
    return None


def referenced_keys(node: YamlNode) -> Iterator[Path]:
    """The keys that are referred to anywhere below."""
    if isinstance(node.value, str) and "${" in node.value:
        yield from (parts_of(key) for _, key, _ in _OPEN.findall(node.value) if _KEY.fullmatch(key))
    for child in node.children():
        yield from referenced_keys(child)


def _items(node: YamlNode) -> list[tuple[str, YamlNode]]:
    if isinstance(node.value, dict):
        return list(node.value.items())
    return [(str(i), child) for i, child in enumerate(node.value)] if isinstance(node.value, list) else []
