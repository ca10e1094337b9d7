"""Saves the final checkpoint of a run: a full model or an adapter."""

from pathlib import Path

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import peft_adapter, save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder

# Files next to the checkpoint.
CURVES, VERIFICATION = "curves.png", "verification.json"


def save_final(
    adapter: NoAdapter | LoRAConfig,
    folder: Path,
    model: Decoder,
    source: HFCheckpoint,
    dist: DistributedContext | None = None,
) -> None:
    """Save the model, or its adapter in PEFT format, into an existing directory. Must be called on all ranks."""
    if isinstance(adapter, LoRAConfig):
        peft_adapter.save_adapter(folder, model, adapter, source, dist)
    else:
        save_model.save_model(folder, model, source, dist=dist)
