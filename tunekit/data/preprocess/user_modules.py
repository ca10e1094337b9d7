"""A person's own modules behind a choice: what they say now, and how another process comes by them."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from tunekit.config.user_code import import_file
from tunekit.errors import UserError


class UserModule(NamedTuple):
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
        if hash_file(Path(self.file)) != self.text:
            raise UserError(f"{self.file}: has changed since this command began; start it again")
        import_file(self.name, Path(self.file))


def user_modules(choice: Any) -> list[UserModule]:
    """The modules that a choice's classes are from, and those that these import or use something of."""
    waiting = [sys.modules[cls.__module__] for kind in kinds(choice) for cls in kind.__mro__]
    first = {module.__name__ for module in waiting if not known(module)}  # an installed package's too
    found: dict[str, UserModule] = {}
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found and (module.__name__ in first or is_own(module)):
            file = vars(module).get("__file__") or ""
            found[module.__name__] = UserModule(module.__name__, file, hash_file(Path(file)) if file else "")
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
    yield from imported(module)


def imported(module: ModuleType) -> Iterator[ModuleType]:
    """What a module's own text imports, wherever: a string or a number does not tell which module it is from."""
    if not is_own(module) or not vars(module).get("__file__"):
        return
    package = vars(module).get("__package__") or ""
    for node in ast.walk(ast.parse(Path(vars(module)["__file__"]).read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from (sys.modules[name] for name in names if name in sys.modules)


def is_own(module: ModuleType) -> bool:
    """Neither Python's, nor an installed package's, nor tunekit's. What is typed into a notebook is of `__main__`."""
    if module.__name__ == "__main__":
        return True
    if known(module):
        return False
    parts = Path(vars(module).get("__file__") or "").parts
    return not {"site-packages", "dist-packages"} & set(parts)


def known(module: ModuleType) -> bool:
    """Python's or tunekit's."""
    top = module.__name__.partition(".")[0]
    return top == "tunekit" or (top in sys.stdlib_module_names and top != "__main__")


def hash_file(file: Path) -> str:
    """The hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
