"""Memory that `tune plan` predicts for a 1B Llama next to the peak of a run, and what each step takes.

python scripts/gpu/planned.py cuda|cpu [--small]
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tunekit import assets
from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family

HOME = Path("/tmp/tunekit-gpu-planned")
PRESET, TOKENIZER = "tunekit/llama3_2_1b", "tunekit/nano"
SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
DATA = (
    "data={kind: chat, source: tunekit/tools, max_length: LENGTH, packing: true}",
    "global_batch_size=8",
    "eval_data=null",
)
LENGTHS = {"cuda": "2048", "cpu": "256"}
RUNS = {
    "lora": ("1b_lora", "micro_batch_size=2"),
    "lora, recompute": ("1b_lora", "micro_batch_size=4", "memory.activation_checkpointing=full"),
    "lora, no recompute": ("1b_lora", "micro_batch_size=4", "memory.activation_checkpointing=none"),
    "qlora": ("1b_qlora", "micro_batch_size=4"),
    "full": ("1b_full", "micro_batch_size=2"),
    "full, recompute": ("1b_full", "micro_batch_size=4", "memory.activation_checkpointing=full"),
    "full, 8-bit AdamW": ("1b_full", "micro_batch_size=2", "optimizer=adamw8bit"),
}
GIB = 2**30


def write_checkpoint(directory: Path, changes: dict[str, Any]) -> None:
    """Random weights in bf16 under the names of the Hub, and the tokenizer of the nano."""
    source, tokenizer = assets.model_dir(PRESET), assets.model_dir(TOKENIZER)
    assert source is not None and tokenizer is not None
    directory.mkdir(parents=True)
    config = read_json(source / "config.json") | changes
    config |= {"vocab_size": read_json(tokenizer / "config.json")["vocab_size"]} if changes else {}
    (directory / "config.json").write_text(json.dumps(config))
    for file in tokenizer.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, directory)
    spec = find_family(config, "config.json")[1]
    with torch.device("meta"):
        shapes = Decoder(spec).shapes
    noise = torch.randn(2**20) * 0.02
    tensors = {hub_name(name): fill(noise, shape) for name, shape in shapes.items() if name != "head.weight"}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def hub_name(name: str) -> str:
    """The name of a tensor of a Llama in Hugging Face checkpoints."""
    if name in ("embed.weight", "norm.weight"):
        return f"model.{name.replace('embed', 'embed_tokens')}"
    name = name.replace("attn_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")
    return f"model.{name.replace('.attn.', '.self_attn.')}"


def fill(noise: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    count = torch.Size(shape).numel()
    return noise.repeat(-(-count // len(noise)))[:count].view(shape).bfloat16()


def run(command: list[str]) -> str:
    """Standard output; the last lines of an error are printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"exit {done.returncode}: {' | '.join(done.stderr.splitlines()[-3:])[-500:]}", flush=True)
    return done.stdout if done.returncode == 0 else ""


def compare(name: str, checkpoint: Path, device: str, steps: int) -> bool:
    """Plan, run, and print both. Whether both worked."""
    config, *more = RUNS[name]
    out = HOME / name.replace(" ", "_").replace(",", "")
    words = [f"llama3_2/{config}", f"model={checkpoint}", f"output_dir={out}", f"max_steps={steps}", *DATA, *more]
    words = [word.replace("LENGTH", LENGTHS[device]) for word in words]
    words += [f"device={device}", "log_every=1"]
    where = ["--nproc-per-node", "1", "--gpu-type", "h200"] if device == "cuda" else []
    plan = run(["tune", "plan", *words, "--json", *where])
    print(f"{name}: running", flush=True)
    run(["tune", "run", "sft", *words, "--overwrite"])
    metrics = out / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    lines = [line for line in lines if "loss" in line]
    if not plan or len(lines) < steps:
        print(f"FAIL {name}: {len(lines)} of {steps} steps", flush=True)
        return False
    phases = {phase: memory["total"] for phase, memory in json.loads(plan)["phases"].items()}
    planned, last = max(value for phase, value in phases.items() if phase != "save"), lines[-1]
    print(f"{name}: planned {planned / GIB:.2f} GiB ({ {k: round(v / GIB, 2) for k, v in phases.items()} })")
    print(f"{name}: measured {json.dumps(last)}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    shutil.rmtree(HOME, ignore_errors=True)
    write_checkpoint(HOME / "model", SMALL if args.small else {})
    names = [*RUNS][: 2 if args.small else None]
    results = [compare(name, HOME / "model", args.device, 2 if args.small else 6) for name in names]
    print(f"failed: {results.count(False)}")
    return 1 if False in results else 0


if __name__ == "__main__":
    sys.exit(main())
