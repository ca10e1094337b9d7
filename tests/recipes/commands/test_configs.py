"""Bundled configs load, and contain only values that differ from the defaults."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tunekit.cli import recipe_loader, registry
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config

CONFIGS = registry.list_configs()


def without_one_key(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config without one key, for each key at any level. `kind` may be the default kind."""
    for key, value in tree.items():
        if key not in ("recipe", "kind"):
            yield key, {name: kept_value for name, kept_value in tree.items() if name != key}
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", {**tree, key: reduced}) for inner, reduced in without_one_key(value))


def try_load(name: str, tree: dict[str, Any]) -> Any:
    """Config, or None if the recipe refuses it."""
    try:
        return load_config(recipe_loader.load_recipe(name).CONFIG, tree)
    except ConfigError:
        return None


@pytest.mark.parametrize("name", CONFIGS)
def test_bundled_configs_contain_no_defaults(name: str) -> None:
    tree = yaml.safe_load(CONFIGS[name].read_text())
    recipe = tree["recipe"]
    full = load_config(recipe_loader.load_recipe(recipe).CONFIG, CONFIGS[name])
    redundant = [key for key, reduced in without_one_key(tree) if try_load(recipe, reduced) == full]
    assert not redundant, f"{name} repeats defaults: {', '.join(redundant)}"


@pytest.mark.parametrize("name", CONFIGS)
def test_bundled_configs_have_a_summary_and_valid_commands(name: str) -> None:
    assert registry.summary_line(CONFIGS[name])
    for recipe, config in re.findall(r"tune run (\S+) (\S+)", CONFIGS[name].read_text()):
        assert registry.recipe_of_config(registry.find_config(config)) == recipe


def test_bundled_configs_have_different_output_dirs() -> None:
    folders = [yaml.safe_load(path.read_text()).get("output_dir") for path in CONFIGS.values()]
    output_dirs = [folder for folder in folders if folder]
    assert len(output_dirs) == len(set(output_dirs))
