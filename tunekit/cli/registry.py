"""Recipes and configs of the package, and lookup of files by command-line names.

Reads only file names and first lines and imports nothing slow, so that listing is instant.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import tunekit.recipes
from tunekit.config.migration_hints import suggest_recipe
from tunekit.errors import UserError, did_you_mean
from tunekit.system import read_utf8

RECIPES = Path(next(iter(tunekit.recipes.__path__)))
CONFIGS = RECIPES.parent / "configs"
TRAIN_LOOP = Path(__file__).parents[1] / "training/train_loop.py"  # of the training recipes


def list_recipes() -> dict[str, Path]:
    """Recipes of the package by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.py")) if not path.stem.startswith("_")}


def list_configs() -> dict[str, Path]:
    """Configs of the package by name, such as `qwen3/8b_lora`."""
    return {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in sorted(CONFIGS.rglob("*.yaml"))}


def find_recipe(word: str) -> Path:
    """Find the file of a recipe: a local Python file, or the name of a recipe of the package."""
    if word.endswith(".py") and Path(word).is_file():
        return Path(word)
    return _find_by_name("recipe", word, list_recipes())


def find_config(word: str) -> Path:
    """Find the file of a config: a local file if it exists, otherwise one of the package. `.yaml` is optional."""
    local = _local_configs(word)
    return local[0] if local else _find_by_name("config", word, list_configs())


def is_config(word: str) -> bool:
    """Whether a word names a config, and not a recipe. True for a YAML file that does not exist."""
    if word.removesuffix(".py") in list_recipes() or word.endswith(".py"):
        return False
    return bool(_local_configs(word)) or word.endswith((".yaml", ".yml")) or word in list_configs()


def find_recipe_or_config(word: str) -> Path:
    """Find the file of a recipe or a config."""
    if word.removesuffix(".py") in list_recipes() or word.endswith(".py"):
        return find_recipe(word)
    return (
        find_config(word)
        if is_config(word)
        else _find_by_name("recipe or config", word, list_recipes() | list_configs())
    )


def find_source(word: str) -> Path:
    """Find the file of a recipe or a config, or the training loop (`train_loop`) of the recipes."""
    return TRAIN_LOOP if word.removesuffix(".py") == TRAIN_LOOP.stem else find_recipe_or_config(word)


def _local_configs(word: str) -> list[Path]:
    return [path for path in (Path(word), Path(f"{word}.yaml")) if path.is_file()]


def summary_line(path: Path) -> str:
    """First line of a recipe's docstring or of a config's comment."""
    text = read_utf8(path)
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def suggest_name(word: str, names: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the most similar name, or one that contains the word; empty if there is none."""
    names = list(names)
    part_of = next((name for name in names if word and word in name), None)
    return did_you_mean(word, names, f"Did you mean '{part_of}'?" if part_of else "")


def _find_by_name(kind: str, word: str, known: dict[str, Path]) -> Path:
    name = word.removesuffix(".py").removesuffix(".yaml")
    if name not in known:
        if kind == "recipe" and (hint := suggest_recipe(name)):
            raise UserError(f"no recipe '{word}': {hint}")
        if Path(word).suffix in (".yaml", ".yml"):
            problem = f"no such file, and no {kind} of tunekit has this name"
            raise UserError(f"{word}: {problem}.{suggest_name(name, known)} Run `tune ls` for a list.")
        raise UserError(f"no {kind} '{word}'.{suggest_name(name, known)} Run `tune ls` for a list.")
    return known[name]
