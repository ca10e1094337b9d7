"""Additional kinds from Python files of the user (`--import`). Configs cannot import code."""

import hashlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

from tunekit.config import session_code
from tunekit.config.choices import ChoiceRegistry, iter_slots, kind_name
from tunekit.config.errors import ConfigError, ErrorCollector
from tunekit.config.process_guard import ChangedProcessError, ProcessGuard
from tunekit.errors import USER_MODULES, UserError, describe_exception, is_ctrl_c

IMPORT_LOCK = threading.RLock()  # environments and rewards are loaded in threads, too


def load_user_choices(root: type, files: Sequence[Path]) -> ChoiceRegistry:
    """Import the files and register their dataclasses as kinds of the recipe's config."""
    problems = ErrorCollector()
    classes: dict[type, Path] = {}
    for file in files:
        try:
            classes |= dict.fromkeys(_classes(_import_once(file)), file)
        except ConfigError as error:
            problems.lines |= dict.fromkeys(error.lines)
    problems.check()
    if classes:  # or visiting all slots takes most of the time to load a config
        _check_classes(root, classes, problems)
        problems.check()
    return ChoiceRegistry(tuple(classes))


def _import_once(file: Path) -> ModuleType:
    """Import a file. The same content at the same path is imported only once, so that its classes stay identical."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError([f"{file}: cannot be imported: {error.strerror}"]) from error
    digest = hashlib.sha256(str(file.resolve()).encode() + b"\0" + text).hexdigest()[:16]
    name = f"tunekit_import_{file.stem}_{digest}"
    with IMPORT_LOCK:  # another thread may have imported a part of it
        if name in sys.modules:
            return sys.modules[name]
        if file.suffix != ".py":
            raise ConfigError([f"{file}: cannot be imported: not a Python file (.py)"])
        return import_file(name, file)


class UncachedSourceLoader(SourceFileLoader):
    """Loader without cached bytecode, which Python uses even after an edit within a second that keeps the file size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(name: str, file: Path) -> ModuleType:
    """Import a Python file of the user as the module `name`. Raises ConfigError, with the line, for any exception.

    It can import the other files of its directory, unless a module of another directory has the same name.
    """
    if (directory := str(file.absolute().parent)) not in sys.path:
        sys.path.append(directory)
    spec = importlib.util.spec_from_file_location(name, file, loader=UncachedSourceLoader(name, str(file.absolute())))
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while they are created
    with UserCodeErrors(file, name), ProcessGuard(lambda: str(file)):
        spec.loader.exec_module(module)
    return module


def load_attribute(reference: str, key: str) -> Any:
    """The function or class that `path.py:name` names, or a registered one. Raises UserError if there is none.

    `key` is the config key that contains the reference.
    """
    if (registered := session_code.find_object(reference)) is not None:
        return registered
    path, _, name = reference.rpartition(":")
    if not path.endswith(".py") and session_code.REFERENCE.fullmatch(reference):
        remedy = "Pass it in Python again, or write it to a file and name that as path.py:name."
        raise UserError(f"{key}: {reference} is a function of a Python session. {remedy}")
    if not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"{key}: expected path.py:name, got {reference!r}. Name a Python file and what it defines.")
    try:
        module = _import_once(Path(path))
    except ConfigError as error:
        raise UserError(f"{key}: {error.lines[0]}. Fix {path}.") from error
    if name not in vars(module):
        raise UserError(f"{key}: {path} defines no {name!r}. Set {key} to a name in that file.")
    return vars(module)[name]


def user_files() -> str:
    """Files of the user that are imported, recipes too."""
    modules = [module for name, module in sys.modules.items() if name.startswith(USER_MODULES)]
    return ", ".join(dict.fromkeys(str(module.__file__) for module in modules))


class UserCodeErrors:
    """Context manager that converts exceptions of a user's file to a ConfigError with file and line."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            return
        sys.modules.pop(self.name, None)
        if isinstance(error, ChangedProcessError):
            raise ConfigError([str(error)]) from error
        if not is_ctrl_c(error):
            problem = f"cannot be imported: {describe_exception(error)}"
            raise ConfigError([f"{self.file}:{self.line(error)}: {problem}"]) from error

    def line(self, error: BaseException) -> int:
        if (
            isinstance(error, SyntaxError)
            and error.lineno
            and Path(error.filename or "").resolve() == self.file.resolve()
        ):
            return error.lineno
        frames = traceback.extract_tb(error.__traceback__)
        lines = (f.lineno for f in reversed(frames) if Path(f.filename).resolve() == self.file.resolve())
        return next(filter(None, lines), 1)


def _classes(module: ModuleType) -> list[type]:
    """Dataclasses defined in the module, without imported ones."""
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [cls for cls in dict.fromkeys(classes) if is_dataclass(cls)]


def _check_classes(root: type, files: dict[type, Path], problems: ErrorCollector) -> None:
    """Check that kinds are unique in each union, and that their classes are frozen and override methods correctly."""
    for path, slot in iter_slots(root, ChoiceRegistry(tuple(files))):
        kinds = ChoiceRegistry().kinds(slot)
        for cls in ChoiceRegistry(tuple(files)).matching_user_classes([*kinds.values()]):
            kind, at = kind_name(cls), str(files[cls])
            if kind in kinds:
                message = f"the kind '{kind}' of {'.'.join(path)} exists already; give the class another name"
                problems.add(at, (), f"class {cls.__name__}: {message}")
            elif "__dataclass_fields__" not in vars(cls) or not cls.__dataclass_params__.frozen:
                problems.add(at, (), f"class {cls.__name__} is a choice; write @dataclass(frozen=True) above it")
            for line, message in _signature_problems(cls):
                problems.add(f"{at}:{line}", (), f"class {cls.__name__}: {message}")
            kinds[kind] = cls


def _signature_problems(cls: type) -> Iterator[tuple[int, str]]:
    """Line and message for each method that refuses the arguments of the method of tunekit that it overrides."""
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("tunekit.")]
    for name, method in vars(cls).items():
        overridden = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if name.startswith("__") or not isinstance(method, FunctionType) or not isinstance(overridden, FunctionType):
            continue
        arguments = inspect.signature(overridden).parameters
        if any(item.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for item in arguments.values()):
            continue
        try:
            inspect.signature(method, follow_wrapped=False).bind(*arguments)
        except TypeError as error:
            problem = f"{name}() is called with ({', '.join(arguments)}): {error}"
            yield method.__code__.co_firstlineno, f"{problem}. Change its arguments"
