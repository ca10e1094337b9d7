"""Load a recipe and its validated config from command-line arguments."""

import argparse
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from tunekit.cli import registry
from tunekit.config import load
from tunekit.config.choices import ChoiceRegistry, iter_slots
from tunekit.config.errors import ConfigError
from tunekit.config.overrides import KeywordValues
from tunekit.config.user_code import import_file
from tunekit.config.yaml_parser import read_recipe
from tunekit.errors import UserError
from tunekit.importers.imported import import_hint
from tunekit.system import imports_without_gc

REQUIRED_NAMES = ("CONFIG", "check", "main")


@runtime_checkable
class ContinuesAdapter(Protocol):
    """A config of a training recipe, whose `model` may be an adapter or a finished run."""

    def continue_adapter(self) -> "ContinuesAdapter":
        """The config that continues the training of this adapter, if an adapter is trained."""
        ...


def find_config_and_recipe(args: argparse.Namespace) -> tuple[Path, str]:
    """File of the config, and the recipe that `--recipe` or the config names."""
    if args.overrides and "=" not in args.overrides[0] and not registry.is_config(args.config):
        args.recipe, args.config, *args.overrides = args.config, *args.overrides  # as in `tune run RECIPE CONFIG`
    path = registry.find_config(args.config)
    recipe = args.recipe or read_recipe(path)
    if recipe is None:
        if hint := import_hint(path):
            raise UserError(hint)
        command = f"tune run sft {args.config}"
        raise UserError(f"{path}: missing recipe. Add a line 'recipe: sft', or pass --recipe sft (run: `{command}`)")
    if args.recipe is None and recipe.endswith(".py"):  # a config cannot run code
        command = f"tune run {recipe} {args.config}"
        raise UserError(f"{path}: recipe: must be a name, got the file {recipe!r}. Run it with: {command}")
    return path, recipe


def load_recipe(word: str) -> ModuleType:
    """Import a recipe: `CONFIG` is its config class, `check` validates a config, and `main` runs it."""
    path = registry.find_recipe(word)
    shipped = path == registry.list_recipes().get(path.stem)
    # Naming a recipe file on the command line means that the user trusts it.
    name = f"tunekit.recipes.{path.stem}"
    with imports_without_gc():
        module = importlib.import_module(name) if shipped else import_file(f"own_{path.stem}", path)
    missing = [name for name in REQUIRED_NAMES if name not in vars(module)]
    if missing:
        raise UserError(f"{path}: a recipe must define {', '.join(missing)}. Start from `tune cp sft my_sft.py`")
    return module


def load_checked_config(module: ModuleType, word: str, overrides: Sequence[str], imports: Sequence[str]) -> Any:
    """Load the recipe's config and run all checks that need no weights."""
    choice = load_recipe_config(module, word, overrides, imports)
    module.check(choice)
    return choice


def load_recipe_config(
    module: ModuleType,
    word: str | None,
    overrides: Sequence[str],
    imports: Sequence[str],
    keywords: KeywordValues | None = None,
) -> Any:
    """Load the recipe's config, of keywords alone if `word` is None. Keys and values are validated; models and data are
    not accessed."""
    path = None if word is None else registry.find_config(word)
    required, name = None if path is None else read_recipe(path), module.__name__.rpartition(".")[2]
    if required and required.removesuffix(".py") != name and module.__name__.startswith("tunekit."):
        raise UserError(f"{path}: written for the recipe '{required}', not '{name}'. Use `tune run {required} {word}`")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"'{override}': overrides must be key=value, such as seed=1")
    try:
        cfg = load.load_config(module.CONFIG, path, overrides, [_file(item) for item in imports], keywords)
    except ConfigError as error:
        hint = None if path is None else import_hint(path)
        raise error if hint is None else ConfigError((hint, *error.lines)) from None
    return cfg.continue_adapter() if isinstance(cfg, ContinuesAdapter) else cfg


@functools.cache
def keys_of_recipe(recipe: str) -> frozenset[str]:
    """Dotted keys of a recipe, without the numbers of list elements."""
    paths = (path for path, _ in iter_slots(load_recipe(recipe).CONFIG, ChoiceRegistry()))
    return frozenset(".".join(part for part in path if part != "0") for path in paths)


def _file(word: str) -> Path:
    if not Path(word).is_file():
        raise UserError(f"--import {word}: no such file")
    return Path(word)
