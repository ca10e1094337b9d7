"""Two processes compared with one on the same cores, and communication volume compared with theory.

    python benchmarks/sharding.py [--model tiny|small|135m] [--rounds 3] [--steps 5] [--layouts fsdp ddp tp]

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
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from reporting import CPU, RESULTS
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

# dim, intermediate size, layers, heads, KV heads, vocabulary, tokens per row
MODELS = {
    "tiny": (64, 128, 2, 4, 2, 256, 32),
    "small": (256, 768, 6, 8, 4, 4096, 256),
    "135m": (576, 1536, 30, 9, 3, 49152, 512),
}
ROWS, NUM_EXPERTS, TOP_K = 4, 8, 2
# Number of processes and parallelism
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "single": (1, ParallelConfig()),
    "fsdp": (2, ParallelConfig()),
    "ddp": (2, ParallelConfig(dp_replicate=2, dp_shard=1)),
    "tp": (2, ParallelConfig(tp=2)),
    "cp": (2, ParallelConfig(cp=2)),
    "hsdp": (4, ParallelConfig(dp_replicate=2, dp_shard=2)),
    "moe-fsdp": (2, ParallelConfig()),
    "moe-ep": (2, ParallelConfig(ep=2)),
}
GROUP_SIZE = 2  # processes per process group
WARMUP_STEPS = 2
HEADER = """
| layout | processes | step time, s | speed relative to one process | exposed | hidden | MB sent | expected MB | ratio |
|---|---|---|---|---|---|---|---|---|
"""


def build_model_config(model: str, is_moe: bool) -> dict[str, Any]:
    dim, intermediate_size, layers, heads, kv_heads, vocab, _ = MODELS[model]
    config = {"model_type": "qwen3_moe" if is_moe else "llama", "vocab_size": vocab, "hidden_size": dim}
    config |= {"intermediate_size": intermediate_size, "num_hidden_layers": layers, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv_heads, "head_dim": dim // heads, "max_position_embeddings": 4096}
    config |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    if is_moe:
        config |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}
        config |= {"moe_intermediate_size": intermediate_size // 2}
    return config


# One rank


def build_batch(model: str, step: int, dist: DistributedContext) -> Batch:
    """All rows of this rank in one micro-batch."""
    *_, vocab, length = MODELS[model]
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, vocab, (ROWS, length), generator=generator)[dist.dp_rank :: dist.dims.dp_size]
    return Batch(rows, rows.roll(-1, 1), torch.arange(length).expand_as(rows), None, rows.numel(), rows.numel())


def train_rank(args: argparse.Namespace) -> None:
    """Train on this rank; the main process writes the result."""
    torch.set_num_threads(args.threads)
    with DistributedContext(7, "cpu", LAYOUTS[args.child][1]) as dist:
        fp32 = PrecisionConfig("fp32", "fp32", "fp32")
        options = NoQuantization(), NoAdapter(), fp32, MemoryConfig(), dist
        model = build.build_model(HFCheckpoint.open(args.directory), *options, from_scratch=True)
        parameter_bytes = {name: p.numel() * 4 for name, p in model.named_parameters()}
        cfg = sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o")
        optimizer = MemoryConfig().wrap_optimizer(AdamWConfig().build(NoAdapter().param_groups(model)), dist)

        def run_step(step: int) -> float:
            start = time.perf_counter()
            sft.forward_backward(model, [build_batch(args.model, step, dist)], cfg, dist)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            return time.perf_counter() - start

        seconds = [run_step(step) for step in range(args.steps + WARMUP_STEPS)][WARMUP_STEPS:]
        trace = args.directory / f"trace-{dist.rank}.json"
        write_trace(trace, run_step)
        if dist.is_main_process:
            result = {"seconds": seconds, "parameter_bytes": parameter_bytes, **summarize_trace(trace)}
            (args.directory / "result.json").write_text(json.dumps(result))


def write_trace(file: Path, run_step: Callable[[int], float]) -> None:
    """Write a trace of two steps."""
    phases = schedule(wait=0, warmup=1, active=2)
    with profile(schedule=phases, on_trace_ready=lambda p: p.export_chrome_trace(str(file)), record_shapes=True) as p:
        for step in range(3):
            run_step(step)
            p.step()


def summarize_trace(trace: Path) -> dict[str, Any]:
    """Bytes that the main rank sends per step, by kind, and the fractions of exposed and hidden communication."""
    breakdown = step_breakdown(json.loads(trace.read_text())["traceEvents"])
    fraction = (GROUP_SIZE - 1) / GROUP_SIZE  # of the full tensor that a rank sends
    fractions = {"all-reduce": 2 * fraction, "barrier": 0.0}
    sent = {c.name: c.bytes * fractions.get(c.name, fraction) / breakdown.steps for c in breakdown.collectives}
    return {"sent": sent, "exposed": breakdown.exposed / breakdown.total, "hidden": breakdown.hidden / breakdown.total}


# All layouts


def run_layout(args: argparse.Namespace, layout: str, threads: int) -> dict[str, Any]:
    """Run one layout in its own processes."""
    num_processes = LAYOUTS[layout][0]
    with tempfile.TemporaryDirectory() as directory:
        config = build_model_config(args.model, layout.startswith("moe"))
        (Path(directory) / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__, "--child", layout]
        command += ["--directory", directory, "--model", args.model, "--steps", str(args.steps)]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        process = subprocess.run([*command, "--threads", str(threads)], env=env, capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(f"{layout}: {process.stderr[-3000:]}")
        return json.loads((Path(directory) / "result.json").read_text())


def compute_expected_bytes(model: str, layout: str, parameter_bytes: dict[str, int]) -> float:
    """Bytes that a rank sends in a step with one micro-batch, in fp32.

    FSDP gathers layers for the forward and backward pass and other weights once, and reduces gradients once;
    replicas only reduce gradients. Tensor parallelism communicates inputs and outputs of attention, MLP, embedding
    and head, in both passes. Context parallelism gathers keys and values. Expert parallelism sends tokens to
    experts and back, in both passes.
    """
    dim, _, layers, heads, kv_heads, _, length = MODELS[model]
    layer_bytes = sum(size for name, size in parameter_bytes.items() if name.startswith("layers."))
    expert_bytes = sum(size for name, size in parameter_bytes.items() if ".experts." in name)
    total, fraction = sum(parameter_bytes.values()), (GROUP_SIZE - 1) / GROUP_SIZE
    fsdp = fraction * (layer_bytes + total + total)
    activation_bytes = ROWS * length * 4  # per channel
    if layout == "tp":
        return fraction * activation_bytes * dim * (layers * 8 + 4)
    if layout == "cp":
        return fsdp + fraction * activation_bytes * (dim // heads * kv_heads * 2) * layers * 2
    if layout == "moe-ep":
        dispatch = fraction * activation_bytes // GROUP_SIZE * TOP_K * dim * layers * 4
        return fsdp - 3 * fraction * expert_bytes + dispatch
    by_layout = {"single": 0.0, "ddp": 2 * fraction * total, "hsdp": fsdp + fraction * total}
    return by_layout.get(layout, fsdp)


def format_row(args: argparse.Namespace, layout: str, runs: list[dict[str, Any]], single_step_time: float) -> str:
    num_processes, step_time = LAYOUTS[layout][0], statistics.median(s for run in runs for s in run["seconds"])
    is_comparable = num_processes <= args.threads and not layout.startswith("moe")
    speedup = f"{single_step_time / step_time:.0%}" if is_comparable else ""
    exposed, hidden = (statistics.median(run[key] for run in runs) for key in ("exposed", "hidden"))
    sent = sum(runs[0]["sent"].values()) / 1e6
    expected = compute_expected_bytes(args.model, layout, runs[0]["parameter_bytes"]) / 1e6
    ratio = f"{sent / expected:.2f}" if expected else ""
    times = f"{step_time:.3f} | {speedup} | {exposed:.0%} | {hidden:.0%}"
    return f"| {layout} | {num_processes} | {times} | {sent:.3f} | {expected:.3f} | {ratio} |\n"


def format_report(args: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> str:
    text = f"# Two processes compared with one, {date.today()}\n\n{describe_hardware(CPU)}, torch {torch.__version__}. "
    text += f"{args.model}, {ROWS} rows of {MODELS[args.model][-1]} tokens, fp32, AdamW; {args.threads} threads in "
    text += f"total, {args.rounds} alternating rounds, medians.\n{HEADER}"
    single_step_time = statistics.median(s for run in results["single"] for s in run["seconds"])
    text += "".join(format_row(args, layout, runs, single_step_time) for layout, runs in results.items())
    text += "\nMB per step by kind, sent by the main rank:\n\n"
    for layout, runs in results.items():
        if sent := runs[0]["sent"]:
            text += f"- {layout}: {', '.join(f'{kind} {size / 1e6:.3f}' for kind, size in sent.items())}\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of all processes in total")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train_rank(args)
        return
    results: dict[str, list[dict[str, Any]]] = {layout: [] for layout in dict.fromkeys(["single", *args.layouts])}
    for _ in range(args.rounds):  # alternating, because the load of the machine changes over time
        for layout, runs in results.items():
            runs.append(run_layout(args, layout, max(1, args.threads // LAYOUTS[layout][0])))
            print(f"{layout}: {statistics.median(runs[-1]['seconds']):.3f} s per step", flush=True)
    text = format_report(args, results)
    (args.results / f"{date.today()}-sharding-{args.model}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
