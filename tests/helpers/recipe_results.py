"""Runs of a recipe whose result is saved without verification and model card, which take half of the time."""

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tunekit.checkpoint import atomic, final_checkpoint
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.models.decoder import Decoder
from tunekit.training.run_context import RunContext


def save_result(run: RunContext, model: Decoder, checkpoint: HFCheckpoint, *_: object) -> None:
    """Write `final/`."""
    with atomic.AtomicDir(run.final_dir, run.dist) as directory:
        final_checkpoint.save_final(run.cfg.adapter, directory, model, checkpoint, run.dist)


def run_recipe(name: str, cfgs: Sequence[Any]) -> None:
    """Run a recipe with each config, in this process or rank."""
    recipe: Any = importlib.import_module(f"tunekit.recipes.{name}")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "export_final", save_result)
        for cfg in cfgs:
            recipe.main(cfg)
