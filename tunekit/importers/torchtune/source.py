"""The text of a torchtune config: commands in its comments, overrides, and interpolations."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.errors import UserError
from tunekit.importers.foreign_keys import parse_argument

COMPONENT = "_component_"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
COMPONENT_STARTS = ("torchtune.", "torch.optim.", "bitsandbytes.", "torchao.")
MAX_DEPTH = 20  # of references to references


class Header(NamedTuple):
    """The comments of a config: models by their directory, and the command that runs it."""

    downloads: dict[str, str]
    recipe: str | None
    num_devices: int | None


def read_header(text: str) -> Header:
    """Commands `tune download` and `tune run` in the comments of a config."""
    comments = "\n".join(line.lstrip("# ") for line in text.splitlines() if line.lstrip().startswith("#"))
    comments = re.sub(r"\\\s*\n\s*", " ", comments)
    downloads = {}
    for match in re.finditer(r"^\s*tune download ([\w./-]+)(.*)$", comments, re.M):
        directory = re.search(r"--output-dir[ =](\S+)", match[2])
        downloads[clean_path(directory[1] if directory else f"/tmp/{match[1].rpartition('/')[2]}")] = match[1]
    runs = [read_run(match[1]) for match in re.finditer(r"^\s*(?:torchrun.*)?tune run (.+)$", comments, re.M)]
    # The last command is that of this config: a distillation config shows first how its teacher is trained.
    recipe, num_devices = runs[-1] if runs else (None, None)
    return Header(downloads, recipe, num_devices)


def read_run(words: str) -> tuple[str | None, int | None]:
    """Recipe and number of devices of the arguments of `tune run`."""
    counts = {name: int(number) for name, number in re.findall(r"--(nproc[_-]per[_-]node|nnodes)[ =](\d+)", words)}
    nodes = counts.pop("nnodes", 1)
    devices = next(iter(counts.values()), None)
    recipe = re.search(r"([\w./-]+)\s+--config", words)
    return recipe[1] if recipe else None, None if devices is None else nodes * devices


def clean_path(path: str) -> str:
    """A directory without quotes and a final slash, to compare it with others."""
    return path.strip("\"'").rstrip("/")


def apply_overrides(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `key=value`, `component=dotted.path` and `~key` in place, as torchtune does."""
    for word in overrides:
        name, equals, text = word.partition("=")
        if word.startswith("~"):
            remove(config, word[1:])
        elif not equals:
            raise UserError(f"'{word}': overrides must be key=value or ~key, such as epochs=1.")
        else:
            value = parse_argument(text)
            is_dotted = isinstance(value, str) and value.startswith(COMPONENT_STARTS) and "." not in name
            is_component = isinstance(config.get(name), Mapping) and COMPONENT in config[name]
            put(
                config, f"{name}.{COMPONENT}" if is_dotted or (is_component and isinstance(value, str)) else name, value
            )


def remove(config: dict[str, Any], dotted: str) -> None:
    *sections, name = dotted.split(".")
    node: Any = config
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or name not in node:
        raise UserError(f"'~{dotted}': the config has no key {dotted!r}. Remove this override.")
    del node[name]


def put(config: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, name = dotted.split(".")
    node = config
    for section in sections:
        child = node.get(section)
        node[section] = node = child if isinstance(child, dict) else {}
    node[name] = value


def resolve(config: dict[str, Any]) -> list[str]:
    """Replace `${key}` in place. Returns references that cannot be resolved, which stay as they are."""
    unresolved: list[str] = []

    def replace(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: replace(child, depth) for key, child in value.items()}
        if isinstance(value, list):
            return [replace(child, depth) for child in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if match := REFERENCE.fullmatch(value):
            exists, target = find(config, match[1])
            if exists and depth < MAX_DEPTH:
                return replace(target, depth + 1)
            unresolved.append(value)
            return value
        text = REFERENCE.sub(lambda match: str(replace(match[0], depth)), value)
        if "${" in text and text not in unresolved:
            unresolved.append(text)
        return text

    for key in config:
        config[key] = replace(config[key])
    return unresolved


def find(config: Mapping[str, Any], dotted: str) -> tuple[bool, Any]:
    """Whether a dotted key exists, and its value."""
    node: Any = config
    for name in dotted.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False, None
        node = node[name]
    return True, node
