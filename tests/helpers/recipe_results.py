"""Runs of a recipe that save their results. Verification and model cards, half of the time of a run, are left out."""

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tunekit.checkpoint import atomic, final_checkpoint
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.models.decoder import Decoder
from tunekit.training import train_loop
from tunekit.training.run_context import RunContext


def save_result(run: RunContext, model: Decoder, checkpoint: HFCheckpoint, *_: object) -> None:
    """Write `final/`."""
    with atomic.AtomicDir(run.final_dir, run.dist) as directory:
        final_checkpoint.save_final(run.cfg.adapter, directory, model, checkpoint, run.dist)


def run_recipe(name: str, cfgs: Sequence[Any], verified: Any = None) -> None:
    """Run a recipe with each config, in this process or rank. The result of the config `verified` is verified."""
    recipe: Any = importlib.import_module(f"tunekit.recipes.{name}")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_loop, "export_final", save_result)
        for cfg in cfgs:
            recipe.main(cfg)
    if verified is not None:
        recipe.main(verified)
