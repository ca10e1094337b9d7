"""Every config that ships is accepted by its recipe, and says only what differs from the defaults."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tunekit.cli import recipe_loader, registry
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config

CONFIGS = registry.list_configs()


def shortened(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config less one key, for each key of it and of its parts. A kind may be said even if it is the usual one."""
    for key, value in tree.items():
        if key not in ("recipe", "kind"):
            yield key, {name: other for name, other in tree.items() if name != key}
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", {**tree, key: less}) for inner, less in shortened(value))


def loaded(name: str, tree: dict[str, Any]) -> Any:
    """The config, or None if its recipe refuses it."""
    try:
        return load_config(recipe_loader.load_recipe(name).CONFIG, tree)
    except ConfigError:
        return None


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_say_only_what_differs(name: str) -> None:
    tree = yaml.safe_load(CONFIGS[name].read_text())
    recipe = tree["recipe"]
    whole = load_config(recipe_loader.load_recipe(recipe).CONFIG, CONFIGS[name])
    idle = [key for key, less in shortened(tree) if loaded(recipe, less) == whole]
    assert not idle, f"{name} repeats defaults: {', '.join(idle)}"


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_say_what_they_are(name: str) -> None:
    assert registry.summary_line(CONFIGS[name])
    for recipe, config in re.findall(r"tune run (\S+) (\S+)", CONFIGS[name].read_text()):
        assert registry.recipe_of_config(registry.find_config(config)) == recipe


def test_no_two_configs_share_a_run_folder() -> None:
    folders = [yaml.safe_load(path.read_text()).get("output_dir") for path in CONFIGS.values()]
    named = [folder for folder in folders if folder]
    assert len(named) == len(set(named))
