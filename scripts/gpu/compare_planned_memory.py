"""Memory of a 1B Llama that `tune plan` predicts, compared with the peak memory and step metrics of a run.

python scripts/gpu/compare_planned_memory.py cuda|cpu [--small]
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

OUTPUT_DIR = Path("/tmp/tunekit-gpu-planned")
PRESET, TOKENIZER = "tunekit/llama3_2_1b", "tunekit/nano"
SMALL_CONFIG = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SMALL_CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MAX_LENGTHS = {"cuda": 2048, "cpu": 256}
RUNS = {
    "lora": ("1b_lora", "micro_batch_size=2"),
    "lora, full checkpointing": ("1b_lora", "micro_batch_size=4", "memory.activation_checkpointing=full"),
    "lora, no checkpointing": ("1b_lora", "micro_batch_size=4", "memory.activation_checkpointing=none"),
    "qlora": ("1b_qlora", "micro_batch_size=4"),
    "full": ("1b_full", "micro_batch_size=2"),
    "full, full checkpointing": ("1b_full", "micro_batch_size=4", "memory.activation_checkpointing=full"),
    "full, 8-bit AdamW": ("1b_full", "micro_batch_size=2", "optimizer=adamw8bit"),
}
GIB = 2**30


def write_checkpoint(directory: Path, overrides: dict[str, Any]) -> None:
    """Write random bf16 weights in the Hugging Face format, with the tokenizer of the nano model."""
    source, tokenizer = assets.model_dir(PRESET), assets.model_dir(TOKENIZER)
    assert source is not None and tokenizer is not None
    directory.mkdir(parents=True)
    config = read_json(source / "config.json") | overrides
    config |= {"vocab_size": read_json(tokenizer / "config.json")["vocab_size"]} if overrides else {}
    (directory / "config.json").write_text(json.dumps(config))
    for path in tokenizer.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, directory)
    spec = find_family(config, "config.json")[1]
    with torch.device("meta"):
        shapes = Decoder(spec).shapes
    noise = torch.randn(2**20) * 0.02
    tensors = {get_hf_name(name): make_weight(noise, shape) for name, shape in shapes.items() if name != "head.weight"}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def get_hf_name(name: str) -> str:
    """The name of a weight of a Llama in Hugging Face checkpoints."""
    if name in ("embed.weight", "norm.weight"):
        return f"model.{name.replace('embed', 'embed_tokens')}"
    name = name.replace("attn_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")
    return f"model.{name.replace('.attn.', '.self_attn.')}"


def make_weight(noise: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Ones for a norm, else the repeated noise, which takes less time to draw."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    numel = torch.Size(shape).numel()
    return noise.repeat(-(-numel // len(noise)))[:numel].view(shape).bfloat16()


def run_command(command: list[str]) -> str:
    """Standard output. If the command fails: "", and the last lines of its standard error are printed."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        print(f"exit {process.returncode}: {' | '.join(process.stderr.splitlines()[-3:])[-500:]}", flush=True)
    return process.stdout if process.returncode == 0 else ""


def compare_run(name: str, checkpoint: Path, device: str, max_steps: int) -> bool:
    """Print the planned memory and the metrics of the last step. Returns whether plan and run succeeded."""
    config, *options = RUNS[name]
    run_dir = OUTPUT_DIR / name.replace(" ", "_").replace(",", "")
    data = f"data={{kind: chat, source: tunekit/tools, max_length: {MAX_LENGTHS[device]}, packing: true}}"
    arguments = [f"llama3_2/{config}", f"model={checkpoint}", f"output_dir={run_dir}", f"max_steps={max_steps}", data]
    arguments += ["global_batch_size=8", "eval_data=null", *options, f"device={device}", "log_every=1"]
    hardware = ["--nproc-per-node", "1", "--gpu-type", "h200"] if device == "cuda" else []
    plan = run_command(["tune", "plan", *arguments, "--json", *hardware])
    print(f"{name}: running", flush=True)
    run_command(["tune", "run", "sft", *arguments, "--overwrite"])
    metrics_file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()] if metrics_file.is_file() else []
    steps = [row for row in rows if "loss" in row]
    if not plan or len(steps) < max_steps:
        print(f"FAIL {name}: {len(steps)} of {max_steps} steps", flush=True)
        return False
    phases = {phase: memory["total"] / GIB for phase, memory in json.loads(plan)["phases"].items()}
    planned_peak = max(memory for phase, memory in phases.items() if phase != "save")
    rounded = {phase: round(memory, 2) for phase, memory in phases.items()}
    print(f"{name}: planned {planned_peak:.2f} GiB ({rounded})")
    print(f"{name}: measured {json.dumps(steps[-1])}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="two runs of a small model")
    args = parser.parse_args()
    shutil.rmtree(OUTPUT_DIR, ignore_errors=True)
    checkpoint = OUTPUT_DIR / "model"
    write_checkpoint(checkpoint, SMALL_CONFIG if args.small else {})
    names = [*RUNS][: 2 if args.small else None]
    results = [compare_run(name, checkpoint, args.device, 2 if args.small else 6) for name in names]
    print(f"failed: {results.count(False)}")
    return 1 if False in results else 0


if __name__ == "__main__":
    sys.exit(main())
