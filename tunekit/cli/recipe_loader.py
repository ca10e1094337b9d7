"""From two words of the command line to a recipe and a checked config."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tunekit.cli import registry
from tunekit.config import load
from tunekit.config.user_code import import_file
from tunekit.errors import UserError

PARTS = ("CONFIG", "check", "main")


def load_recipe(word: str) -> ModuleType:
    """The module of a recipe: `CONFIG` is the class of its config, `check` looks at one closely, `main` runs it."""
    path = registry.find_recipe(word)
    shipped = path == registry.list_recipes().get(path.stem)
    module = importlib.import_module(f"tunekit.recipes.{path.stem}") if shipped else _own(path)
    lacks = [part for part in PARTS if part not in vars(module)]
    if lacks:
        raise UserError(f"{path} is no recipe: it lacks {', '.join(lacks)}; start from `tune cp sft my_sft.py`")
    return module


def load_checked_config(module: ModuleType, word: str, overrides: Sequence[str], imports: Sequence[str]) -> Any:
    """The recipe's config, with everything checked that can be checked before weights are read."""
    choice = load_recipe_config(module, word, overrides, imports)
    module.check(choice)
    return choice


def load_recipe_config(module: ModuleType, word: str, overrides: Sequence[str], imports: Sequence[str]) -> Any:
    """The recipe's config: its words make sense, what they name was not looked at."""
    path = registry.find_config(word)
    wanted, name = registry.recipe_of_config(path), module.__name__.rpartition(".")[2]
    if wanted and wanted != name and module.__name__.startswith("tunekit."):
        raise UserError(f"{path} is written for the recipe '{wanted}', not '{name}': tune run {wanted} {word}")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"'{override}' is no override: write key=value, such as seed=1")
    return load.load_config(module.CONFIG, path, overrides, [_file(item) for item in imports])


def _own(path: Path) -> ModuleType:
    """Run a recipe of the user, who typed its name and so trusts it."""
    return import_file(f"own_{path.stem}", path)


def _file(word: str) -> Path:
    if not Path(word).is_file():
        raise UserError(f"--import {word}: no such file")
    return Path(word)
