"""Load a recipe and its validated config from command-line arguments."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tunekit.cli import registry
from tunekit.config import load
from tunekit.config.user_code import import_file
from tunekit.errors import UserError

REQUIRED_NAMES = ("CONFIG", "check", "main")


def load_recipe(word: str) -> ModuleType:
    """Import a recipe: `CONFIG` is its config class, `check` validates a config, and `main` runs it."""
    path = registry.find_recipe(word)
    shipped = path == registry.list_recipes().get(path.stem)
    module = importlib.import_module(f"tunekit.recipes.{path.stem}") if shipped else _import_user_recipe(path)
    missing = [name for name in REQUIRED_NAMES if name not in vars(module)]
    if missing:
        raise UserError(f"{path}: a recipe must define {', '.join(missing)}. Start from `tune cp sft my_sft.py`")
    return module


def load_checked_config(module: ModuleType, word: str, overrides: Sequence[str], imports: Sequence[str]) -> Any:
    """Load the recipe's config and run all checks that need no weights."""
    choice = load_recipe_config(module, word, overrides, imports)
    module.check(choice)
    return choice


def load_recipe_config(module: ModuleType, word: str, overrides: Sequence[str], imports: Sequence[str]) -> Any:
    """Load the recipe's config. Keys and values are validated; models and data are not accessed."""
    path = registry.find_config(word)
    required, name = registry.recipe_of_config(path), module.__name__.rpartition(".")[2]
    if required and required != name and module.__name__.startswith("tunekit."):
        raise UserError(f"{path}: written for the recipe '{required}', not '{name}'. Use `tune run {required} {word}`")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"'{override}': overrides must be key=value, such as seed=1")
    return load.load_config(module.CONFIG, path, overrides, [_file(item) for item in imports])


def _import_user_recipe(path: Path) -> ModuleType:
    """Import a recipe file of the user. Naming it on the command line means that the user trusts it."""
    return import_file(f"own_{path.stem}", path)


def _file(word: str) -> Path:
    if not Path(word).is_file():
        raise UserError(f"--import {word}: no such file")
    return Path(word)
