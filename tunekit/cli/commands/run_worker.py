"""`tune run` in the process that runs checks before the launch, in a single process, or in a process of torchrun."""

import argparse
import hashlib
import inspect
import json
import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from tunekit import devices as device_table
from tunekit.checkpoint import atomic, run_dir
from tunekit.cli import recipe_loader
from tunekit.config.dump import to_plain_config
from tunekit.config.secrets import iter_strings
from tunekit.distributed import worker_env
from tunekit.distributed.parallel_dims import Distributable, ParallelConfig
from tunekit.distributed.signals import StopFile
from tunekit.errors import UserError

TIMEOUT = 1800.0  # seconds without a step, for recipes without `parallel.hang_timeout_seconds`


@runtime_checkable
class HasDevice(Protocol):
    """Config with a device type."""

    @property
    def device(self) -> str: ...


def main(args: argparse.Namespace) -> None:
    """Run all checks, then the recipe."""
    if worker_env.REPORT in os.environ:
        report_to_launcher(args)
        return
    recipe, cfg = load_and_check(args)
    if worker_env.is_worker():  # started by torchrun, or by another launcher
        if args.launch.needs_launcher:
            raise UserError("--nproc-per-node: not compatible with torchrun. `tune run` starts the processes itself")
    else:
        device, num_devices = available_devices(cfg)
        args.launch.check_nproc_per_node(device, num_devices)
        if num_devices > 1 and args.gpus is None and parallel_of(cfg) is not None:
            print(f"1 of {num_devices} GPUs is used. Pass --nproc-per-node {num_devices} to use all", file=sys.stderr)
    folder = run_dir_of(recipe, cfg)
    with nullcontext() if folder is None else StopFile(folder):
        recipe.main(cfg, **({"overwrite": True} if args.overwrite else {}))


def load_and_check(args: argparse.Namespace) -> tuple[ModuleType, Any]:
    """Load the recipe and its config, and run all checks that need no weights."""
    recipe = recipe_loader.load_recipe(args.recipe)
    cfg = recipe_loader.load_checked_config(recipe, args.config, args.overrides, args.imports)
    if args.overwrite:
        check_overwrite(recipe, cfg)
    return recipe, cfg


def report_to_launcher(args: argparse.Namespace) -> None:
    """Run all checks and send a summary, or the error, to the process that starts the ranks."""
    file, parent = map(int, os.environ.pop(worker_env.REPORT).split(":"))
    worker_env.die_with_parent(parent)
    try:
        report = run_summary(args)
    except UserError as error:
        if args.debug:
            traceback.print_exc()
        report = {"mistake": str(error)}
    os.write(file, json.dumps(report).encode())


def run_summary(args: argparse.Namespace) -> dict[str, Any]:
    """Summary of a run for the launcher. If the run is complete, the recipe prints this and the launch is skipped."""
    launch, (recipe, cfg) = args.launch, load_and_check(args)
    folder, parallel = run_dir_of(recipe, cfg), parallel_of(cfg)
    count = launch.nproc_per_node * launch.nodes
    if parallel is not None:
        parallel.resolve_dims(count)
    elif count > 1:
        raise UserError(
            f"--nproc-per-node {launch.nproc_per_node}: the recipe '{args.recipe}' supports only one process"
        )
    if not args.slurm:
        device, num_devices = available_devices(cfg)
        launch.check_nproc_per_node(device, num_devices)
        if parallel is not None:
            parallel.check(device, count)
    finished = folder is not None and not args.overwrite and atomic.is_complete(folder / run_dir.FINAL)
    if finished:
        recipe.main(cfg if parallel is None else replace(cfg, parallel=type(parallel)()))
    elif folder is not None:
        run_dir.check_is_run_dir(folder)
    timeout = TIMEOUT if parallel is None else parallel.hang_timeout_seconds
    return {"folder": folder and str(folder), "finished": finished, "digest": config_digest(cfg), "timeout": timeout}


def config_digest(cfg: Any) -> str:
    """Hash of the config and the library versions, which must be equal on all nodes."""
    versions = [metadata.version(name) for name in ("tunekit", "torch")]
    return hashlib.sha256(json.dumps([versions, to_plain_config(cfg)], sort_keys=True).encode()).hexdigest()[:16]


def available_devices(cfg: Any) -> tuple[str, int]:
    """Device type that the config selects on this machine, and the number of such devices (0 for the CPU)."""
    choice = cfg.device if isinstance(cfg, HasDevice) else "auto"
    counts = {} if choice == "cpu" else device_table.count_devices()
    kind = device_table.choose_type(choice, counts)
    return kind, counts.get(kind, 0)


def parallel_of(cfg: Any) -> ParallelConfig | None:
    """Parallelism of a config; None if the recipe runs in one process."""
    return cfg.parallel if isinstance(cfg, Distributable) else None


def run_dir_of(recipe: ModuleType, cfg: Any) -> Path | None:
    """Run directory; None if the recipe does not support resuming."""
    return Path(cfg.output_dir) if "overwrite" in inspect.signature(recipe.main).parameters else None


def check_overwrite(recipe: ModuleType, cfg: Any) -> None:
    """Raise UserError if the recipe does not support --overwrite, or if it would delete inputs of the run."""
    if "overwrite" not in inspect.signature(recipe.main).parameters:
        name = recipe.__name__.rpartition(".")[2]
        raise UserError(f"--overwrite: the recipe '{name}' does not support it. Remove it")
    out = Path(cfg.output_dir)
    removed = [(out / name).resolve() for name in (run_dir.FINAL, run_dir.STATE)]
    for text in iter_strings(to_plain_config(cfg)):  # any key may be a path, such as that of a model or an adapter
        if any(Path(text).resolve().is_relative_to(folder) for folder in removed):
            raise UserError(f"--overwrite would erase {text}, which this run reads. Set another output_dir")
