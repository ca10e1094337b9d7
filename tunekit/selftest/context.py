"""Arguments of every check: the device and a directory to write to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tunekit.devices import ACCELERATORS
from tunekit.selftest.result import Result


@dataclass(frozen=True)
class Context:
    """The device that is checked, and an empty directory that is removed afterwards."""

    device: torch.device
    directory: Path


CheckFunction = Callable[[Context], Result]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type in ACCELERATORS:
        torch.accelerator.synchronize(device)
