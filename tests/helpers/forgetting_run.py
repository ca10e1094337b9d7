"""An sft run with forgetting detection, on any number of ranks. Has few imports because each rank loads it."""

import torch

from tunekit.errors import UserError
from tunekit.recipes import sft


def train_and_report(cfg: sft.SFTConfig) -> str:
    """Start of the error message; empty if the run succeeded."""
    torch.set_num_threads(1)
    try:
        sft.main(cfg)
    except UserError as error:
        return str(error).partition(" rose from")[0]
    return ""
