"""`tune plan`: what a config will need, before it runs."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit import catalog, launch
from tunekit.checkpoint import atomic
from tunekit.checkpoint.folder import Folder
from tunekit.config.dump import dump
from tunekit.errors import UserError
from tunekit.hub import fetch
from tunekit.plan import advice, fit, machine, outcome, report
from tunekit.plan.extent import extent
from tunekit.plan.machine import GIB, Machine
from tunekit.plan.task import task


def main(args: argparse.Namespace) -> None:
    """Plan, and print it."""
    path = catalog.config(args.config)
    name = args.recipe or catalog.written_for(path)
    if name is None:
        raise UserError(f"{path} names no recipe: add a line such as 'recipe: sft', or say --recipe sft")
    recipe = launch.recipe(name)
    where = described(args)
    cfg = launch.read(recipe, args.config, args.overrides, args.imports)
    now = replace(outcome.plan(task(cfg, where), where), extent=extent(cfg))
    changes = advice.changes(now)
    if where.taken:
        print(guessed(args, where), file=sys.stderr if args.json else sys.stdout)
    if not args.json:
        print(report.text(now, changes))
    found = fit.fit(now) if args.fit or args.write else None
    if args.json:
        print(json.dumps(report.data(now, changes, found), indent=2))
    elif found is not None:
        print(f"\n{report.fitted(found)}")
    if args.write and found is not None:
        there = launch.read(recipe, args.config, [*args.overrides, *found.words], args.imports)
        atomic.write_text(Path(args.write), dump(there, name))
        print(f"written: {args.write}{unread(there, now.task.source)}", file=sys.stderr)
    if now.fits is False and found is None:
        raise UserError(f"{path} does not fit {where.label}: --fit looks for the fastest way that does")


def unread(cfg: Any, source: Folder) -> str:
    """What a config that is written still lacks before it can run."""
    if source.has_weights or cfg.init == "random" or fetch.commit(source.path) is not None:
        return ""
    return f"; {cfg.model} has no weights: before it runs, name a checkpoint with model=, or say init=random"


def guessed(args: argparse.Namespace, where: Machine) -> str:
    """Which GPU is planned for where nobody has named one."""
    assert where.kind is not None and where.memory is not None
    if args.gpu_memory is not None:
        return f"no --gpu is named: the speed of {where.kind.label} is taken; --gpu names another kind\n"
    taken = f"{where.kind.label} with {where.memory / GIB:.0f} GiB is taken"
    return f"no --gpu is named: {taken}; --gpu names another kind, --gpu-memory another size\n"


def described(args: argparse.Namespace) -> Machine:
    """The machine that the words tell of; without any, the CPU."""
    memory = None if args.gpu_memory is None else machine.size(args.gpu_memory)
    if (args.gpus, args.gpu, memory, args.tflops) == (None, None, None, None) and args.nodes == 1:
        return Machine(price=args.price)
    named = args.gpu is not None
    kind = machine.kind_of(args.gpu) if named else machine.fitting(memory or 80 * GIB)
    if args.tflops is not None:
        kind = kind.scaled(args.tflops)
    devices = (args.gpus or 1) * args.nodes
    size = memory or int(kind.gib * GIB)
    return Machine(devices, args.nodes, kind, size, not named and args.tflops is None, args.price, args.reached)
