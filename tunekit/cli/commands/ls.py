"""`tune ls`: list recipes, configs and presets."""

import argparse
import json

from tunekit import assets
from tunekit.cli import registry
from tunekit.config.yaml_parser import read_recipe
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Print recipes and configs whose names contain the filter, or the presets."""
    if args.filter == "presets":
        print(json.dumps(list_presets(), indent=2) if args.json else "\n".join(map(format_preset, list_presets())))
        return
    rows = [match for row in list_recipe_rows() if (match := filter_row(row, args.filter.lower()))]
    if not rows:
        folders = {name.partition("/")[0] for name in registry.list_configs()}
        names = [*registry.list_recipes(), *sorted(folders), *registry.list_configs()]
        raise UserError(f"no recipe or config matches '{args.filter}'.{registry.suggest_name(args.filter, names)}")
    print(json.dumps(rows, indent=2) if args.json else format_rows(rows))


def list_recipe_rows() -> list[dict]:
    """List all recipes with their summary lines and configs."""
    configs = [
        (read_recipe(path), {"name": name, "about": registry.summary_line(path)})
        for name, path in registry.list_configs().items()
    ]
    return [
        {
            "recipe": name,
            "about": registry.summary_line(path),
            "configs": [row for recipe, row in configs if recipe == name],
        }
        for name, path in registry.list_recipes().items()
    ]


def list_presets() -> list[dict]:
    """List the included model configs for training from scratch."""
    rows = []
    for name, folder in assets.PRESETS.items():
        shape = json.loads((folder / "config.json").read_text("utf-8"))
        about = f"{shape['model_type']}, {shape['num_hidden_layers']} layers of {shape['hidden_size']}"
        rows.append({"preset": name, "about": about})
    return rows


def format_preset(preset: dict) -> str:
    width = max(map(len, assets.PRESETS))
    return f"{preset['preset']:{width}}  {preset['about']}"


def filter_row(row: dict, part: str) -> dict | None:
    """Row with all configs if the name of the recipe matches, otherwise with the matching configs; None without any."""
    if part in row["recipe"].lower():
        return row
    configs = [config for config in row["configs"] if part in config["name"].lower()]
    return {**row, "configs": configs} if configs else None


def format_rows(rows: list[dict]) -> str:
    """Format a table with two columns: names and summary lines."""
    lines = []
    for row in rows:
        lines.append((row["recipe"], row["about"]))
        lines += [(f"  {config['name']}", config["about"]) for config in row["configs"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {line}".rstrip() for name, line in lines)
