"""Recipes that only ask a model, on several ranks. Lean: every rank imports it."""

from dataclasses import replace

import torch

from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.recipes import evaluate, generate


def both(
    asked: generate.GenerateConfig, measured: evaluate.EvaluateConfig, layouts: list[ParallelConfig]
) -> list[list]:
    """What `evaluate` finds on each layout; the answers of `generate` lie in a file for each, `<out>-<number>`."""
    torch.set_num_threads(1)
    found = []
    for number, parallel in enumerate(layouts):
        generate.main(replace(asked, parallel=parallel, output_path=f"{asked.output_path}-{number}"))
        found.append(evaluate.main(replace(measured, parallel=parallel)))
    return found
