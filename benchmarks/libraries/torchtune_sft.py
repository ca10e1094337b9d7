"""torchtune 0.6.1: python torchtune_sft.py GIVEN ROWS OUT, in an environment that has it.

Runs its single-device recipes unmodified, except that they start with a given adapter and save nothing. This file
contains components that the config cannot express: tokenized rows and timing.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torchao
import torchtune
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchtune.datasets import PackedDataset

NAMES = {
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
IGNORED = -100


class TimingLogger:
    """Metric logger that records the time and loss of each step."""

    seen: list["TimingLogger"] = []

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak, self.last = 0, time.perf_counter()
        TimingLogger.seen.append(self)

    def log_config(self, config) -> None:
        """Required by torchtune."""

    def log_dict(self, payload, step) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.losses.append(float(payload["loss"]))
        self.last, self.peak = now, peak_rss()

    def close(self) -> None:
        """Required by torchtune."""


def peak_rss() -> int:
    """Peak resident bytes of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def make_tokenizer():
    """Minimal tokenizer: rows are tokenized already."""
    return SimpleNamespace(pad_id=0)


def rows(tokenizer, file: str, length: int, packed: bool) -> PackedDataset:
    """Documents in row order, which greedy packing restores."""
    documents = [document for row in json.loads(Path(file).read_text()) for document in row]
    samples = [{"tokens": d, "labels": [IGNORED, *d[1:]]} for d in documents]
    return PackedDataset(samples, max_seq_len=length)


def constant(optimizer, num_training_steps: int, last_epoch: int):
    """Constant learning rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0, last_epoch)


def model(work: dict) -> dict:
    """Builder of Llama 3.2 with other sizes."""
    sizes = {
        "vocab_size": work["vocab"],
        "num_layers": work["layers"],
        "num_heads": work["heads"],
        "num_kv_heads": work["kv_heads"],
        "embed_dim": work["dim"],
        "intermediate_dim": work["hidden"],
        "max_seq_len": 131072,
    }
    builders = "torchtune.models.llama3_2._component_builders."
    if work["method"] == "full":
        return {"_component_": builders + "llama3_2", **sizes}
    lora = {"lora_rank": work["rank"], "lora_alpha": work["alpha"], "apply_lora_to_mlp": True, "lora_dropout": 0.0}
    lora |= {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"]}
    return {"_component_": builders + "lora_llama3_2", **sizes, **lora, "quantize_base": work["method"] == "qlora"}


def checkpointer(model: Path, out: Path):
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(model),
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": str(out),
        "model_type": "LLAMA3_2",
    }


def config(given: Path, folder: Path, work: dict):
    rows = {"file": str(folder / "rows.json"), "length": work["length"]}
    return OmegaConf.create(
        {
            "output_dir": str(folder),
            "model": model(work),
            "tokenizer": {"_component_": "__main__.words"},
            "dataset": {"_component_": "__main__.rows", **rows, "packed": True},
            "checkpointer": checkpointer(given / "model", folder / "torchtune"),
            "resume_from_checkpoint": False,
            "save_adapter_weights_only": True,
            "seed": 0,
            "shuffle": False,
            "batch_size": work["batch"],
            "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.0, "lr": work["lr"]},
            "lr_scheduler": {"_component_": "__main__.constant"},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "epochs": 1,
            "max_steps_per_epoch": work["steps"],
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


def adapter(given: Path) -> dict[str, torch.Tensor]:
    """Adapter with torchtune's names. torchtune permutes heads for RoPE, which only affects B, and B is zero."""
    tensors = {}
    for name, tensor in load_file(given / "adapter" / "adapter_model.safetensors").items():
        ours = name.removeprefix("base_model.model.")
        for theirs, our_name in NAMES.items():
            ours = ours.replace(theirs, our_name)
        tensors[ours] = tensor
    return tensors


def main() -> None:
    given, folder, out = map(Path, sys.argv[1:4])
    work = json.loads((folder / "work.json").read_text())
    module, name = RECIPES[work["method"]]
    site = Path(torchtune.__file__).parent.parent / "recipes" / f"{module}.py"
    spec = importlib.util.spec_from_file_location(module, site)
    assert spec and spec.loader
    recipes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipes)
    cfg = config(given, folder, work)
    recipe = vars(recipes)[name](cfg=cfg)
    recipe.setup(cfg=cfg)
    if work["method"] != "full":
        wrong = recipe._model.load_state_dict(adapter(given), strict=False).unexpected_keys
        assert not wrong, wrong
    recipe.save_checkpoint = lambda epoch: None
    watch = TimingLogger.seen[0]
    watch.last = time.perf_counter()
    recipe.train()
    result = {"seconds": watch.seconds, "losses": watch.losses, "peak": watch.peak, "threads": torch.get_num_threads()}
    result["versions"] = {
        "torch": torch.__version__,
        "torchtune": torchtune.__version__,
        "torchao": torchao.__version__,
    }
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
