"""What runs of trl have in common: the model, the arguments, and what is told of the steps.

As an experienced user sets it up on a CPU: SDPA, no recomputing, autocast to bf16, fused AdamW.
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

BEGAN = time.perf_counter()
LAST = 85.0  # seconds after which no further step begins: a slow machine gives fewer steps, and not none


class Watch(TrainerCallback):
    """Seconds of whole steps, and losses."""

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
        self.last, self.peak = now, peak()
        control.should_training_stop |= now - BEGAN > LAST

    def on_log(self, args, state, control, logs=None, **more) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


class Ordered(Trainer):
    """The rows as they come."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)


def peak() -> int:
    """Bytes this process had resident at most."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def given() -> tuple[Path, Path, Path, dict]:
    """What the command line names: the folders of the checkpoint and of the rows, the file to write, and the work."""
    folder, rows, out = map(Path, sys.argv[1:4])
    return folder, rows, out, json.loads((rows / "work.json").read_text())


def load(folder: Path, work: dict):
    """The model, with the adapter that is given unless all of it is trained."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    more = {"quantization_config": four, "device_map": {"": "cpu"}} if work["method"] == "qlora" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.bfloat16, attn_implementation="sdpa", **more
    )
    if work["method"] == "full":
        return model
    return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)


def arguments(out: Path, work: dict) -> dict[str, Any]:
    """Of a trainer's config."""
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


def train(trainer: Trainer, watch: Watch, out: Path) -> None:
    """All steps, and a file of what they took."""
    trainer.train()
    packages = (torch, transformers, peft, trl, bitsandbytes)
    found = {"seconds": watch.seconds, "losses": watch.losses, "peak": watch.peak, "threads": torch.get_num_threads()}
    found["versions"] = {package.__name__: package.__version__ for package in packages}
    out.write_text(json.dumps(found))
