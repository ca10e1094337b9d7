"""`tune serve` in a child process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import torch

from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization

READY = re.compile(r"serving .* at (http://\S+)/v1")
START_SECONDS = 120


class ServerProcess:
    """A server on a free port. `url` is its address."""

    def __init__(self, *args: str, model: str = "tunekit/nano", **environment: str) -> None:
        command = [sys.executable, "-m", "tunekit.cli", "serve", model, "--port", "0", *args]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, stdin=subprocess.DEVNULL
        )
        timer = Timer(START_SECONDS, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        self.log = ""
        for line in self.process.stdout:
            self.log += line
            if match := READY.match(line):
                break
        timer.cancel()
        assert match, self.log
        self.url = match[1]

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Exit code."""
        output, _ = self.process.communicate(timeout=60)
        self.log += output
        return self.process.returncode

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


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
