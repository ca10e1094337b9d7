"""Where it runs. On one process every collective here is the identity, so recipes never ask how many there are."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tunekit.errors import Stopped, UserError
from tunekit.pages import hold

Handler = Callable[[int, FrameType | None], Any] | int | None  # what Python keeps for a signal


class Run:
    """Device, rank and random state of this process, for as long as the `with` block lasts."""

    rank = 0
    size = 1

    def __init__(self, seed: int = 0, device: str = "auto") -> None:
        self.seed = seed
        self.device = device_of(device)
        if device == "cuda" and self.device.type == "cpu":
            raise UserError("device: cuda, but torch finds no GPU here: leave it out, or install torch for CUDA")
        self.stopping: signal.Signals | None = None
        self.handlers: dict[int, Handler] = {}

    def __enter__(self) -> "Run":
        torch.manual_seed(self.seed)
        if self.device.type == "cpu":
            hold()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """From now on there is something to save: SIGINT and SIGTERM set `stopping`, which is read between two steps.

        A second signal of the same kind does what it always did. Python hands signals to the main thread alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self.handlers[number] = signal.signal(number, self.stop)

    def stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = signal.Signals(number)
        signal.signal(number, self.handlers[number])
        if self.is_main:  # straight to the file: a signal may come in the middle of a print
            os.write(2, f"\n{self.stopping.name}: ending this step and saving; once more leaves at once\n".encode())

    def tell(self, text: str) -> None:
        """A line for people, once for all processes. It stands above a bar, if one is drawn."""
        if self.is_main:
            tqdm.write(text, file=sys.stderr)

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def leave(self, done: int, steps: int) -> None:
        """End the run here if a signal asked for it and steps are left; the state is saved."""
        if self.stopping is not None and done < steps:
            text = f"stopped by {self.stopping.name} after step {done} of {steps}; the same command goes on from there"
            raise Stopped(text, 128 + self.stopping)

    def total(self, count: int) -> int:
        """The sum over all ranks of a number that the host knows."""
        return count

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        return value

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Whether the next backward pass adds gradients up over the ranks."""

    def seed_step(self, step: int) -> None:
        """Randomness of a step (dropout) depends on (seed, step, rank) alone, so a resumed run draws the same."""
        torch.manual_seed(random.Random(f"{self.seed} {step} {self.rank}").getrandbits(63))


def device_of(device: str) -> torch.device:
    """What a choice of device (auto, cpu or cuda) comes to on this machine."""
    cuda = device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


@torch.no_grad()
def put(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, which keeps the part of it that lives on this rank."""
    target.copy_(whole)


def hand_over(target: Tensor, whole: Tensor) -> None:
    """`put` for a tensor that nobody else holds: it becomes the parameter's own, where it fits as it is.

    Nearly all time of loading on the CPU goes into touching memory for the first time, and so is saved.
    """
    like = (whole.dtype, whole.device, whole.stride()) == (target.dtype, target.device, target.stride())
    # MKL's product of fp32 and one row has another last bit where memory is not aligned as torch does it.
    aligned = whole.itemsize < 4 or whole.data_ptr() % 64 == 0
    if like and aligned and whole.untyped_storage().nbytes() == whole.nbytes and type(target.data) is Tensor:
        target.data = whole
    else:
        put(target, whole)
