"""Runs with answers of the model in training. Has few imports because each rank loads it."""

from dataclasses import replace

from tunekit.config import load
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.recipes import sft


def run_layouts(config: str, layouts: list[tuple[str, ParallelConfig]]) -> None:
    """Run a config once for each layout, in directories with these names."""
    cfg = load.load_config(sft.CONFIG, config)
    for name, parallel in layouts:
        sft.main(replace(cfg, output_dir=f"{cfg.output_dir}/{name}", parallel=parallel))
