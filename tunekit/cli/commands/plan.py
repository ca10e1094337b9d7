"""`tune plan`: what a config will need, before it runs."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import recipe_loader, registry
from tunekit.config.dump import dump_yaml
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.plan import estimate, hardware, report, search, suggestions
from tunekit.plan.hardware import GIB, ClusterSpec
from tunekit.plan.num_steps import count_steps
from tunekit.plan.workload import make_workload


def main(args: argparse.Namespace) -> None:
    """Plan, and print it."""
    path = registry.find_config(args.config)
    name = args.recipe or registry.recipe_of_config(path)
    if name is None:
        raise UserError(f"{path} names no recipe: add a line such as 'recipe: sft', or say --recipe sft")
    recipe = recipe_loader.load_recipe(name)
    where = described(args)
    cfg = recipe_loader.load_recipe_config(recipe, args.config, args.overrides, args.imports)
    now = replace(estimate.estimate(make_workload(cfg, where), where), extent=count_steps(cfg))
    changes = suggestions.suggest_changes(now)
    if where.taken:
        print(guessed(args, where), file=sys.stderr if args.json else sys.stdout)
    if not args.json:
        print(report.format_report(now, changes))
    found = search.search_config(now) if args.auto or args.output else None
    if args.json:
        print(json.dumps(report.report_json(now, changes, found), indent=2))
    elif found is not None:
        print(f"\n{report.format_overrides(found)}")
    if args.output and found is not None:
        there = recipe_loader.load_recipe_config(recipe, args.config, [*args.overrides, *found.words], args.imports)
        atomic.write_text_atomic(Path(args.output), dump_yaml(there, name))
        print(f"written: {args.output}{unread(there, now.task.source)}", file=sys.stderr)
    if now.fits is False and found is None:
        raise UserError(f"{path} does not fit {where.label}: --auto looks for the fastest way that does")


def unread(cfg: Any, source: HFCheckpoint) -> str:
    """What a config that is written still lacks before it can run."""
    if source.has_weights or cfg.init == "random" or download.cached_commit(source.path) is not None:
        return ""
    return f"; {cfg.model} has no weights: before it runs, name a checkpoint with model=, or say init=random"


def guessed(args: argparse.Namespace, where: ClusterSpec) -> str:
    """Which GPU is planned for where nobody has named one."""
    assert where.kind is not None and where.memory is not None
    if args.gpu_memory is not None:
        return f"no --gpu-type is named: the speed of {where.kind.label} is taken; --gpu-type names another kind\n"
    taken = f"{where.kind.label} with {where.memory / GIB:.0f} GiB is taken"
    return f"no --gpu-type is named: {taken}; --gpu-type names another kind, --gpu-memory another size\n"


def described(args: argparse.Namespace) -> ClusterSpec:
    """The machine that the words tell of; without any, the CPU."""
    memory = None if args.gpu_memory is None else hardware.parse_memory_size(args.gpu_memory)
    if (args.gpus, args.gpu_type, memory, args.gpu_tflops) == (None, None, None, None) and args.nodes == 1:
        return ClusterSpec(price=args.gpu_hour_price)
    named = args.gpu_type is not None
    kind = hardware.gpu_by_name(args.gpu_type) if named else hardware.gpu_by_memory(memory or 80 * GIB)
    if args.gpu_tflops is not None:
        kind = kind.scaled(args.gpu_tflops)
    devices = (args.gpus or 1) * args.nodes
    size = memory or int(kind.gib * GIB)
    return ClusterSpec(
        devices, args.nodes, kind, size, not named and args.gpu_tflops is None, args.gpu_hour_price, args.mfu
    )
