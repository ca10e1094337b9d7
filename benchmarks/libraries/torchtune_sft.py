"""SFT with torchtune 0.6.1, in an environment that has it.

python torchtune_sft.py CHECKPOINT_DIR DATA_DIR OUTPUT

Runs its single-device recipes unmodified, except that they start with a given adapter and save nothing. This file
contains components that the config cannot express: tokenized rows and timing.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchao
import torchtune
from omegaconf import DictConfig, OmegaConf
from process_memory import read_peak_memory
from safetensors.torch import load_file
from torchtune.datasets import PackedDataset

PEFT_TO_TORCHTUNE = {
    "model.layers": "layers",
    "self_attn.o_proj": "attn.output_proj",
    "self_attn": "attn",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "lora_A": "lora_a",
    "lora_B": "lora_b",
}
RECIPES = {
    "lora": ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice"),
    "qlora": ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice"),
    "full": ("full_finetune_single_device", "FullFinetuneRecipeSingleDevice"),
}
IGNORE = -100


class TimingLogger:
    """Metric logger that records the time and loss of each step."""

    instances: list["TimingLogger"] = []  # torchtune creates the logger from its config

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak, self.last_step_end = 0, time.perf_counter()
        TimingLogger.instances.append(self)

    def log_config(self, config) -> None:
        """Required by torchtune."""

    def log_dict(self, payload, step) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last_step_end)
        self.losses.append(float(payload["loss"]))
        self.last_step_end, self.peak = now, read_peak_memory()

    def close(self) -> None:
        """Required by torchtune."""


# Components that the config names


def build_tokenizer():
    """Minimal tokenizer: rows are tokenized already."""
    return SimpleNamespace(pad_id=0)


def build_dataset(tokenizer, file: str, max_length: int, packed: bool) -> PackedDataset:
    """Documents in row order, from which greedy packing builds the same rows."""
    documents = [document for row in json.loads(Path(file).read_text()) for document in row]
    samples = [{"tokens": tokens, "labels": [IGNORE, *tokens[1:]]} for tokens in documents]
    return PackedDataset(samples, max_seq_len=max_length)


def build_constant_scheduler(optimizer, num_training_steps: int, last_epoch: int):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0, last_epoch)


# Config


def build_model_config(task: dict) -> dict:
    """Builder of Llama 3.2 with other sizes."""
    sizes = {
        "vocab_size": task["vocab"],
        "num_layers": task["layers"],
        "num_heads": task["heads"],
        "num_kv_heads": task["kv_heads"],
        "embed_dim": task["dim"],
        "intermediate_dim": task["intermediate_size"],
        "max_seq_len": 131072,
    }
    builders = "torchtune.models.llama3_2._component_builders."
    if task["method"] == "full":
        return {"_component_": builders + "llama3_2", **sizes}
    lora = {"lora_rank": task["rank"], "lora_alpha": task["alpha"], "apply_lora_to_mlp": True, "lora_dropout": 0.0}
    lora |= {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"]}
    return {"_component_": builders + "lora_llama3_2", **sizes, **lora, "quantize_base": task["method"] == "qlora"}


def build_checkpointer_config(model: Path, output_dir: Path) -> dict:
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(model),
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": str(output_dir),
        "model_type": "LLAMA3_2",
    }


def build_config(checkpoint_dir: Path, data_dir: Path, task: dict) -> DictConfig:
    rows = {"file": str(data_dir / "rows.json"), "max_length": task["max_length"]}
    return OmegaConf.create(
        {
            "output_dir": str(data_dir),
            "model": build_model_config(task),
            "tokenizer": {"_component_": "__main__.build_tokenizer"},
            "dataset": {"_component_": "__main__.build_dataset", **rows, "packed": True},
            "checkpointer": build_checkpointer_config(checkpoint_dir / "model", data_dir / "torchtune"),
            "resume_from_checkpoint": False,
            "save_adapter_weights_only": True,
            "seed": 0,
            "shuffle": False,
            "batch_size": task["batch_size"],
            "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.0, "lr": task["lr"]},
            "lr_scheduler": {"_component_": "__main__.build_constant_scheduler"},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "epochs": 1,
            "max_steps_per_epoch": task["steps"],
            "gradient_accumulation_steps": 1,
            "optimizer_in_bwd": False,
            "clip_grad_norm": 1.0,
            "compile": False,
            "metric_logger": {"_component_": "__main__.TimingLogger"},
            "log_every_n_steps": 1,
            "device": "cpu",
            "dtype": "bf16",
            "enable_activation_checkpointing": False,
        }
    )


def load_adapter(checkpoint_dir: Path) -> dict[str, torch.Tensor]:
    """Adapter with torchtune's names. torchtune permutes heads for RoPE, which only affects B, and B is zero."""
    tensors = {}
    for peft_name, tensor in load_file(checkpoint_dir / "adapter" / "adapter_model.safetensors").items():
        name = peft_name.removeprefix("base_model.model.")
        for old, new in PEFT_TO_TORCHTUNE.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    return tensors


def load_recipe_class(method: str) -> Any:
    """Recipe of torchtune, whose files are not importable as modules."""
    module_name, class_name = RECIPES[method]
    file = Path(torchtune.__file__).parent.parent / "recipes" / f"{module_name}.py"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[class_name]


def main() -> None:
    checkpoint_dir, data_dir, output = map(Path, sys.argv[1:4])
    task = json.loads((data_dir / "task.json").read_text())
    cfg = build_config(checkpoint_dir, data_dir, task)
    recipe = load_recipe_class(task["method"])(cfg=cfg)
    recipe.setup(cfg=cfg)
    if task["method"] != "full":
        unexpected_keys = recipe._model.load_state_dict(load_adapter(checkpoint_dir), strict=False).unexpected_keys
        assert not unexpected_keys, unexpected_keys
    recipe.save_checkpoint = lambda epoch: None
    timing = TimingLogger.instances[0]
    timing.last_step_end = time.perf_counter()
    recipe.train()
    measurements = {
        "seconds": timing.seconds,
        "losses": timing.losses,
        "peak": timing.peak,
        "threads": torch.get_num_threads(),
        "versions": {package.__name__: package.__version__ for package in (torch, torchtune, torchao)},
    }
    output.write_text(json.dumps(measurements))


if __name__ == "__main__":
    main()
