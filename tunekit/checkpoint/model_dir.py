"""Directories of checkpoints, adapters and tokenizers, whose files are read once."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.hub.download import WEIGHT_FILES

T = TypeVar("T", bound="ModelDir")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError for a missing file, invalid JSON, or another JSON type."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: must contain a JSON object, got {type(value).__name__}")
    return value


def read_json_value(path: Path) -> Any:
    """Read JSON of any type. Raises UserError for a missing file or invalid JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error


class ModelDir:
    """Directory with a tokenizer, and the base of those with weights. Its files must not change while it is used."""

    def __init__(self, path: Path) -> None:
        self.path, self.stamps = path, read_stamps(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the small files. Raises UserError."""
        return cls(path)

    @property
    def is_current(self) -> bool:
        """Whether no file has changed since the directory was opened. Weights may have been downloaded."""
        stamps = read_stamps(self.path)
        added = stamps.keys() - self.stamps.keys()
        return self.stamps.items() <= stamps.items() and all(name.endswith(WEIGHT_FILES) for name in added)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json; empty if there is none."""
        file = self.path / "config.json"
        return read_json(file) if file.is_file() else {}

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").is_file()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.path, self.config)


class ModelDirs:
    """The directories that a config names. They stay open between its checks and the run."""

    def __init__(self) -> None:
        self.dirs: dict[tuple[type[ModelDir], Path], ModelDir] = {}

    def open(self, kind: type[T], path: Path) -> T:
        """Open a directory, unless it is open and has not changed."""
        opened = self.dirs.get((kind, path))
        if not isinstance(opened, kind) or not opened.is_current:
            opened = self.dirs[kind, path] = kind.open(path)
        return opened

    def __reduce__(self) -> tuple[type["ModelDirs"], tuple[()]]:
        return ModelDirs, ()  # other processes open them again


def read_stamps(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of all files of a directory."""
    stats = {file.name: file.stat() for file in path.glob("*") if file.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
