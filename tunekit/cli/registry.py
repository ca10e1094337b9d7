"""The recipes and configs that ship with the package, and which of them a word of the command line means.

It reads names and first lines only, and imports nothing heavy: listing is instant.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import tunekit.recipes
from tunekit.config.migration_hints import suggest_recipe
from tunekit.config.suggestions import closest_match
from tunekit.errors import UserError

RECIPES = Path(next(iter(tunekit.recipes.__path__)))
CONFIGS = RECIPES.parent / "configs"


def list_recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.py")) if not path.stem.startswith("_")}


def list_configs() -> dict[str, Path]:
    """The shipped configs by the name people type, such as `qwen3/8b_lora`."""
    return {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in sorted(CONFIGS.rglob("*.yaml"))}


def find_recipe(word: str) -> Path:
    """The file of a recipe: a path to one's own, or a shipped name."""
    if word.endswith(".py") and Path(word).is_file():
        return Path(word)
    return _named("recipe", word, list_recipes())


def find_config(word: str) -> Path:
    """The file of a config: a local one if there is one, else a shipped one. `.yaml` may be left out."""
    local = [path for path in (Path(word), Path(f"{word}.yaml")) if path.is_file()]
    return local[0] if local else _named("config", word, list_configs())


def find_recipe_or_config(word: str) -> Path:
    """The file of a recipe or a config."""
    if word.removesuffix(".py") in list_recipes() or word.endswith(".py"):
        return find_recipe(word)
    names = list_configs()
    if Path(word).is_file() or Path(f"{word}.yaml").is_file() or word.removesuffix(".yaml") in names:
        return find_config(word)
    return _named("recipe or config", word, list_recipes() | names)


def summary_line(path: Path) -> str:
    """What a recipe (its docstring) or a config (its first comment) says of itself in one line."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def recipe_of_config(path: Path) -> str | None:
    """The recipe that a config names in its `recipe:` line, found without a YAML parser, which takes long to load."""
    line = re.search(r"^recipe:[ \t]*['\"]?([\w-]+)", path.read_text("utf-8"), re.MULTILINE)
    return line.group(1) if line else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of the names, or nothing."""
    names = list(names)
    meant = closest_match(word, names) or next((name for name in names if word and word in name), None)
    return f"; did you mean '{meant}'?" if meant else ""


def _named(kind: str, word: str, known: dict[str, Path]) -> Path:
    name = word.removesuffix(".py").removesuffix(".yaml")
    if name not in known:
        if kind == "recipe" and (meant := suggest_recipe(name)):
            raise UserError(f"no recipe '{word}': {meant}")
        raise UserError(f"no {kind} '{word}'{did_you_mean(name, known) or ';'} `tune ls` shows what there is")
    return known[name]
