"""Memory that `tune plan` predicts compared with that of real steps, for several methods and layouts on the CPU.

    python benchmarks/plan.py [--layers 6] [--only lora nf4]

Each case is a process. The measured value is the peak of private memory (RssAnon) minus that of the same process
after a step of the first layer, when all code and matmul kernels are loaded. Freed memory is returned to the system;
`tune run` retains it for speed, up to a third more than it uses. With several ranks, the table shows the maximum. With
experts, all matmul kernels that fit into the cache are created first: in a run, each step adds kernels for the token
counts of its experts.
"""

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from reporting import RESULTS
from resource_usage import MemorySampler

from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.fsdp import apply_fsdp
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.parallelize import parallelize
from tunekit.distributed.sharding import register_shards, to_local
from tunekit.env_info import describe_hardware
from tunekit.kernels import malloc
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec, MoE
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig, MuonConfig
from tunekit.plan import onednn_cache
from tunekit.plan.auxiliary_models import model_dtypes
from tunekit.plan.estimate import estimate
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import CPU, ProbeStep, rows
from tunekit.plan.memory import CPU_RUNTIME_BYTES
from tunekit.plan.workload import Workload
from tunekit.quantization.config import NF4Config, NoQuantization

TRIM_BYTES = 2**16  # freed blocks of at least this size are returned to the system immediately
MODEL = "tunekit/smollm2_135m"
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, 2 micro-batches": {"global_batch_size": 4},
    "full, full checkpointing": {"memory": MemoryConfig(activation_checkpointing="full")},
    "full, selective checkpointing": {"memory": MemoryConfig(activation_checkpointing="selective")},
    "full, 8-bit AdamW": {"optimizer": AdamW8bitConfig()},
    "full, bf16 weights": {"precision": PrecisionConfig("bf16", master_dtype="bf16")},
    "full, optimizer in backward": {"memory": MemoryConfig(optimizer_in_bwd=True), "max_grad_norm": 0.0},
    "full, Muon": {"optimizer": MuonConfig()},
    "lora": {"adapter": LoRAConfig()},
    "lora, nf4": {"adapter": LoRAConfig(), "quantization": NF4Config()},
    "fsdp 2": {"parallel": ParallelConfig()},
    "fsdp 2, bf16 all-gather": {"parallel": ParallelConfig(all_gather_dtype="compute")},
    "ddp 2": {"parallel": ParallelConfig(dp_replicate=2)},
    "fsdp 2, lora": {"parallel": ParallelConfig(), "adapter": LoRAConfig()},
    "tp 2": {"parallel": ParallelConfig(tp=2)},
    "tp 2, lora": {"parallel": ParallelConfig(tp=2), "adapter": LoRAConfig()},
    "cp 2": {"parallel": ParallelConfig(cp=2)},
    "moe": {},
    "moe, fsdp 2": {"parallel": ParallelConfig()},
    "moe, ep 2": {"parallel": ParallelConfig(ep=2)},
    "moe, tp 2, ep 2": {"parallel": ParallelConfig(tp=2, ep=2)},
}
MOE = MoE(8, 6, 384)
# Token counts of experts in earlier steps
EXPERT_TOKEN_COUNTS = range(400, 400 + onednn_cache.CACHE_CAPACITY // onednn_cache.KERNELS_PER_SIZE + 1)


def build_workload(name: str, num_layers: int) -> Workload:
    """Model with fewer layers, and two rows of 512 tokens per micro-batch."""
    source = HFCheckpoint.open(assets.PRESETS[MODEL], MODEL)
    layers = source.spec.layers[:num_layers]
    if "moe" in name:
        layers = tuple(replace(layer, ffn=MOE) for layer in layers)
    if "tp" in name:  # nine heads cannot be divided by 2
        layers = tuple(replace(layer, mixer=replace(layer.mixer, heads=8, kv_heads=4)) for layer in layers)
    source = replace(source, spec=replace(source.spec, layers=layers))
    precision = PrecisionConfig("bf16", frozen_dtype="bf16")
    options = NoAdapter(), NoQuantization(), precision, MemoryConfig(), AdamWConfig(), CrossEntropy(), ParallelConfig()
    base = Workload(source, 512, 2, 2, *options, max_grad_norm=1.0, random_init=False)
    return replace(base, **CONFIGS[name])


def has_experts(workload: Workload) -> bool:
    return any(layer.ffn == MOE for layer in workload.source.spec.layers)


def count_ranks(name: str) -> int:
    """Number of processes of a config."""
    parallel: ParallelConfig | None = CONFIGS[name].get("parallel")
    return 1 if parallel is None else parallel.tp * (1 if parallel.tp > 1 == parallel.ep else 2)


def predict_peak(workload: Workload, num_ranks: int) -> int:
    """Predicted peak bytes of a step on each rank, without the process itself."""
    phases = estimate(workload, ClusterSpec(num_ranks)).memory.phases
    return max(phases[name].total for name in ("forward", "backward", "optimizer_step")) - CPU_RUNTIME_BYTES


def build_probe_batch(workload: Workload, micro_batch_size: int) -> Batch:
    """Batch of the planner, with random tokens."""
    options = workload.adapter, workload.memory, workload.optimizer, workload.loss, workload.max_grad_norm
    batch = rows(ProbeStep(*options, micro_batch_size, workload.max_length, 1))
    tokens = torch.randint(0, workload.source.spec.vocab, batch.tokens.shape)
    targets = tokens.clone()
    targets[:, 0] = IGNORE
    positions = torch.arange(workload.max_length).expand_as(tokens)
    return replace(batch, tokens=tokens, targets=targets, positions=positions)


def build_model(workload: Workload, dist: DistributedContext) -> Decoder:
    """Model with random weights, as in tunekit.build.build_model."""
    model = build.build_meta_model(workload.source, workload.quantization, workload.adapter)
    parallelize(model, dist)
    workload.precision.apply(model, model_dtypes(workload.source, model), CPU)
    workload.memory.apply(model, CPU)
    apply_fsdp(model, dist)
    model.to_empty(device="cpu")
    model.tie()
    register_shards((*model.named_parameters(), *model.named_buffers()), model.shards)
    for parameter in model.parameters():
        local = to_local(parameter.data)
        local.normal_(std=0.02) if parameter.is_floating_point() else local.zero_()
    return model


def run_steps(workload: Workload, num_steps: int, dist: DistributedContext) -> None:
    model = build_model(workload, dist)
    layer_parameters = [p for layer in model.layers for p in layer.parameters()]
    optimizer = workload.optimizer.build(workload.adapter.param_groups(model), layer_parameters)
    train_optimizer = workload.memory.wrap_optimizer(optimizer, dist)
    batch = build_probe_batch(workload, workload.micro_batch_rows(dist.dims))
    num_micro_batches = workload.num_micro_batches(dist.dims)
    for _ in range(num_steps):
        for i in range(1, num_micro_batches + 1):
            dist.set_gradient_sync(model, enabled=i == num_micro_batches)
            (workload.loss(model, batch) / batch.num_target_tokens).backward()
        train_optimizer.clip_grad_norm(workload.max_grad_norm)
        train_optimizer.step()
        train_optimizer.zero_grad()


def measure_peak(workload: Workload) -> int:
    """Peak bytes of two steps, maximum over ranks."""
    one_layer_spec: DecoderSpec = replace(workload.source.spec, layers=workload.source.spec.layers[:1])
    with DistributedContext(device="cpu", parallel=workload.parallel) as dist:
        for threshold in (malloc.TRIM_THRESHOLD, malloc.MMAP_THRESHOLD):  # DistributedContext has set them for speed
            ctypes.CDLL(None).mallopt(threshold, TRIM_BYTES)
        run_steps(replace(workload, source=replace(workload.source, spec=one_layer_spec)), 1, dist)
        with MemorySampler("RssAnon") as sampler:
            if has_experts(workload):
                onednn_cache.create_kernels(EXPERT_TOKEN_COUNTS)
            run_steps(workload, 2, dist)
        return int(dist.max_over_ranks(float(sampler.growth["RssAnon"]))[0])


def run_child(name: str, num_layers: int, quantity: str) -> int:
    """Result of a child process, or of the first of several."""
    command = [sys.executable, __file__, "--layers", str(num_layers), "--child", quantity, name]
    num_ranks = count_ranks(name) if quantity == "measured" else 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = dict(os.environ)
    if num_ranks > 1:
        env |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(num_ranks):
        rank_env = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else env
        processes.append(subprocess.Popen(command, env=rank_env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name}: a rank failed")
    return json.loads(outputs[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=list(CONFIGS), choices=list(CONFIGS), metavar="NAME")
    parser.add_argument("--child", nargs=2, metavar=("QUANTITY", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.child:
        quantity, name = args.child
        workload = build_workload(name, args.layers)
        print(predict_peak(workload, count_ranks(name)) if quantity == "predicted" else measure_peak(workload))
        return
    text = f"# Predicted and measured memory, {date.today()}\n\n"
    text += f"{describe_hardware(CPU)}, torch {torch.__version__}. "
    text += f"{MODEL} with {args.layers} layers, 2 rows of 512 tokens per micro-batch.\n\n"
    text += "| | predicted MiB | measured MiB | error | planning time, s |\n|---|---|---|---|---|\n"
    print(text, end="", flush=True)
    for name in args.only:
        start = time.perf_counter()
        predicted = run_child(name, args.layers, "predicted")
        seconds, measured = time.perf_counter() - start, run_child(name, args.layers, "measured")
        memory = f"{predicted / 2**20:,.0f} | {measured / 2**20:,.0f} | {predicted / measured - 1:+.1%}"
        row = f"| {name} | {memory} | {seconds:.0f} |\n"
        print(row, end="", flush=True)
        text += row
        (args.results / f"{date.today()}-plan.md").write_text(text)


if __name__ == "__main__":
    main()
