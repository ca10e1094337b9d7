"""`tune run`: run a recipe with a config."""

import argparse
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tunekit.cli import recipe_loader, registry, torchtune_run
from tunekit.distributed import launcher, worker_env
from tunekit.distributed.heartbeat import HeartbeatWriter
from tunekit.distributed.launch_config import LaunchConfig, WorkerSpec
from tunekit.distributed.signals import StopRequests
from tunekit.distributed.slurm import SlurmJob
from tunekit.errors import UserError
from tunekit.system import imports_without_gc, may_have_gpu


def main(args: argparse.Namespace) -> None:
    """Run in this process, or in worker processes. A launcher of one node does not import torch."""
    torchtune_run.translate(args)
    resolve_recipe_and_config(args)
    args.launch = launch_config(args)
    uses_workers = args.launch.needs_launcher or args.slurm is not None
    if worker_env.is_tune_worker():
        run_worker(args)
    elif uses_workers and not worker_env.has_launcher_env() and worker_env.REPORT not in os.environ:
        with StopRequests() as stop_requests:
            launch_recipe(args, stop_requests)
    else:
        with imports_without_gc():
            worker = import_module("tunekit.cli.commands.run_worker")
        worker.main(args)


def run_worker(args: argparse.Namespace) -> None:
    """Run the recipe in a worker process. The launcher has run all checks before."""
    worker_env.init_worker()
    with HeartbeatWriter.open():
        recipe = recipe_loader.load_recipe(args.recipe)
        cfg = recipe_loader.load_recipe_config(recipe, args.config, args.overrides, args.imports)
        recipe.main(cfg, **({"overwrite": True} if args.overwrite else {}))


def launch_config(args: argparse.Namespace) -> LaunchConfig:
    """Launch config from the arguments on processes and nodes."""
    if args.slurm is None:
        if args.dry_run:
            raise UserError("--dry-run: requires --slurm")
        config = LaunchConfig(args.gpus, args.nodes, args.rendezvous, args.node_rank, args.max_restarts, args.job_id)
        if not may_have_gpu():  # otherwise reported only after torch is imported
            config.check_nproc_per_node("cpu", 0)
        return config
    if (args.gpus, args.nodes, args.rendezvous, args.node_rank, args.job_id) != (None, 1, None, None, None):
        raise UserError("--slurm: not compatible with --nnodes and --nproc-per-node. Use --slurm nodes=4,gpus=8")
    slurm_job = SlurmJob.parse(args.slurm)
    rendezvous = "the first of them:1" if slurm_job.nodes > 1 else None
    return LaunchConfig(slurm_job.gpus, slurm_job.nodes, rendezvous, restarts=args.max_restarts)


def launch_recipe(args: argparse.Namespace, stop_requests: StopRequests) -> None:
    """Run the checks in a subprocess, so that this process does not import torch, then start the ranks."""
    summary = launcher.check_in_subprocess(args.words, stop_requests)
    folder = summary["folder"] and Path(summary["folder"])
    if summary["finished"]:
        return
    if args.slurm:
        restarts = ["--max-restarts", str(args.max_restarts)] if args.max_restarts else []
        worker_arguments = (*worker_args(args), *restarts)
        print(SlurmJob.parse(args.slurm).submit(worker_arguments, folder or Path(), args.overwrite, args.dry_run))
    else:
        job = WorkerSpec(worker_args(args), args.launch, folder, summary["timeout"], summary["digest"], args.overwrite)
        run = import_elastic_launcher().run_node if args.launch.nodes > 1 else launcher.run_single_node
        launcher.launch_workers(job, stop_requests, run)


def import_elastic_launcher() -> ModuleType:
    """Import torch without its messages about each attempt to connect. Variables of the workers are unchanged."""
    name, value = "TORCH_CPP_LOG_LEVEL", os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault(name, "FATAL")  # read once, at the import
    module = import_module("tunekit.distributed.elastic_launcher")
    if value is None:
        del os.environ[name]
    return module


def worker_args(args: argparse.Namespace) -> tuple[str, ...]:
    """Arguments of `tune` for each worker: all but launch options and `--overwrite`."""
    imports = [word for file in args.imports for word in ("--import", file)]
    debug = ["--debug"] if args.debug else []
    return ("run", args.recipe, "--config", args.config, *args.overrides, *imports, *debug)


def resolve_recipe_and_config(args: argparse.Namespace) -> None:
    """Set recipe, config and overrides. Without a recipe, the first argument is a config that names its recipe."""
    if registry.is_config(args.recipe):
        args.recipe, args.overrides = None, [args.recipe, *args.overrides]
    args.config, args.overrides = split_config_and_overrides(args)
    args.recipe = args.recipe or recipe_loader.find_config_and_recipe(args)[1]
    registry.find_recipe(args.recipe)  # errors before torch is imported, which takes seconds
    registry.find_config(args.config)


def split_config_and_overrides(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Config and overrides. The config is the first positional argument unless `--config` is given."""
    if args.config:
        return args.config, args.overrides
    if not args.overrides or ("=" in args.overrides[0] and not Path(args.overrides[0]).is_file()):
        registry.find_recipe_or_config(args.recipe)  # or a better error
        usage = f"Usage: tune run {args.recipe} CONFIG [key=value ...]"
        raise UserError(f"missing config. {usage}. List configs with: tune ls {args.recipe}")
    return args.overrides[0], args.overrides[1:]
