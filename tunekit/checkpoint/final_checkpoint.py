"""Saves the final checkpoint of a run: a full model or an adapter."""

from pathlib import Path

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import load_adapter, peft_adapter, save_model
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.load_model import check_tensors
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


def result_bytes(adapter: NoAdapter | LoRAConfig, model: Decoder, source: HFCheckpoint) -> int:
    """Size of the tensors that `save_final` writes. The model may be on the meta device."""
    if isinstance(adapter, LoRAConfig):
        return peft_adapter.plan_adapter(peft_adapter.AdaptedModel.open(model, adapter, source)).num_bytes
    return sum(map(save_model.tensor_bytes, save_model.model_entries(model, source).values()))


def try_to_save(adapter: NoAdapter | LoRAConfig, folder: Path, model: Decoder, source: HFCheckpoint) -> None:
    """Write all files into an existing directory, without tensor data, and open them.

    The model may be on the meta device. Raises UserError if they cannot be written, or loaded again.
    """
    if isinstance(adapter, LoRAConfig):
        plan = peft_adapter.plan_adapter(peft_adapter.AdaptedModel.open(model, adapter, source))
        peft_adapter.create_adapter_files(folder, source, plan)
        load_adapter.check_can_open(AdapterDir.open(folder), model, adapter, source)
    else:
        entries = save_model.model_entries(model, source)
        save_model.create_model_files(folder, source, save_model.plan_shards(entries, source), entries)
        saved = HFCheckpoint.open(folder)
        check_tensors(saved, model.shapes if saved.spec == source.spec else saved.shapes)
