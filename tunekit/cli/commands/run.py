"""`tune run`: a recipe with a config."""

import argparse
import os
from importlib import import_module
from pathlib import Path

from tunekit.cli import recipe_loader
from tunekit.distributed import launch_workers, worker_env
from tunekit.distributed.heartbeat import HeartbeatWriter
from tunekit.distributed.launch_config import LaunchConfig, WorkerSpec
from tunekit.distributed.signals import StopRequests
from tunekit.distributed.slurm import SlurmJob
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Run here, or in processes that this one starts; itself it then never imports torch."""
    args.config, args.overrides = split_config_and_overrides(args)
    args.asked = launch_config(args)
    apart = args.asked.several or args.slurm is not None
    if worker_env.is_tune_worker():
        run_worker(args)
    elif apart and not worker_env.has_launcher_env() and worker_env.REPORT not in os.environ:
        with StopRequests() as wishes:
            launch(args, wishes)
    else:
        import_module("tunekit.cli.commands.run_worker").main(args)


def run_worker(args: argparse.Namespace) -> None:
    """Run as one of several processes; all is checked."""
    worker_env.init_worker()
    with HeartbeatWriter.open():
        recipe = recipe_loader.load_recipe(args.recipe)
        cfg = recipe_loader.load_recipe_config(recipe, args.config, args.overrides, args.imports)
        recipe.main(cfg, **({"overwrite": True} if args.overwrite else {}))


def launch_config(args: argparse.Namespace) -> LaunchConfig:
    """What the options say about processes and machines."""
    if args.slurm is None:
        if args.dry_run:
            raise UserError("--dry-run is for --slurm: it writes the script and submits nothing")
        return LaunchConfig(args.gpus, args.nodes, args.rendezvous, args.node_rank, args.max_restarts)
    if (args.gpus, args.nodes, args.rendezvous, args.node_rank) != (None, 1, None, None):
        raise UserError("--slurm says how many: write --slurm nodes=4,gpus=8 in place of --nnodes and --nproc-per-node")
    wanted = SlurmJob.read(args.slurm)
    meeting = "the first of them:1" if wanted.nodes > 1 else None
    return LaunchConfig(wanted.gpus, wanted.nodes, meeting, restarts=args.max_restarts)


def launch(args: argparse.Namespace, wishes: StopRequests) -> None:
    """Have all checked in a process of its own, for torch takes long to import, and start the ranks."""
    fresh = ["--overwrite"] if args.overwrite else []
    where = ("--slurm", args.slurm) if args.slurm else args.asked.words
    found = launch_workers.check_in_subprocess((*worker_args(args), *where, *fresh), wishes)
    folder = found["folder"] and Path(found["folder"])
    if found["finished"]:
        return
    if args.slurm:
        again = ["--max-restarts", str(args.max_restarts)] if args.max_restarts else []
        words = (*worker_args(args), *again)
        print(SlurmJob.read(args.slurm).submit(words, folder or Path(), args.overwrite, args.dry_run))
    else:
        job = WorkerSpec(worker_args(args), args.asked, folder, found["timeout"], found["digest"], args.overwrite)
        launch_workers.launch_workers(job, wishes)


def worker_args(args: argparse.Namespace) -> tuple[str, ...]:
    """The words of `tune` without those that say what runs where, nor `--overwrite`: for each of the processes."""
    imports = [word for file in args.imports for word in ("--import", file)]
    debug = ["--debug"] if args.debug else []
    return ("run", args.recipe, "--config", args.config, *args.overrides, *imports, *debug)


def split_config_and_overrides(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The config and the overrides: the config is the first word unless `--config` names it."""
    if args.config:
        return args.config, args.overrides
    if not args.overrides or ("=" in args.overrides[0] and not Path(args.overrides[0]).is_file()):
        raise UserError(f"which config? tune run {args.recipe} CONFIG key=value; `tune ls {args.recipe}` lists them")
    return args.overrides[0], args.overrides[1:]
