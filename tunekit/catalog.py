"""The recipes and configs that ship with the package, and which of them a word of the command line means.

It reads names and first lines only, and imports nothing heavy: listing is instant.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import tunekit.recipes
from tunekit.config.foreign import recipe_meant
from tunekit.config.suggest import near
from tunekit.errors import UserError

RECIPES = Path(next(iter(tunekit.recipes.__path__)))
CONFIGS = RECIPES.parent / "configs"


def recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.py")) if not path.stem.startswith("_")}


def configs() -> dict[str, Path]:
    """The shipped configs by the name people type, such as `qwen3/8b_lora`."""
    return {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in sorted(CONFIGS.rglob("*.yaml"))}


def recipe(word: str) -> Path:
    """The file of a recipe: a path to one's own, or a shipped name."""
    if word.endswith(".py") and Path(word).is_file():
        return Path(word)
    return _named("recipe", word, recipes())


def config(word: str) -> Path:
    """The file of a config: a local one if there is one, else a shipped one. `.yaml` may be left out."""
    local = [path for path in (Path(word), Path(f"{word}.yaml")) if path.is_file()]
    return local[0] if local else _named("config", word, configs())


def either(word: str) -> Path:
    """The file of a recipe or a config."""
    if word.removesuffix(".py") in recipes() or word.endswith(".py"):
        return recipe(word)
    names = configs()
    if Path(word).is_file() or Path(f"{word}.yaml").is_file() or word.removesuffix(".yaml") in names:
        return config(word)
    return _named("recipe or config", word, recipes() | names)


def about(path: Path) -> str:
    """What a recipe (its docstring) or a config (its first comment) says of itself in one line."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def written_for(path: Path) -> str | None:
    """The recipe that a config names in its `recipe:` line, found without a YAML parser, which takes long to load."""
    line = re.search(r"^recipe:[ \t]*['\"]?([\w-]+)", path.read_text("utf-8"), re.MULTILINE)
    return line.group(1) if line else None


def hint(word: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of the names, or nothing."""
    names = list(names)
    meant = near(word, names) or next((name for name in names if word and word in name), None)
    return f"; did you mean '{meant}'?" if meant else ""


def _named(kind: str, word: str, known: dict[str, Path]) -> Path:
    name = word.removesuffix(".py").removesuffix(".yaml")
    if name not in known:
        if kind == "recipe" and (meant := recipe_meant(name)):
            raise UserError(f"no recipe '{word}': {meant}")
        raise UserError(f"no {kind} '{word}'{hint(name, known) or ';'} `tune ls` shows what there is")
    return known[name]
