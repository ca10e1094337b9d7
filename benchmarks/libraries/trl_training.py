"""Model, trainer arguments and timing of the trl runs.

A tuned setup for a CPU: SDPA, no activation checkpointing, bf16 autocast, fused AdamW.
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
from process_memory import read_peak_memory
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, Trainer, TrainerCallback

START = time.perf_counter()
MAX_SECONDS = 85.0  # no step starts later: a slow machine runs fewer steps instead of none


class TimingCallback(TrainerCallback):
    """Records the time and loss of each step."""

    def __init__(self) -> None:
        self.last_step_end = time.perf_counter()
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last_step_end = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last_step_end)
        self.last_step_end, self.peak = now, read_peak_memory()
        control.should_training_stop |= now - START > MAX_SECONDS

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


class SequentialTrainer(Trainer):
    """Reads rows in order."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)


def parse_arguments() -> tuple[Path, Path, Path, dict]:
    """Directories of the checkpoint and of the data, the output file, and the task."""
    checkpoint_dir, data_dir, output = map(Path, sys.argv[1:4])
    return checkpoint_dir, data_dir, output, json.loads((data_dir / "task.json").read_text())


def load_model(checkpoint_dir: Path, task: dict) -> PreTrainedModel | PeftModel:
    """Model, with the initial adapter unless all weights are trained."""
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": nf4, "device_map": {"": "cpu"}} if task["method"] == "qlora" else {}
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint_dir / "model", dtype=torch.bfloat16, attn_implementation="sdpa", **options
    )
    if task["method"] == "full":
        return model
    return PeftModel.from_pretrained(model, checkpoint_dir / "adapter", is_trainable=True)


def build_trainer_arguments(output: Path, task: dict) -> dict[str, Any]:
    """Arguments of SFTConfig and DPOConfig."""
    return {
        "output_dir": str(output.parent),
        "use_cpu": True,
        "bf16": True,
        "gradient_checkpointing": False,
        "max_length": None,
        "per_device_train_batch_size": task["batch_size"],
        "max_steps": task["steps"],
        "learning_rate": task["lr"],
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


def train(trainer: Trainer, timing: TimingCallback, output: Path) -> None:
    """Run all steps, and write the measurements."""
    trainer.train()
    packages = (torch, transformers, peft, trl, bitsandbytes)
    measurements = {
        "seconds": timing.seconds,
        "losses": timing.losses,
        "peak": timing.peak,
        "threads": torch.get_num_threads(),
        "versions": {package.__name__: package.__version__ for package in packages},
    }
    output.write_text(json.dumps(measurements))
