"""Saves the final checkpoint of a run: a full model or an adapter."""

from functools import singledispatch
from pathlib import Path

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import peft_adapter, save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder

# Files next to the checkpoint.
CURVES, VERIFICATION = "curves.png", "verification.json"


@singledispatch
def save_final(
    adapter: NoAdapter, folder: Path, model: Decoder, source: HFCheckpoint, run: DistributedContext | None = None
) -> None:
    """Save the full model into an existing directory. Must be called on all ranks."""
    save_model.save_model(folder, model, source, run=run)


@save_final.register
def _(
    adapter: LoRAConfig, folder: Path, model: Decoder, source: HFCheckpoint, run: DistributedContext | None = None
) -> None:
    """Save the adapter in PEFT format into an existing directory. Must be called on all ranks."""
    peft_adapter.save_adapter(folder, model, adapter, source, run)
