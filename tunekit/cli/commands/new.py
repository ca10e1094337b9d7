"""`tune new`: write a config for a model and a dataset that fits this machine."""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tunekit import build
from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import recipe_loader
from tunekit.config import load
from tunekit.config.dump import to_yaml
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.plan.auxiliary_models import model_or_preset
from tunekit.plan.draft_config import Draft, draft_config, draft_name
from tunekit.plan.hardware import ClusterSpec, make_cluster, this_machine
from tunekit.plan.report import format_duration, format_gib
from tunekit.plan.sample_rows import RowSample, sample_rows
from tunekit.training.data_checks import column_warnings


def main(args: argparse.Namespace) -> None:
    """Write the config, and print its plan and the next commands."""
    if Path(args.model).is_file():
        raise UserError(f"{args.model}: a file, but the model comes first. Usage: tune new MODEL DATA")
    sample = sample_rows(args.data, args.task)
    source, is_complete = open_source(args.model)
    output = Path(args.output or f"{draft_name(args.model, args.data, args.task)}.yaml")
    if output.exists() and not args.force:
        raise UserError(f"{output}: already exists. Pass --force to overwrite it, or --output for another file")
    recipe, gpu_options = recipe_loader.load_recipe(sample.task), (args.gpus, args.gpu_type, args.gpu_memory)
    cluster = this_machine() if gpu_options == (None, None, None) else make_cluster(*gpu_options)
    load_tree = partial(load_draft, recipe.CONFIG)
    draft = draft_config(args.model, source, sample, args.full, load_tree, cluster)
    draft.tree["output_dir"] = f"runs/{output.stem}"
    command = shlex.join(["tune", "new", args.model, args.data])
    atomic.write_text_atomic(output, draft.format(f"Written by `{command}` for {cluster.label}"))
    if is_complete:
        cfg = recipe_loader.load_recipe_config(recipe, str(output), (), ())
        recipe.check(cfg)
        draft.problems += column_warnings(cfg)
    for problem in draft.problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(f"written: {output}", file=sys.stderr)
    print(describe_draft(draft, sample, output, cluster))


def load_draft(cls: type, tree: dict[str, Any]) -> Any:
    return load.load_config(cls, to_yaml(tree))


def open_source(model: str) -> tuple[HFCheckpoint, bool]:
    """The checkpoint of a model with its tokenizer; or a preset with its shape, if it cannot be downloaded."""
    name = model_or_preset(model)
    if name != model:
        return build.resolve_checkpoint(name, download.SMALL)[0], False
    source, adapter = build.resolve_checkpoint(model, download.SMALL)
    if adapter.adapter_path is not None:
        raise UserError(f"{model}: an adapter. Merge it with `tune merge`, and use the result.")
    if download.cached_commit(source.path) is None and not source.has_weights:
        raise UserError(f"{model}: has no weights. Use a checkpoint, or train one from scratch: docs/checkpoints.md")
    return source, True


def describe_draft(draft: Draft, sample: RowSample, output: Path, cluster: ClusterSpec) -> str:
    """The plan in one line, and the commands to type next."""
    assert draft.plan is not None
    run = f"tune run {output}" + (f" --nproc-per-node {cluster.devices}" if cluster.devices > 1 else "")
    steps = draft.plan.step_count
    numbers = [f"at most {format_gib(draft.plan.peak.total)} GiB of {cluster.label}"]
    numbers += [f"{'' if steps.exact else 'about '}{steps.steps:,} steps"] if steps is not None else []
    numbers += [f"about {format_duration(draft.plan.hours * 3600)}"] if draft.plan.hours is not None else []
    use = f"tune chat {draft.tree['output_dir']}" if sample.task not in ("reward", "embed") else ""
    rows = [(f"tune data {output}", "show the rows and their loss masks"), (run, "train; resumes if it is interrupted")]
    rows += [(use, "talk to the result")] if use else []
    width = max(len(command) for command, _ in rows)
    return "\n".join([", ".join(numbers), "", "next:", *(f"  {command:{width}}  {text}" for command, text in rows)])
