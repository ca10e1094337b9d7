"""A person's own modules behind a choice: what they say now, and how another process comes by them."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from tunekit.errors import UserError


class Own(NamedTuple):
    """A module, its file and the hash of its text; the two are empty for what was typed into a notebook."""

    name: str
    file: str
    text: str

    @property
    def findable(self) -> bool:
        """Whether `import` finds it by its name; files that came by `--import` and own recipes are not found."""
        top = self.name.partition(".")[0]
        return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)

    def load(self) -> None:
        """Have the module under its name, from the text that was meant."""
        if text(Path(self.file)) != self.text:
            raise UserError(f"{self.file}: has changed since this command began; start it again")
        spec = importlib.util.spec_from_file_location(self.name, self.file)
        assert spec is not None and spec.loader is not None, self.file
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.name] = module  # dataclasses look their own module up there
        spec.loader.exec_module(module)


def modules(choice: Any) -> list[Own]:
    """The modules that a choice's classes are from, and those of which these use a module, a class or a function."""
    waiting = [sys.modules[cls.__module__] for kind in kinds(choice) for cls in kind.__mro__]
    found: dict[str, Own] = {}
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found and is_own(module):
            file = vars(module).get("__file__") or ""
            found[module.__name__] = Own(module.__name__, file, text(Path(file)) if file else "")
            waiting += used(module)
    return sorted(found.values())


def kinds(value: Any) -> Iterator[type]:
    """The classes of a choice and of what stands in it."""
    if is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        value = [vars(value)[field.name] for field in fields(value)]
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from kinds(inner)


def used(module: ModuleType) -> Iterator[ModuleType]:
    for value in vars(module).values():
        if isinstance(value, ModuleType):
            yield value
        elif isinstance(value, type | FunctionType) and value.__module__ in sys.modules:
            yield sys.modules[value.__module__]


def is_own(module: ModuleType) -> bool:
    """Neither Python's, nor an installed package's, nor tunekit's. What is typed into a notebook is of `__main__`."""
    top = module.__name__.partition(".")[0]
    if top == "__main__":
        return True
    if top == "tunekit" or top in sys.stdlib_module_names:
        return False
    parts = Path(vars(module).get("__file__") or "").parts
    return not {"site-packages", "dist-packages"} & set(parts)


def text(file: Path) -> str:
    """The hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
