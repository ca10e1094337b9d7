"""Common parts of trl runs: model, arguments and timing.

As an experienced user would set it up on a CPU: SDPA, no activation checkpointing, bf16 autocast, fused AdamW.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import torch
import transformers
import trl
from peft import PeftModel
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback

START = time.perf_counter()
MAX_SECONDS = 85.0  # no step starts later: a slow machine runs fewer steps instead of none


class TimingCallback(TrainerCallback):
    """Records the time and loss of each step."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak = 0

    def on_train_begin(self, args, state, control, **more) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **more) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last, self.peak = now, peak_rss()
        control.should_training_stop |= now - START > MAX_SECONDS

    def on_log(self, args, state, control, logs=None, **more) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


class Ordered(Trainer):
    """Reads rows in order."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)


def peak_rss() -> int:
    """Peak resident bytes of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def parse_arguments() -> tuple[Path, Path, Path, dict]:
    """Command-line arguments: directories of the checkpoint and the rows, the output file, and the task."""
    folder, rows, out = map(Path, sys.argv[1:4])
    return folder, rows, out, json.loads((rows / "work.json").read_text())


def load(folder: Path, work: dict):
    """Model, with the given adapter unless all weights are trained."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    more = {"quantization_config": four, "device_map": {"": "cpu"}} if work["method"] == "qlora" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.bfloat16, attn_implementation="sdpa", **more
    )
    if work["method"] == "full":
        return model
    return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)


def arguments(out: Path, work: dict) -> dict[str, Any]:
    """Arguments of the trainer's config."""
    return {
        "output_dir": str(out.parent),
        "use_cpu": True,
        "bf16": True,
        "gradient_checkpointing": False,
        "max_length": None,
        "per_device_train_batch_size": work["batch"],
        "max_steps": work["steps"],
        "learning_rate": work["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def train(trainer: Trainer, watch: TimingCallback, out: Path) -> None:
    """Run all steps and write the result file."""
    trainer.train()
    packages = (torch, transformers, peft, trl, bitsandbytes)
    result = {"seconds": watch.seconds, "losses": watch.losses, "peak": watch.peak, "threads": torch.get_num_threads()}
    result["versions"] = {package.__name__: package.__version__ for package in packages}
    out.write_text(json.dumps(result))
