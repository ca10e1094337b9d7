"""What a finished run leaves for others, by what was trained."""

from functools import singledispatch
from pathlib import Path

from tunekit.adapters import Full, LoRA
from tunekit.checkpoint import peft, write
from tunekit.checkpoint.folder import Folder
from tunekit.models.decoder import Decoder


@singledispatch
def final(adapter: Full, out: Path, model: Decoder, source: Folder) -> None:
    """The whole model under the names, dtypes and files of the checkpoint that it came from."""
    write.write(out, model, source)


@final.register
def _(adapter: LoRA, out: Path, model: Decoder, source: Folder) -> None:
    """A folder that PEFT opens."""
    peft.write(out, model, adapter, source)
