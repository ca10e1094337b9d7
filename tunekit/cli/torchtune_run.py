"""Commands of torchtune: `tune run RECIPE --config CONFIG` of its recipes and configs."""

import argparse
import shlex
import sys
from pathlib import Path

from tunekit.cli import recipe_loader, registry
from tunekit.distributed import worker_env
from tunekit.errors import UserError
from tunekit.importers import imported
from tunekit.importers.report import format_findings
from tunekit.importers.torchtune import packaged

IMPORTED = "# Imported from "  # start of the files that may be overwritten


def translate(args: argparse.Namespace) -> None:
    """Replace recipe and config of torchtune by their counterparts, and print their names.

    A config file is imported to a file in the current directory. For a config of torchtune's package, its
    counterpart of tunekit is used. Other commands are unchanged.
    """
    config = args.config or next((word for word in args.overrides[:1] if "=" not in word), None)
    if config is None or is_own(args.recipe, config):
        return
    overrides = args.overrides if args.config else args.overrides[1:]
    given = {args.recipe, config, *overrides, f"--config={config}", "--config"}
    if Path(config).is_file():
        recipe, target, added = import_config(args, config, overrides)
    else:
        recipe, target, added = find_packaged(config, overrides)
    args.recipe, args.config, args.overrides = recipe, target, added
    args.words = (*(word for word in args.words if word not in given), recipe, "--config", target, *added)


def is_own(recipe: str, config: str) -> bool:
    """Whether a recipe and a config are not those of torchtune."""
    path = Path(config)
    if path.is_file():
        return not (path.suffix in (".yaml", ".yml") and "_component_:" in path.read_text("utf-8", errors="replace"))
    return not (packaged.is_recipe(recipe) and packaged.is_packaged_name(config))


def import_config(args: argparse.Namespace, config: str, overrides: list[str]) -> tuple[str, str, list[str]]:
    """Import a config file. Returns the recipe, the file that is written, and no overrides."""
    result = imported.import_torchtune_run(config, overrides, args.recipe, args.gpus, recipe_loader.keys_of_recipe)
    target = Path(f"{Path(config).stem}.tunekit.yaml")
    if target.exists() and not target.read_text("utf-8", errors="replace").startswith(IMPORTED):
        raise UserError(f"{target}: already exists, and was not written by an import. Rename it.")
    partial = target.with_suffix(".partial")  # other processes of the run may read the file
    partial.write_text(result.text, encoding="utf-8")
    partial.replace(target)
    command = shlex.join(["tune", "run", result.draft.recipe, str(target)])
    print_message(f"{config}: a config of torchtune, imported to {target}. The same run: {command}")
    if text := format_findings([finding for finding in result.draft.findings if finding.effect != "not needed"]):
        print_message(text)
    return result.draft.recipe, str(target), []


def find_packaged(config: str, overrides: list[str]) -> tuple[str, str, list[str]]:
    """The counterpart of a config of torchtune's package, and overrides with its keys."""
    counterpart = packaged.find_counterpart(config, registry.list_configs())
    words, draft = imported.translate_torchtune_overrides(overrides, recipe_loader.keys_of_recipe)
    added = [*counterpart.overrides, *words]
    command = shlex.join(["tune", "run", counterpart.recipe, counterpart.config, *added])
    print_message(f"{config}: a config of torchtune's package. The data and options here are those of: {command}")
    if text := format_findings(draft.findings):
        print_message(text)
    return counterpart.recipe, counterpart.config, added


def print_message(text: str) -> None:
    """Print a message, once for all processes of a run."""
    if not worker_env.is_tune_worker():
        print(text, file=sys.stderr)
