"""Memory and time of merging an adapter into a sharded model with a billion parameters, tunekit and peft.

    python benchmarks/merging.py [--shard-size-mb 500] [--rounds 1] [--threads 2] > benchmarks/results/merging.md

Each merge runs in its own process. Memory is the growth since the merge started, separately for private pages
(RssAnon) and mapped file pages (RssFile), which the system can reclaim.
"""

import argparse
import importlib
import json
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path

import torch
from reporting import describe_environment
from resource_usage import MemorySampler
from subprocesses import run_script

from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint import layerwise_forward, merge, peft_adapter, verify
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import INDEX, HFCheckpoint
from tunekit.checkpoint.safetensors_io import SafetensorsWriter
from tunekit.models.decoder import Decoder
from tunekit.models.weight_map import save_mappings

MODEL = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
MODEL |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False}
MODEL |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "rms_norm_eps": 1e-5}
ADAPTERS = {
    "LoRA of all layers, rank 16": LoRAConfig(16),
    "LoRA of all layers and the head, rank 64": LoRAConfig(64, target_modules=("all-linear", "head")),
    "DoRA of all layers, rank 16": DoRAConfig(16),
    "LoRA, trained embedding and head": LoRAConfig(16, modules_to_save=("embed", "head")),
}
METHODS = ("merge", "tune merge", "peft")
MB = 1e6


def plan_shards(source: HFCheckpoint, shard_bytes: float) -> list[dict[str, torch.Size]]:
    """Shapes of the tensors of each file: at most `shard_bytes` bytes in bf16, or one larger tensor."""
    shapes = source.shapes
    shards: list[dict[str, torch.Size]] = [{}]
    total = 0.0
    for mapping in save_mappings(shapes, source.family.table):
        shape = torch.Size(shapes[mapping.ours[0]])
        total += 2 * shape.numel()
        if total > shard_bytes and shards[-1]:
            shards.append({})
            total = 2 * shape.numel()
        shards[-1][mapping.hub[0]] = shape
    return shards


def write_random_checkpoint(directory: Path, shard_bytes: float) -> HFCheckpoint:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    shards = plan_shards(HFCheckpoint.open(directory), shard_bytes)
    weight_map = {}
    for i, shapes in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        with SafetensorsWriter(directory / file, {name: (s, torch.bfloat16) for name, s in shapes.items()}) as writer:
            for name, shape in shapes.items():
                weight_map[name] = file
                writer[name] = (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / 50).bfloat16()
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return HFCheckpoint.open(directory)


def write_random_adapter(directory: Path, source: HFCheckpoint, adapter: LoRAConfig) -> None:
    directory.mkdir()
    with torch.device("meta"):
        model = Decoder(source.spec)
    adapter.apply(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layerwise_forward.allocate(model, trained, torch.device("cpu"))
    with torch.no_grad():
        for name in trained:
            p = model.get_parameter(name)
            p.copy_(torch.ones_like(p) if "magnitude" in name else torch.randn(p.shape) / 50)
    peft_adapter.save_adapter(directory, model, adapter, source)


def merge_with_peft(base: Path, adapter: Path, output: Path) -> None:
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)


def merge_with_tunekit(source: HFCheckpoint, adapter: Path, output: Path, is_verified: bool) -> None:
    output.mkdir()
    directory = AdapterDir.open(adapter)
    merge.merge_adapter(source, directory, output, quiet=True)
    if is_verified:
        verify.verify_merge(output, source, peft_adapter.read_adapter_config(directory, source), torch.device("cpu"))


def measure_in_child(method: str, base: Path, adapter: Path, output: Path) -> dict[str, float]:
    """Memory growth and CPU seconds of one merge in this process."""
    if method == "peft":  # imports are not measured
        importlib.import_module("peft")
        importlib.import_module("transformers")
        run_merge = partial(merge_with_peft, base, adapter, output)
    else:
        run_merge = partial(merge_with_tunekit, HFCheckpoint.open(base), adapter, output, method == "tune merge")
    start = time.process_time()
    with MemorySampler("RssAnon", "RssFile") as sampler:
        run_merge()
    return sampler.growth | {"seconds": time.process_time() - start}


def measure_method(method: str, base: Path, adapter: Path, threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=base.parent) as output:
        paths = str(base), str(adapter), f"{output}/merged"
        return run_script(__file__, "--child", method, *paths, "--threads", str(threads))


def print_report(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        source = write_random_checkpoint(directory / "base", args.shard_size_mb * MB)
        sizes = [file.stat().st_size / MB for file in source.directory.files]
        print(f"# Merging adapters\n\n{date.today()}, {describe_environment('tunekit', 'peft', 'transformers')}.\n")
        print(f"Base: {sum(sizes):,.0f} MB in bf16, {len(sizes)} files, the largest of {max(sizes):,.0f} MB.")
        print("Memory in addition to that before the merge; CPU seconds of all cores. `tune merge` also verifies.\n")
        print("| adapter | method | private pages, MB | relative to the largest file | mapped pages, MB | CPU s |")
        print("|---|---|---|---|---|---|")
        for i, (adapter_name, adapter) in enumerate(ADAPTERS.items()):
            adapter_dir = directory / f"adapter{i}"
            write_random_adapter(adapter_dir, source, adapter)
            for method in METHODS:
                runs = [measure_method(method, source.path, adapter_dir, args.threads) for _ in range(args.rounds)]
                private, mapped = (max(run[key] for run in runs) / MB for key in ("RssAnon", "RssFile"))
                seconds = min(run["seconds"] for run in runs)
                memory = f"{private:,.0f} | {private / max(sizes):.2f} | {mapped:,.0f}"
                print(f"| {adapter_name} | {method} | {memory} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard-size-mb", type=float, default=500, help="maximum size of a file")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", default=None, help="parent of the temporary directory; needs 10 GB")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        method, *paths = args.child
        print(json.dumps(measure_in_child(method, *map(Path, paths))))
    else:
        print_report(args)


if __name__ == "__main__":
    main()
