"""What a finished run leaves for others, by what was trained."""

from functools import singledispatch
from pathlib import Path

from tunekit.adapters import Full, LoRA
from tunekit.checkpoint import peft, write
from tunekit.checkpoint.folder import Folder
from tunekit.models.decoder import Decoder
from tunekit.parallel.run import Run

# What lies beside the checkpoint, for people and for who passes it on.
CURVES, VERIFICATION = "curves.png", "verification.json"


@singledispatch
def final(adapter: Full, folder: Path, model: Decoder, source: Folder, run: Run | None = None) -> None:
    """Into a folder that is there: the model under the names, dtypes and files of the checkpoint that it came from.
    All ranks take part."""
    write.write(folder, model, source, run=run)


@final.register
def _(adapter: LoRA, folder: Path, model: Decoder, source: Folder, run: Run | None = None) -> None:
    """Into a folder that is there: what PEFT opens."""
    peft.write(folder, model, adapter, source, run)
