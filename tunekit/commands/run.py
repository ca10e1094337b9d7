"""`tune run`: a recipe with a config."""

import argparse
import os
from importlib import import_module
from pathlib import Path

from tunekit import launch
from tunekit.errors import UserError
from tunekit.parallel import member, start
from tunekit.parallel.asked import Asked, Job
from tunekit.parallel.signals import Wishes
from tunekit.parallel.slurm import Slurm
from tunekit.parallel.watch import Beats


def main(args: argparse.Namespace) -> None:
    """Run here, or in processes that this one starts; itself it then never imports torch."""
    args.config, args.overrides = words(args)
    args.asked = asked_for(args)
    apart = args.asked.several or args.slurm is not None
    if member.ours():
        rank(args)
    elif apart and not member.placed() and member.REPORT not in os.environ:
        with Wishes() as wishes:
            several(args, wishes)
    else:
        import_module("tunekit.commands.process").main(args)


def rank(args: argparse.Namespace) -> None:
    """Run as one of several processes; all is checked."""
    member.begin()
    with Beats.open():
        recipe = launch.recipe(args.recipe)
        cfg = launch.read(recipe, args.config, args.overrides, args.imports)
        recipe.main(cfg, **({"fresh": True} if args.fresh else {}))


def asked_for(args: argparse.Namespace) -> Asked:
    """What the options say about processes and machines."""
    if args.slurm is None:
        if args.dry_run:
            raise UserError("--dry-run is for --slurm: it writes the script and submits nothing")
        return Asked(args.gpus, args.nodes, args.rendezvous, args.node_rank, args.max_restarts)
    if (args.gpus, args.nodes, args.rendezvous, args.node_rank) != (None, 1, None, None):
        raise UserError("--slurm says how many: write --slurm nodes=4,gpus=8 in place of --nodes and --gpus")
    wanted = Slurm.read(args.slurm)
    meeting = "the first of them:1" if wanted.nodes > 1 else None
    return Asked(wanted.gpus, wanted.nodes, meeting, restarts=args.max_restarts)


def several(args: argparse.Namespace, wishes: Wishes) -> None:
    """Have all checked in a process of its own, for torch takes long to import, and start the ranks."""
    fresh = ["--fresh"] if args.fresh else []
    where = ("--slurm", args.slurm) if args.slurm else args.asked.words
    found = start.found_out((*plain_words(args), *where, *fresh), wishes)
    folder = found["folder"] and Path(found["folder"])
    if found["finished"]:
        return
    if args.slurm:
        again = ["--max-restarts", str(args.max_restarts)] if args.max_restarts else []
        words = (*plain_words(args), *again)
        print(Slurm.read(args.slurm).submit(words, folder or Path(), args.fresh, args.dry_run))
    else:
        job = Job(plain_words(args), args.asked, folder, found["timeout"], found["digest"], args.fresh)
        start.run(job, wishes)


def plain_words(args: argparse.Namespace) -> tuple[str, ...]:
    """The words of `tune` without those that say what runs where, nor `--fresh`: for each of the processes."""
    imports = [word for file in args.imports for word in ("--import", file)]
    debug = ["--debug"] if args.debug else []
    return ("run", args.recipe, "--config", args.config, *args.overrides, *imports, *debug)


def words(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The config and the overrides: the config is the first word unless `--config` names it."""
    if args.config:
        return args.config, args.overrides
    if not args.overrides or ("=" in args.overrides[0] and not Path(args.overrides[0]).is_file()):
        raise UserError(f"which config? tune run {args.recipe} CONFIG key=value; `tune ls {args.recipe}` lists them")
    return args.overrides[0], args.overrides[1:]
