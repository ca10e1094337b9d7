"""`tune run`: a recipe with a config."""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tunekit import launch
from tunekit.checkpoint import workspace
from tunekit.config.dump import resolved
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Check everything, then run."""
    config, overrides = words(args)
    recipe = launch.recipe(args.recipe)
    cfg = launch.config(recipe, config, overrides, args.imports)
    devices(args.gpus)
    if args.fresh:
        check_fresh(recipe, cfg)
        recipe.main(cfg, fresh=True)
    else:
        recipe.main(cfg)


def words(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The config and the overrides: the config is the first word unless `--config` names it."""
    if args.config:
        return args.config, args.overrides
    if not args.overrides or ("=" in args.overrides[0] and not Path(args.overrides[0]).is_file()):
        raise UserError(f"which config? tune run {args.recipe} CONFIG key=value; `tune ls {args.recipe}` lists them")
    return args.overrides[0], args.overrides[1:]


def devices(wanted: int | None) -> None:
    """Refuse GPUs that are not there."""
    found = torch.cuda.device_count()
    if wanted is not None and wanted > found:
        raise UserError(f"--gpus {wanted}: this machine has {found or 'none'}; leave --gpus out to use what there is")
    if wanted is not None and wanted > 1:
        raise UserError(f"--gpus {wanted}: a run uses one GPU in this version; leave --gpus out")


def check_fresh(recipe: ModuleType, cfg: Any) -> None:
    """Whether a recipe can start over: `main(cfg, fresh=True)` erases what its folder holds once all is checked."""
    if "fresh" not in inspect.signature(recipe.main).parameters:
        name = recipe.__name__.rpartition(".")[2]
        raise UserError(f"--fresh: the recipe '{name}' keeps nothing to continue from; leave it out")
    out = Path(cfg.out)
    gone = [(out / name).resolve() for name in (workspace.FINAL, workspace.STATE)]
    for text in texts(resolved(cfg)):  # whatever the key: a model, an adapter to start from
        if any(Path(text).resolve().is_relative_to(folder) for folder in gone):
            raise UserError(f"--fresh would erase {text}, which this run reads: give another out=")


def texts(tree: Any) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from texts(child)
