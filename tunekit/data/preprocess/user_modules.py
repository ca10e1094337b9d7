"""User modules that define the classes of a config: their source hashes, and how another process imports them."""

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
    """A module, its file, and the hash of its text. File and hash are empty for code of a notebook."""

    name: str
    file: str
    text_hash: str

    @property
    def is_importable(self) -> bool:
        """Whether `import` finds the module by its name. Files given by `--import` and user recipes are not found."""
        package = self.name.partition(".")[0]
        return any(finder.find_spec(package, None) is not None for finder in sys.meta_path)

    def load(self) -> None:
        """Import the file under the module's name. Raise UserError if it has changed."""
        if hash_file(Path(self.file)) != self.text_hash:
            raise UserError(f"{self.file}: the file has changed since this command started. Run the command again.")
        import_file(self.name, Path(self.file))


def user_modules(config: Any) -> list[UserModule]:
    """User modules that define the classes of a config, and user modules that these import."""
    queue = [sys.modules[cls.__module__] for config_class in config_classes(config) for cls in config_class.__mro__]
    defining = {module.__name__ for module in queue if not is_builtin(module)}  # includes installed packages
    modules: dict[str, UserModule] = {}
    while queue:
        module = queue.pop()
        if module.__name__ not in modules and (module.__name__ in defining or is_user_module(module)):
            file = vars(module).get("__file__") or ""
            modules[module.__name__] = UserModule(module.__name__, file, hash_file(Path(file)) if file else "")
            queue += used_modules(module)
    return sorted(modules.values())


def config_classes(value: Any) -> Iterator[type]:
    """Dataclasses of a config and of its values."""
    if is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        value = [vars(value)[field.name] for field in fields(value)]
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from config_classes(item)


def used_modules(module: ModuleType) -> Iterator[ModuleType]:
    """Modules in the namespace of a module, modules of its classes and functions, and imported modules."""
    for value in vars(module).values():
        if isinstance(value, ModuleType):
            yield value
        elif isinstance(value, type | FunctionType) and value.__module__ in sys.modules:
            yield sys.modules[value.__module__]
    yield from imported_modules(module)


def imported_modules(module: ModuleType) -> Iterator[ModuleType]:
    """Modules that the source of a module imports: the namespace does not show where constants come from."""
    if not is_user_module(module) or not vars(module).get("__file__"):
        return
    package = vars(module).get("__package__") or ""
    for node in ast.walk(ast.parse(Path(vars(module)["__file__"]).read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (parent, node.module)))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from (sys.modules[name] for name in names if name in sys.modules)


def is_user_module(module: ModuleType) -> bool:
    """Whether a module is user code: not of Python, an installed package, or tunekit. Notebooks are `__main__`."""
    if module.__name__ == "__main__":
        return True
    if is_builtin(module):
        return False
    directories = Path(vars(module).get("__file__") or "").parts
    return not {"site-packages", "dist-packages"} & set(directories)


def is_builtin(module: ModuleType) -> bool:
    """Whether a module belongs to Python or to tunekit."""
    package = module.__name__.partition(".")[0]
    return package == "tunekit" or (package in sys.stdlib_module_names and package != "__main__")


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
