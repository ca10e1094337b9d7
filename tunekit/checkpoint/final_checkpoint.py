"""What a finished run leaves for others, by what was trained."""

from functools import singledispatch
from pathlib import Path

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import peft_adapter, save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder

# What lies beside the checkpoint, for people and for who passes it on.
CURVES, VERIFICATION = "curves.png", "verification.json"


@singledispatch
def save_final(
    adapter: NoAdapter, folder: Path, model: Decoder, source: HFCheckpoint, run: DistributedContext | None = None
) -> None:
    """Into a folder that is there: the model under the names, dtypes and files of the checkpoint that it came from.
    All ranks take part."""
    save_model.save_model(folder, model, source, run=run)


@save_final.register
def _(
    adapter: LoRAConfig, folder: Path, model: Decoder, source: HFCheckpoint, run: DistributedContext | None = None
) -> None:
    """Into a folder that is there: what PEFT opens."""
    peft_adapter.save_adapter(folder, model, adapter, source, run)
