"""Bundled configs load, and contain only values that differ from the defaults."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tunekit import assets
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


def redundant_keys(path: Path) -> list[str]:
    """Keys of a config that repeat defaults."""
    tree = yaml.safe_load(path.read_text())
    full = load_config(recipe_loader.load_recipe(tree["recipe"]).CONFIG, path)
    return [key for key, reduced in without_one_key(tree) if try_load(tree["recipe"], reduced) == full]


def test_bundled_configs_contain_no_defaults() -> None:
    assert not {name: keys for name, path in CONFIGS.items() if (keys := redundant_keys(path))}


def test_bundled_configs_have_a_summary() -> None:
    assert not [name for name, path in CONFIGS.items() if not registry.summary_line(path)]


def test_commands_in_bundled_configs_are_valid() -> None:
    commands = [
        (name, *command)
        for name, path in CONFIGS.items()
        for command in re.findall(r"tune run (\S+) (\S+)", path.read_text())
    ]
    wrong = [row for row in commands if registry.recipe_of_config(registry.find_config(row[2])) != row[1]]
    assert commands and not wrong


def test_bundled_configs_have_different_output_dirs() -> None:
    folders = [yaml.safe_load(path.read_text()).get("output_dir") for path in CONFIGS.values()]
    output_dirs = [folder for folder in folders if folder]
    assert len(output_dirs) == len(set(output_dirs))


def test_every_family_of_the_presets_has_a_config() -> None:
    """Configs name models on the Hub; without access to it, they are planned with the preset of the same shape."""
    models = [yaml.safe_load(path.read_text()).get("model", "") for path in CONFIGS.values()]
    planned = {assets.find_preset(model) for model in models}

    def model_type(preset: str) -> str:
        return json.loads((assets.PRESETS[preset] / "config.json").read_text())["model_type"]

    missing = {model_type(preset) for preset in assets.PRESETS} - {model_type(preset) for preset in planned if preset}
    assert not missing
