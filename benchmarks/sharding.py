"""Two processes compared with one on the same cores, and communication volume compared with theory.

    python benchmarks/sharding.py [--model tiny|small|135m] [--rounds 3] [--steps 5] [--layouts fsdp copies tensor]

One process uses all threads, two use half of them each, and all train the same rows with gloo on this machine.
Bytes and the fraction of communication are read from a trace of two steps. `hsdp` starts four processes and only
measures bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.env_info import describe_hardware
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NoQuantization
from tunekit.recipes import sft
from tunekit.training.trace_analysis import step_breakdown

BENCHMARKS = Path(__file__).parent
# dim, hidden, layers, heads, kv heads, vocabulary, tokens of a row
MODELS = {
    "tiny": (64, 128, 2, 4, 2, 256, 32),
    "small": (256, 768, 6, 8, 4, 4096, 256),
    "135m": (576, 1536, 30, 9, 3, 49152, 512),
}
ROWS, EXPERTS, TOP = 4, 8, 2
# number of processes and parallelism; the last two use a model with experts
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "copies": (2, {"replicate": 2, "shard": 1}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "hsdp": (4, {"replicate": 2, "shard": 2}),
    "experts, fsdp": (2, {}),
    "experts": (2, {"expert": 2}),
}
PAIR = 2  # processes per process group


def model_config(model: str, sparse: bool) -> dict[str, Any]:
    dim, hidden, layers, heads, kv_heads, vocab, _ = MODELS[model]
    config = {"model_type": "qwen3_moe" if sparse else "llama", "vocab_size": vocab, "hidden_size": dim}
    config |= {"intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv_heads, "head_dim": dim // heads, "max_position_embeddings": 4096}
    config |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    if sparse:
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": TOP, "moe_intermediate_size": hidden // 2}
        config |= {"norm_topk_prob": True}
    return config


# One process


def make_batch(model: str, step: int, dist: DistributedContext) -> Batch:
    """All rows of this rank in one micro-batch."""
    *_, vocab, length = MODELS[model]
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(0, vocab, (ROWS, length), generator=draw)[dist.dp_rank :: dist.dims.dp_size]
    return Batch(rows, rows.roll(-1, 1), torch.arange(length).expand_as(rows), None, rows.numel(), rows.numel())


def child(args: argparse.Namespace) -> None:
    """Train on this rank; the main process writes the result."""
    torch.set_num_threads(args.threads)
    count, parallel = LAYOUTS[args.child]
    with DistributedContext(7, "cpu", ParallelConfig(**parallel)) as dist:
        source, fp32 = HFCheckpoint.open(args.folder), PrecisionConfig("fp32", "fp32", "fp32")
        model = build.build_model(source, NoQuantization(), NoAdapter(), fp32, MemoryConfig(), dist, True)
        sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
        cfg = sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o")
        optimizer = MemoryConfig().wrap_optimizer(AdamWConfig().build(NoAdapter().param_groups(model)), dist)

        def step(number: int) -> float:
            start = time.perf_counter()
            sft.forward_backward(model, [make_batch(args.model, number, dist)], cfg, dist)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            return time.perf_counter() - start

        seconds = [step(number) for number in range(args.steps + 2)][2:]
        trace = args.folder / f"trace-{dist.rank}.json"
        profiler_schedule = schedule(wait=0, warmup=1, active=2)
        with profile(
            schedule=profiler_schedule, on_trace_ready=lambda p: p.export_chrome_trace(str(trace)), record_shapes=True
        ) as p:
            for number in range(3):
                step(number)
                p.step()
        if dist.is_main_process:
            result = {"seconds": seconds, "sizes": sizes, **trace_summary(trace)}
            (args.folder / "result.json").write_text(json.dumps(result))


def trace_summary(trace: Path) -> dict[str, Any]:
    """Per step: bytes that the main rank has sent, by kind, and the fractions of communication."""
    breakdown = step_breakdown(json.loads(trace.read_text())["traceEvents"])
    part = {"all-reduce": 2 * (PAIR - 1) / PAIR, "barrier": 0.0}
    sent = {
        exchange.kind: exchange.bytes * part.get(exchange.kind, (PAIR - 1) / PAIR) / breakdown.steps
        for exchange in breakdown.exchanges
    }
    return {"sent": sent, "exposed": breakdown.exposed / breakdown.total, "hidden": breakdown.hidden / breakdown.total}


# All layouts


def run_layout(args: argparse.Namespace, layout: str, threads: int) -> dict[str, Any]:
    """Run one layout in its own processes."""
    count = LAYOUTS[layout][0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(args.model, layout.startswith("experts"))))
        words = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "--rdzv-backend=c10d"]
        words += ["--rdzv-endpoint=127.0.0.1:0", __file__, "--child", layout, "--folder", folder]
        words += ["--model", args.model, "--steps", str(args.steps), "--threads", str(threads)]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{layout}: {done.stderr[-3000:]}")
        return json.loads((Path(folder) / "result.json").read_text())


def expected_bytes(args: argparse.Namespace, layout: str, sizes: dict[str, int]) -> float:
    """Bytes that a rank sends in a step with one micro-batch, in fp32, by layout.

    Sharding gathers layers for the forward and backward pass and other weights once, and reduces gradients once;
    replicas only reduce gradients. Tensor parallelism communicates inputs and outputs of attention, MLP, embedding
    and head, in both passes. Context parallelism gathers keys and values. Expert parallelism sends tokens to
    experts and back, in both passes.
    """
    dim, _, layers, heads, kv_heads, _, length = MODELS[args.model]
    inner = sum(size for name, size in sizes.items() if name.startswith("layers."))
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    total, half = sum(sizes.values()), (PAIR - 1) / PAIR
    sharded = half * (inner + total + total)
    tokens = ROWS * length * 4
    if layout == "tensor":
        return half * tokens * dim * (layers * 8 + 4)
    if layout == "context":
        return sharded + half * tokens * (dim // heads * kv_heads * 2) * layers * 2
    if layout == "experts":
        return sharded - 3 * half * experts + half * tokens // PAIR * TOP * dim * layers * 4
    by_layout = {"one": 0.0, "copies": 2 * half * total, "hsdp": sharded + half * total}
    return by_layout.get(layout, sharded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of one process, divided fairly among several")
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--child", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    names = list(dict.fromkeys(["one", *args.layouts]))
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.rounds):  # alternating, because the load of the machine changes over time
        for name in names:
            results[name].append(run_layout(args, name, max(1, args.threads // LAYOUTS[name][0])))
            print(f"{name}: {statistics.median(results[name][-1]['seconds']):.3f} s a step", flush=True)
    text = report(args, results)
    (args.results / f"{date.today()}-sharding-{args.model}.md").write_text(text)
    print(text)


def report(args: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> str:
    """A line per layout."""
    text = f"# Two processes compared with one, {date.today()}\n\n"
    text += f"{describe_hardware(torch.device('cpu'))}, torch {torch.__version__}. "
    text += (
        f"{args.model}, {ROWS} rows of {MODELS[args.model][-1]} tokens, fp32, AdamW; {args.threads} threads in all, "
    )
    text += f"{args.rounds} rounds in turns, medians.\n\n"
    text += "| layout | processes | s a step | of one process | exposed | hidden | MB sent | in theory | ratio |\n"
    text += "|---|---|---|---|---|---|---|---|---|\n"
    single_seconds = statistics.median(second for runs in results["one"] for second in runs["seconds"])
    for name, runs in results.items():
        count, seconds = LAYOUTS[name][0], statistics.median(s for item in runs for s in item["seconds"])
        share = f"{single_seconds / seconds:.0%}" if count <= args.threads and not name.startswith("experts") else ""
        sent, due = sum(runs[0]["sent"].values()) / 1e6, expected_bytes(args, name, runs[0]["sizes"]) / 1e6
        exposed, hidden = (statistics.median(item[key] for item in runs) for key in ("exposed", "hidden"))
        text += f"| {name} | {count} | {seconds:.3f} | {share} | {exposed:.0%} | {hidden:.0%} | {sent:.3f} | {due:.3f} "
        text += f"| {sent / due:.2f} |\n" if due else "| |\n"
    kinds = {name: runs[0]["sent"] for name, runs in results.items() if runs[0]["sent"]}
    parts = (f"- {name}: " + ", ".join(f"{k} {v / 1e6:.3f}" for k, v in item.items()) for name, item in kinds.items())
    return text + "\nMB of a step by kind, sent by the main rank:\n\n" + "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
