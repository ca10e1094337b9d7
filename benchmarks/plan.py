"""Memory that `tune plan` predicts compared with that of real steps, for some methods and layouts on the CPU.

    python benchmarks/plan.py [--layers 6] [--only lora nf4]

Each case is a process. Measured is the peak of private memory (RssAnon) minus that of the same process after a step
of the first layer, when all code and matmul kernels are loaded. Freed memory is returned to the system; `tune run`
keeps it for speed and then holds up to a third more than it uses. With several ranks, the maximum is shown. With
experts, all matmul kernels that the cache can hold are created first: in a run each step adds some, for the token
counts of its experts.
"""

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.fsdp import apply_fsdp
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.parallelize import parallelize
from tunekit.distributed.sharding import register_shards, to_local
from tunekit.env_info import describe_hardware
from tunekit.kernels import malloc
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec, MoE
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig, MuonConfig
from tunekit.plan import onednn_cache
from tunekit.plan.auxiliary_models import dtypes
from tunekit.plan.estimate import estimate
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import CPU, ProbeStep, rows
from tunekit.plan.memory import PROCESS
from tunekit.plan.workload import Workload
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.system import read_memory_field

GIVEN_BACK = 2**16  # freed blocks of at least this many bytes are returned to the system immediately
BENCHMARKS = Path(__file__).parent
MODEL = "tunekit/smollm2_135m"
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, 2 micro-batches": {"global_batch_size": 4},
    "full, recompute": {"memory": MemoryConfig(activation_checkpointing="full")},
    "full, selective recompute": {"memory": MemoryConfig(activation_checkpointing="selective")},
    "full, 8-bit AdamW": {"optimizer": AdamW8bitConfig()},
    "full, bf16 weights": {"precision": PrecisionConfig("bf16", master_dtype="bf16")},
    "full, step in backward": {"memory": MemoryConfig(optimizer_in_bwd=True), "max_grad_norm": 0.0},
    "full, Muon": {"optimizer": MuonConfig()},
    "lora": {"adapter": LoRAConfig()},
    "lora, nf4": {"adapter": LoRAConfig(), "quantization": NF4Config()},
    "2 ranks": {"parallel": ParallelConfig()},
    "2 ranks, bf16 travels": {"parallel": ParallelConfig(all_gather_dtype="compute")},
    "2 ranks, 2 copies": {"parallel": ParallelConfig(dp_replicate=2)},
    "2 ranks, lora": {"parallel": ParallelConfig(), "adapter": LoRAConfig()},
    "tensor 2": {"parallel": ParallelConfig(tp=2)},
    "tensor 2, lora": {"parallel": ParallelConfig(tp=2), "adapter": LoRAConfig()},
    "context 2": {"parallel": ParallelConfig(cp=2)},
    "experts on 1 rank": {},
    "experts on 2 ranks": {"parallel": ParallelConfig()},
    "expert 2": {"parallel": ParallelConfig(ep=2)},
    "tensor 2, expert 2": {"parallel": ParallelConfig(tp=2, ep=2)},
}
EXPERTS = MoE(8, 6, 384)
# token counts of experts in earlier steps
EXPERT_TOKEN_COUNTS = range(400, 400 + onednn_cache.CACHE_CAPACITY // onednn_cache.KERNELS_PER_SIZE + 1)


def make_task(name: str, layers: int) -> Workload:
    """Model with fewer layers, and two rows of 512 tokens per micro-batch."""
    source = HFCheckpoint.open(assets.PRESETS[MODEL], MODEL)
    chosen = source.spec.layers[:layers]
    if "expert" in name:
        chosen = tuple(replace(layer, ffn=EXPERTS) for layer in chosen)
    if "tensor" in name:  # nine heads cannot be divided by 2
        chosen = tuple(replace(layer, mixer=replace(layer.mixer, heads=8, kv_heads=4)) for layer in chosen)
    source = replace(source, spec=replace(source.spec, layers=chosen))
    precision = PrecisionConfig("bf16", frozen_dtype="bf16")
    options = NoAdapter(), NoQuantization(), precision, MemoryConfig(), AdamWConfig(), CrossEntropy(), ParallelConfig()
    plain = Workload(source, 512, 2, 2, *options, max_grad_norm=1.0, random=False)
    return replace(plain, **CONFIGS[name])


def has_experts(task: Workload) -> bool:
    return any(layer.ffn == EXPERTS for layer in task.source.spec.layers)


def num_ranks(name: str) -> int:
    """Number of processes of a config."""
    parallel: ParallelConfig | None = CONFIGS[name].get("parallel")
    return 1 if parallel is None else parallel.tp * (1 if parallel.tp > 1 == parallel.ep else 2)


def planned_bytes(task: Workload, count: int) -> int:
    """Predicted peak bytes of a step on each rank, without the process itself."""
    phases = estimate(task, ClusterSpec(count)).memory.phases
    return max(phases[name].total for name in ("forward", "backward", "step")) - PROCESS


def run_steps(task: Workload, steps: int, dist: DistributedContext) -> None:
    """Steps of a model with random weights, set up as in assemble.build_model."""
    sizes = dist.dims
    net = build.build_meta_model(task.source, task.quantization, task.adapter)
    parallelize(net, dist)
    task.precision.apply(net, dtypes(task.source, net), CPU)
    task.memory.apply(net, CPU)
    apply_fsdp(net, dist)
    net.to_empty(device="cpu")
    net.tie()
    register_shards((*net.named_parameters(), *net.named_buffers()), net.shards)
    for parameter in net.parameters():
        local = to_local(parameter.data)
        local.normal_(std=0.02) if parameter.is_floating_point() else local.zero_()
    optimizer = task.optimizer.build(
        task.adapter.param_groups(net), [p for layer in net.layers for p in layer.parameters()]
    )
    train_optimizer = task.memory.wrap_optimizer(optimizer, dist)
    shape = ProbeStep(
        task.adapter, task.memory, task.optimizer, task.loss, task.max_grad_norm, task.micro(sizes), task.max_length, 1
    )
    batch = rows(shape)
    tokens = torch.randint(0, task.source.spec.vocab, batch.tokens.shape)
    targets = tokens.clone()
    targets[:, 0] = -100
    places = torch.arange(task.max_length).expand_as(tokens)
    batch = replace(batch, tokens=tokens, targets=targets, positions=places)
    passes = task.num_micro_batches(sizes)
    for _ in range(steps):
        for i in range(1, passes + 1):
            dist.set_gradient_sync(net, enabled=i == passes)
            (task.loss(net, batch) / batch.num_target_tokens).backward()
        train_optimizer.clip_grad_norm(task.max_grad_norm)
        train_optimizer.step()
        train_optimizer.zero_grad()


def measured_bytes(task: Workload) -> int:
    """Measured peak bytes of some steps, maximum over ranks."""
    one_layer_spec: DecoderSpec = replace(task.source.spec, layers=task.source.spec.layers[:1])
    with DistributedContext(device="cpu", parallel=task.parallel) as dist:
        for threshold in (malloc.TRIM_THRESHOLD, malloc.MMAP_THRESHOLD):  # DistributedContext has set them for speed
            ctypes.CDLL(None).mallopt(threshold, GIVEN_BACK)
        run_steps(replace(task, source=replace(task.source, spec=one_layer_spec)), 1, dist)
        return int(dist.max_over_ranks(float(peak_growth(task, dist)))[0])


def process_bytes() -> int:
    """Private bytes of this process."""
    return read_memory_field(onednn_cache.STATUS, "RssAnon") or 0


def peak_growth(task: Workload, dist: DistributedContext) -> int:
    """Peak bytes of two steps in this process."""
    before, peak, done = process_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.003):
            peak[0] = max(peak[0], process_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    if has_experts(task):
        onednn_cache.create_kernels(EXPERT_TOKEN_COUNTS)
    run_steps(task, 2, dist)
    done.set()
    thread.join()
    return peak[0] - before


def run_child(name: str, layers: int, quantity: str) -> int:
    """One value from a child process, or from the first of several."""
    line = [sys.executable, str(BENCHMARKS / "plan.py"), "--layers", str(layers), "--child", quantity, name]
    count = num_ranks(name) if quantity == "measured" else 1
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = dict(os.environ)
    if count > 1:
        env |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environments = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else env for rank in range(count)]
    started = [subprocess.Popen(line, env=process, stdout=subprocess.PIPE, text=True) for process in environments]
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{name}: a rank failed")
    return json.loads(texts[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "results")
    args = parser.parse_args()
    if args.child:
        quantity, name = args.child
        chosen = make_task(name, args.layers)
        print(planned_bytes(chosen, num_ranks(name)) if quantity == "planned" else measured_bytes(chosen))
        return
    text = f"# What was planned, and what was taken, {date.today()}\n\n"
    text += f"{describe_hardware(CPU)}, torch {torch.__version__}. "
    text += f"{MODEL} with {args.layers} layers, rows of 512 tokens, 2 in a pass.\n\n"
    text += "| | planned MiB | measured MiB | off by | seconds to plan |\n|---|---|---|---|---|\n"
    print(text, end="", flush=True)
    for name in args.only:
        start = time.perf_counter()
        planned = run_child(name, args.layers, "planned")
        elapsed, measured = time.perf_counter() - start, run_child(name, args.layers, "measured")
        sizes = f"{planned / 2**20:,.0f} | {measured / 2**20:,.0f} | {planned / measured - 1:+.1%}"
        line = f"| {name} | {sizes} | {elapsed:.0f} |\n"
        print(line, end="", flush=True)
        text += line
        (args.results / f"{date.today()}-plan.md").write_text(text)


if __name__ == "__main__":
    main()
