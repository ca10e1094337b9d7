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
from tunekit.plan import estimate, hardware, memory_options, report, search
from tunekit.plan.hardware import GIB, ClusterSpec
from tunekit.plan.num_steps import count_steps
from tunekit.plan.search import MaxLength, SearchResult
from tunekit.plan.workload import make_workload


def main(args: argparse.Namespace) -> None:
    """Print the estimate, and the result of --auto or --max-length."""
    path, name = recipe_loader.find_config_and_recipe(args)
    recipe = recipe_loader.load_recipe(name)
    cluster = find_cluster(args)
    cfg = recipe_loader.load_recipe_config(recipe, args.config, args.overrides, args.imports)
    workload = make_workload(cfg, cluster)
    plan = replace(estimate.estimate(workload, cluster), step_count=count_steps(cfg, workload.source))
    options = memory_options.plan_options(plan)
    if cluster.is_assumed and cluster.gpu is not None and cluster.memory is not None:
        assumed = f"{cluster.gpu.label}, {cluster.memory / GIB:.0f} GiB; set --gpu-type for another GPU"
        print(f"no --gpu-type given: assuming {assumed}\n", file=sys.stderr if args.json else sys.stdout)
    if not args.json:
        print(report.format_report(plan, options))
    result = run_search(args, plan)
    if args.json:
        print(json.dumps(report.report_json(plan, options, result), indent=2))
    elif isinstance(result, SearchResult):
        print(f"\n{report.format_search_result(result)}")
    elif result is not None:
        print(f"\n{report.format_max_length(result)}")
    if args.output and isinstance(result, SearchResult):
        overrides = [*args.overrides, *result.overrides]
        best_cfg = recipe_loader.load_recipe_config(recipe, args.config, overrides, args.imports)
        atomic.write_text_atomic(Path(args.output), dump_yaml(best_cfg, name))
        print(f"written: {args.output}{missing_weights_note(best_cfg, plan.workload.source)}", file=sys.stderr)
    if plan.fits is False and result is None:
        raise UserError(f"{path}: does not fit {cluster.label}. Pass --auto to search for the fastest config that fits")


def find_cluster(args: argparse.Namespace) -> ClusterSpec:
    """The cluster of the arguments. Raise UserError if a search needs its memory, which is unknown."""
    searches = [
        flag for flag, value in (("--auto", args.auto or args.output), ("--max-length", args.max_length)) if value
    ]
    if len(searches) > 1:
        raise UserError("--max-length: cannot be combined with --auto or --output. Use one of them")
    options = args.gpus, args.gpu_type, args.gpu_memory, args.nodes, args.gpu_tflops, args.gpu_hour_price, args.mfu
    cluster = hardware.make_cluster(*options)
    if args.max_length and cluster.gpu is None:  # one device, as `tune run` uses
        cluster = replace(hardware.this_machine(1), price=args.gpu_hour_price, mfu=args.mfu)
    if searches and cluster.memory is None:
        raise UserError(f"{searches[0]}: the memory of a device is unknown. Set --gpu-type h100 or --gpu-memory 80G")
    return cluster


def run_search(args: argparse.Namespace, plan: estimate.Estimate) -> SearchResult | MaxLength | None:
    if args.max_length:
        return search.search_max_length(plan)
    return search.search_config(plan) if args.auto or args.output else None


def missing_weights_note(cfg: Any, source: HFCheckpoint) -> str:
    """Note that the written config needs weights before it can run; empty if it has them."""
    is_on_hub = source.name != cfg.model or download.cached_commit(source.path) is not None
    if is_on_hub or source.has_weights or cfg.init == "random":
        return ""
    return f"; {cfg.model} has no weights: set model= to a checkpoint or init=random before running it"
