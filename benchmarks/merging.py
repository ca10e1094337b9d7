"""Memory and time of merging an adapter into a sharded model with a billion parameters, tunekit and peft.

    python benchmarks/merging.py [--shard 500] [--rounds 1] [--threads 2] > benchmarks/results/merging.md

Each merge runs in its own process. Memory is the growth since the merge started, separately for private pages
(RssAnon) and mapped file pages (RssFile), which the system can reclaim.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from tunekit import env_info
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint import layerwise_forward, merge, peft_adapter, verify
from tunekit.checkpoint.hf_checkpoint import INDEX, HFCheckpoint
from tunekit.checkpoint.peft_reader import model_shapes
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
    "LoRA, embedding and head whole": LoRAConfig(16, modules_to_save=("embed", "head")),
}
MB = 1e6


def make(folder: Path, shard: float) -> HFCheckpoint:
    """Random checkpoint in files of at most `shard` bytes, or of one larger tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    source = HFCheckpoint.open(folder)
    files: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    size = 0.0
    for move in save_mappings(model_shapes(source.spec), source.family.table):
        shape = model_shapes(source.spec)[move.ours[0]]
        size += 2 * torch.Size(shape).numel()
        if size > shard and files[-1]:
            files.append({})
            size = 2 * torch.Size(shape).numel()
        files[-1][move.hub[0]] = shape, torch.bfloat16
    index = {}
    for i, entries in enumerate(files, start=1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        with SafetensorsWriter(folder / name, entries) as out:
            for tensor, (shape, dtype) in entries.items():
                index[tensor] = name
                out[tensor] = torch.ones(shape, dtype=dtype) if len(shape) == 1 else torch.randn(shape).to(dtype) / 50
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return HFCheckpoint.open(folder)


def adapt(folder: Path, source: HFCheckpoint, adapter: LoRAConfig) -> None:
    """Save a random adapter."""
    folder.mkdir()
    with torch.device("meta"):
        net = Decoder(source.spec)
    adapter.apply(net)
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    layerwise_forward.allocate(net, trained, torch.device("cpu"))
    with torch.no_grad():
        for name in trained:
            p = net.get_parameter(name)
            p.copy_(torch.ones_like(p) if "magnitude" in name else torch.randn(p.shape) / 50)
    peft_adapter.save_adapter(folder, net, adapter, source)


class MemoryMonitor:
    """Peak memory of a with block, minus the memory before it."""

    def __enter__(self) -> "MemoryMonitor":
        self.before, self.peak, self.stopped = memory_usage(), memory_usage(), False
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        self.start = time.process_time()
        return self

    def sample(self) -> None:
        while not self.stopped:
            self.peak = {key: max(value, memory_usage()[key]) for key, value in self.peak.items()}
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        self.seconds, self.stopped = time.process_time() - self.start, True
        self.thread.join()

    @property
    def growth(self) -> dict[str, float]:
        return {key: value - self.before[key] for key, value in self.peak.items()} | {"seconds": self.seconds}


def memory_usage() -> dict[str, float]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssFile:")}


def child(method: str, base: Path, adapter: Path, out: Path) -> dict[str, float]:
    """One merge in this process."""
    if method == "peft":
        peft_module, transformers = __import__("peft"), __import__("transformers")
        with MemoryMonitor() as watch:
            model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
            peft_module.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
        return watch.growth
    source = HFCheckpoint.open(base)
    out.mkdir()
    with MemoryMonitor() as watch:
        merge.merge_adapter(source, adapter, out, quiet=True)
        if method == "tune merge":
            choice = peft_adapter.read_adapter_config(adapter, source)
            verify.verify_merge(out, source, replace(choice, adapter_path=str(adapter)), torch.device("cpu"))
    return watch.growth


def run(method: str, base: Path, adapter: Path, threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=base.parent) as out:
        words = [sys.executable, __file__, "--child", method, str(base), str(adapter), f"{out}/merged"]
        done = subprocess.run([*words, "--threads", str(threads)], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def report(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        base = Path(place, "base")
        source = make(base, args.shard * MB)
        sizes = [file.stat().st_size / MB for file in source.files]
        versions = [f"{name} {metadata.version(name)}" for name in ("tunekit", "torch", "peft", "transformers")]
        print("# Merging adapters\n")
        print(f"{', '.join([str(date.today()), env_info.describe_hardware(torch.device('cpu')), *versions])}.\n")
        print(f"Base: {sum(sizes):,.0f} MB in bf16, {len(sizes)} files, the largest of {max(sizes):,.0f} MB.")
        print("Memory beyond what the process held before; seconds of all cores. `tune merge` also verifies.\n")
        print("| adapter | way | own pages, MB | in files | mapped pages, MB | seconds |\n|---|---|---|---|---|---|")
        for i, (name, adapter) in enumerate(ADAPTERS.items()):
            adapt(Path(place, f"adapter{i}"), source, adapter)
            for method in ("merge", "tune merge", "peft"):
                rounds = [run(method, base, Path(place, f"adapter{i}"), args.threads) for _ in range(args.rounds)]
                private, mapped = (max(result[key] for result in rounds) / MB for key in ("RssAnon", "RssFile"))
                seconds = min(result["seconds"] for result in rounds)
                figures = [f"{private:,.0f}", f"{private / max(sizes):.2f}", f"{mapped:,.0f}", f"{seconds:.0f}"]
                print(f"| {' | '.join([name, method, *figures])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=float, default=500, help="megabytes of a file")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--place", default=None, help="folder with 10 GB of room")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        method, *paths = args.child
        print(json.dumps(child(method, *map(Path, paths))))
    else:
        report(args)


if __name__ == "__main__":
    main()
