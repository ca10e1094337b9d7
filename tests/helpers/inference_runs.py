"""Recipes for inference on several ranks. Has few imports because each rank loads it."""

from dataclasses import replace

import torch

from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.recipes import evaluate, generate


def evaluate_and_generate(
    generate_cfg: generate.GenerateConfig, evaluate_cfg: evaluate.EvaluateConfig, layouts: list[ParallelConfig]
) -> list[list]:
    """Results of `evaluate` on each layout. The answers of `generate` are in the file `<output_path>-<index>`."""
    torch.set_num_threads(1)
    results = []
    for index, parallel in enumerate(layouts):
        generate.main(replace(generate_cfg, parallel=parallel, output_path=f"{generate_cfg.output_path}-{index}"))
        results.append(evaluate.main(replace(evaluate_cfg, parallel=parallel)))
    return results
