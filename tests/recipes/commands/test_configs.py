"""Bundled configs load, and contain only values that differ from the defaults."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.published_configs import PUBLISHED
from tunekit import assets
from tunekit.cli import recipe_loader, registry
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.config.yaml_parser import read_recipe
from tunekit.plan.estimate import estimate
from tunekit.plan.hardware import ClusterSpec, gpu_by_name
from tunekit.plan.workload import make_workload

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
    wrong = [row for row in commands if read_recipe(registry.find_config(row[2])) != row[1]]
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


@pytest.mark.parametrize("model", ["granite-4.0-h-tiny", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Bamba-9B-v1"])
def test_hybrid_models_fit_the_gpu_of_their_config(model: str, tmp_path: Path) -> None:
    """Shapes without a preset: planned with the published config.json, on a GPU of 80 GB."""
    repo = next(name for name in PUBLISHED if name.endswith(f"/{model}"))
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[repo][0]))
    (path,) = (path for path in CONFIGS.values() if yaml.safe_load(path.read_text()).get("model") == repo)
    cfg = load_config(recipe_loader.load_recipe("sft").CONFIG, path, [f"model={tmp_path}"])
    cluster = ClusterSpec(gpu=gpu_by_name("h100"), memory=80 * 10**9)
    assert estimate(make_workload(cfg, cluster), cluster).fits is True
