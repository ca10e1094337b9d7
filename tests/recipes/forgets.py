"""A run that is watched, on any number of ranks. Lean: every rank imports it."""

import torch

from tunekit.errors import UserError
from tunekit.recipes import sft


def trained(cfg: sft.SFTConfig) -> str:
    """What ended it."""
    torch.set_num_threads(1)
    try:
        sft.main(cfg)
    except UserError as error:
        return str(error).partition(" rose from")[0]
    return ""
