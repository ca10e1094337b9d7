"""`tune run`, in the process that looks at a run before ranks start, or does it alone or beside others of torchrun."""

import argparse
import hashlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from tunekit import devices as device_table
from tunekit.checkpoint import atomic, run_dir
from tunekit.cli import recipe_loader
from tunekit.config.dump import to_plain_config
from tunekit.distributed import worker_env
from tunekit.distributed.signals import StopFile
from tunekit.errors import UserError

TIMEOUT = 1800.0  # seconds without a step, of a recipe that does not say it


def main(args: argparse.Namespace) -> None:
    """Check everything, then run."""
    if worker_env.REPORT in os.environ:
        report_to_launcher(args)
        return
    recipe, cfg = load_and_check(args)
    if worker_env.is_worker():  # by torchrun, or one for each machine
        if args.asked.several:
            raise UserError("who starts the processes? `tune run --nproc-per-node` does so itself, without torchrun")
    else:
        device, found = available_devices(cfg)
        args.asked.check(device, found)
        if found > 1 and args.gpus is None and "parallel" in vars(cfg):
            print(f"1 of {found} GPUs is used: --nproc-per-node {found} takes all", file=sys.stderr)
    folder = run_dir_of(recipe, cfg)
    with nullcontext() if folder is None else StopFile(folder):
        recipe.main(cfg, **({"overwrite": True} if args.overwrite else {}))


def load_and_check(args: argparse.Namespace) -> tuple[ModuleType, Any]:
    """The recipe and its config, with all checked that can be before weights are read."""
    recipe = recipe_loader.load_recipe(args.recipe)
    cfg = recipe_loader.load_checked_config(recipe, args.config, args.overrides, args.imports)
    if args.overwrite:
        check_overwrite(recipe, cfg)
    return recipe, cfg


def report_to_launcher(args: argparse.Namespace) -> None:
    """Tell the process that starts ranks what it has to know, once all is checked, or what is wrong."""
    file, parent = map(int, os.environ.pop(worker_env.REPORT).split(":"))
    worker_env.die_with_parent(parent)
    try:
        found = run_summary(args)
    except UserError as error:
        if args.debug:
            traceback.print_exc()
        found = {"mistake": str(error)}
    os.write(file, json.dumps(found).encode())


def run_summary(args: argparse.Namespace) -> dict[str, Any]:
    """What several processes need to know of a run. One that has finished says so here."""
    asked, (recipe, cfg) = args.asked, load_and_check(args)
    folder, shares = run_dir_of(recipe, cfg), vars(cfg).get("parallel")
    count = asked.count * asked.nodes
    if shares is not None:
        shares.resolve_dims(count)
    elif count > 1:
        raise UserError(
            f"--nproc-per-node {asked.count}: '{args.recipe}' runs in one process: its config has no `parallel`"
        )
    if not args.slurm:
        device, found = available_devices(cfg)
        asked.check(device, found)
        if shares is not None:
            shares.check(device, count)
    finished = folder is not None and not args.overwrite and atomic.is_complete(folder / run_dir.FINAL)
    if finished:
        recipe.main(cfg if shares is None else replace(cfg, parallel=type(shares)()))
    elif folder is not None:
        run_dir.check_is_run_dir(folder)
    timeout = TIMEOUT if shares is None else shares.hang_timeout_seconds
    return {"folder": folder and str(folder), "finished": finished, "digest": config_digest(cfg), "timeout": timeout}


def config_digest(cfg: Any) -> str:
    """What has to be the same on all machines."""
    versions = [metadata.version(name) for name in ("tunekit", "torch")]
    return hashlib.sha256(json.dumps([versions, to_plain_config(cfg)], sort_keys=True).encode()).hexdigest()[:16]


def available_devices(cfg: Any) -> tuple[str, int]:
    """The device type that a config selects on this machine, and the number of such devices, 0 on the CPU."""
    choice = vars(cfg).get("device", "auto")
    counts = {} if choice == "cpu" else device_table.count_devices()
    kind = device_table.choose_type(choice, counts)
    return kind, counts.get(kind, 0)


def run_dir_of(recipe: ModuleType, cfg: Any) -> Path | None:
    """The folder of a run that can go on, if the recipe's are such."""
    return Path(cfg.output_dir) if "overwrite" in inspect.signature(recipe.main).parameters else None


def check_overwrite(recipe: ModuleType, cfg: Any) -> None:
    """Whether a recipe can start over: `main(cfg, overwrite=True)` erases what its folder holds once all is checked."""
    if "overwrite" not in inspect.signature(recipe.main).parameters:
        name = recipe.__name__.rpartition(".")[2]
        raise UserError(f"--overwrite: the recipe '{name}' keeps nothing to continue from; leave it out")
    out = Path(cfg.output_dir)
    gone = [(out / name).resolve() for name in (run_dir.FINAL, run_dir.STATE)]
    for text in texts(to_plain_config(cfg)):  # whatever the key: a model, an adapter to start from
        if any(Path(text).resolve().is_relative_to(folder) for folder in gone):
            raise UserError(f"--overwrite would erase {text}, which this run reads: give another output_dir=")


def texts(tree: Any) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from texts(child)
