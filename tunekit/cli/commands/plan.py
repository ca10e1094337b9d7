"""`tune plan`: estimate memory and time of a config before it runs."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import recipe_loader
from tunekit.config.dump import dump_yaml
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.plan import estimate, hardware, report, search, suggestions
from tunekit.plan.hardware import GIB, ClusterSpec
from tunekit.plan.num_steps import count_steps
from tunekit.plan.workload import make_workload


def main(args: argparse.Namespace) -> None:
    """Print the estimate, and the config found by --auto."""
    path, name = recipe_loader.find_config_and_recipe(args)
    recipe = recipe_loader.load_recipe(name)
    machine = args.gpus, args.gpu_type, args.gpu_memory, args.nodes
    cluster = hardware.make_cluster(*machine, args.gpu_tflops, args.gpu_hour_price, args.mfu)
    if args.auto or args.output:
        search.check_memory_is_known(cluster)
    cfg = recipe_loader.load_recipe_config(recipe, args.config, args.overrides, args.imports)
    workload = make_workload(cfg, cluster)
    plan = replace(estimate.estimate(workload, cluster), step_count=count_steps(cfg, workload.source))
    changes = suggestions.suggest_changes(plan)
    if cluster.is_assumed:
        print(assumed_gpu_note(args, cluster), file=sys.stderr if args.json else sys.stdout)
    if not args.json:
        print(report.format_report(plan, changes))
    best = search.search_config(plan) if args.auto or args.output else None
    if args.json:
        print(json.dumps(report.report_json(plan, changes, best), indent=2))
    elif best is not None:
        print(f"\n{report.format_overrides(best)}")
    if args.output and best is not None:
        best_cfg = recipe_loader.load_recipe_config(recipe, args.config, [*args.overrides, *best.words], args.imports)
        atomic.write_text_atomic(Path(args.output), dump_yaml(best_cfg, name))
        print(f"written: {args.output}{missing_weights_note(best_cfg, plan.task.source)}", file=sys.stderr)
    if plan.fits is False and best is None:
        raise UserError(f"{path}: does not fit {cluster.label}. Pass --auto to search for the fastest config that fits")


def missing_weights_note(cfg: Any, source: HFCheckpoint) -> str:
    """Note that the written config needs weights before it can run; empty if it has them."""
    is_on_hub = source.name != cfg.model or download.cached_commit(source.path) is not None
    if is_on_hub or source.has_weights or cfg.init == "random":
        return ""
    return f"; {cfg.model} has no weights: set model= to a checkpoint or init=random before running it"


def assumed_gpu_note(args: argparse.Namespace, cluster: ClusterSpec) -> str:
    """Note about the GPU type that is assumed without --gpu-type."""
    assert cluster.kind is not None and cluster.memory is not None
    if args.gpu_memory is not None:
        assumed = (
            cluster.kind.label if cluster.kind not in hardware.KINDS.values() else f"the speed of {cluster.kind.label}"
        )
        return f"no --gpu-type given: assuming {assumed}; set --gpu-type for another GPU\n"
    assumed = f"{cluster.kind.label} with {cluster.memory / GIB:.0f} GiB"
    return f"no --gpu-type given: assuming {assumed}; set --gpu-type or --gpu-memory for another GPU\n"
