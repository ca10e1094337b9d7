"""`tune ls`: what there is to run."""

import argparse
import json

from tunekit import assets
from tunekit.cli import registry
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Print recipes with their configs, those whose names contain the filter; or the presets."""
    if args.filter == "presets":
        print(json.dumps(presets(), indent=2) if args.json else "\n".join(map(line, presets())))
        return
    rows = [kept for row in table() if (kept := matching(row, args.filter.lower()))]
    if not rows:
        folders = {name.partition("/")[0] for name in registry.list_configs()}
        names = [*registry.list_recipes(), *sorted(folders), *registry.list_configs()]
        raise UserError(f"nothing is called '{args.filter}'{registry.did_you_mean(args.filter, names)}")
    print(json.dumps(rows, indent=2) if args.json else text(rows))


def table() -> list[dict]:
    """Every recipe, in one line of its own words, with the configs written for it."""
    configs = [
        (registry.recipe_of_config(path), {"name": name, "about": registry.summary_line(path)})
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


def presets() -> list[dict]:
    """The shapes of public models that ship: what to train from scratch."""
    rows = []
    for name, folder in assets.PRESETS.items():
        shape = json.loads((folder / "config.json").read_text("utf-8"))
        about = f"{shape['model_type']}, {shape['num_hidden_layers']} layers of {shape['hidden_size']}"
        rows.append({"preset": name, "about": about})
    return rows


def line(preset: dict) -> str:
    width = max(map(len, assets.PRESETS))
    return f"{preset['preset']:{width}}  {preset['about']}"


def matching(row: dict, part: str) -> dict | None:
    """The recipe with all its configs if its name matches, with those that match otherwise."""
    if part in row["recipe"].lower():
        return row
    configs = [config for config in row["configs"] if part in config["name"].lower()]
    return {**row, "configs": configs} if configs else None


def text(rows: list[dict]) -> str:
    """Two columns: names, and what they are."""
    lines = []
    for row in rows:
        lines.append((row["recipe"], row["about"]))
        lines += [(f"  {config['name']}", config["about"]) for config in row["configs"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {line}".rstrip() for name, line in lines)
