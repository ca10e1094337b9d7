"""`tune serve` in a child process."""

import os
import re
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.helpers.forkserver import start_forkserver
from tests.helpers.wait import wait_until
from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import main as cli
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization

READY = re.compile(r"^serving .* at (http://\S+)/v1", re.MULTILINE)


class ServerProcess:
    """A server on a free port. `url` is its address."""

    def __init__(self, *args: str, model: str = "tunekit/nano", **environment: str) -> None:
        self.folder = TemporaryDirectory()
        self.log_file = Path(self.folder.name) / "log"
        self.log_file.touch()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
        words = ("serve", model, "--port", "0", *args)
        self.process = start_forkserver().Process(target=run_command, args=(words, env, self.log_file), daemon=True)
        self.process.start()
        wait_until(lambda: READY.search(self.log), self.process)
        match = READY.search(self.log)
        assert match, self.log
        self.url = match[1]

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int | None:
        """Exit code."""
        self.process.join(60)
        return self.process.exitcode

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.folder.cleanup()


def run_command(words: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
    """Run `tune` with an environment and with its output in a file, as in a process of its own."""
    file = os.open(log, os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    sys.exit(cli.main(words))


def write_random_adapter(directory: Path, adapter: LoRAConfig, seed: int) -> Path:
    """Write an adapter of tunekit/nano that changes its answers."""
    checkpoint = HFCheckpoint.open(assets.MODELS["tunekit/nano"], "tunekit/nano")
    model = build.build_model(
        checkpoint, NoQuantization(), adapter, PrecisionConfig(), MemoryConfig(), DistributedContext()
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator)
    directory.mkdir()
    peft_adapter.save_adapter(directory, model, adapter, checkpoint)
    return directory
