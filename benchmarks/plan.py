"""What `tune plan` tells beside what a step takes, for some ways to train and to share a model, on the CPU.

python benchmarks/plan.py [--layers 6] [--only lora nf4]

Each is a process of its own. Counted is memory of its own (RssAnon) at most, less that of the same process behind a
step of the first layer of the model, when all code is loaded and products have their kernels. Freed memory goes back to
the system there: `tune run` keeps it for speed, and then holds up to a third more than it uses. Of several ranks the
one that took most is told. With experts as many kernels of products are there as are kept: in a run each step brings
some, for the numbers of tokens that experts get in it, and a few hundred steps all of them.
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
from tunekit.plan.estimate import estimate
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import CPU, ProbeStep, rows
from tunekit.plan.memory import PROCESS
from tunekit.plan.onednn_cache import own
from tunekit.plan.workload import Workload, dtypes
from tunekit.quantization.config import NF4Config, NoQuantization

GIVEN_BACK = 2**16  # bytes from which freed memory goes back to the system at once
HERE = Path(__file__).parent
MODEL = "tunekit/smollm2_135m"
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, 2 passes a step": {"batch": 4},
    "full, recompute": {"memory": MemoryConfig(activation_checkpointing="full")},
    "full, selective recompute": {"memory": MemoryConfig(activation_checkpointing="selective")},
    "full, 8-bit AdamW": {"optimizer": AdamW8bitConfig()},
    "full, bf16 weights": {"precision": PrecisionConfig("bf16", master_dtype="bf16")},
    "full, step in backward": {"memory": MemoryConfig(optimizer_in_bwd=True), "clip": 0.0},
    "full, Muon": {"optimizer": MuonConfig()},
    "lora": {"adapter": LoRAConfig()},
    "lora, nf4": {"adapter": LoRAConfig(), "weights": NF4Config()},
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
FILLING = range(400, 400 + onednn_cache.KEPT // onednn_cache.EACH + 1)  # tokens of an expert in steps before


def task(way: str, layers: int) -> Workload:
    """The model, shortened, with two rows of 512 tokens in a pass."""
    source = HFCheckpoint.open(assets.PRESETS[MODEL], MODEL)
    chosen = source.spec.layers[:layers]
    if "expert" in way:
        chosen = tuple(replace(layer, ffn=EXPERTS) for layer in chosen)
    if "tensor" in way:  # which nine heads are not divided by
        chosen = tuple(replace(layer, mixer=replace(layer.mixer, heads=8, kv_heads=4)) for layer in chosen)
    source = replace(source, spec=replace(source.spec, layers=chosen))
    precision = PrecisionConfig("bf16", frozen_dtype="bf16")
    how = NoAdapter(), NoQuantization(), precision, MemoryConfig(), AdamWConfig(), CrossEntropy(), ParallelConfig()
    plain = Workload(source, 512, 2, 2, *how, max_grad_norm=1.0, random=False)
    return replace(plain, **WAYS[way])


def sparse(task: Workload) -> bool:
    return any(layer.ffn == EXPERTS for layer in task.source.spec.layers)


def ranks(way: str) -> int:
    """Processes that a way takes."""
    parallel: ParallelConfig | None = WAYS[way].get("parallel")
    return 1 if parallel is None else parallel.tp * (1 if parallel.tp > 1 == parallel.ep else 2)


def planned(task: Workload, count: int) -> int:
    """Bytes of a step at most on each rank, without the process itself."""
    phases = estimate(task, ClusterSpec(count)).room.phases
    return max(phases[name].total for name in ("forward", "backward", "step")) - PROCESS


def stepped(task: Workload, steps: int, run: DistributedContext) -> None:
    """Steps of a model of random weights, in the order of assemble.model."""
    sizes = run.sizes
    net = build.build_meta_model(task.source, task.quantization, task.adapter)
    parallelize(net, run)
    task.precision.apply(net, dtypes(task.source, net), CPU)
    task.memory.apply(net, CPU)
    apply_fsdp(net, run)
    net.to_empty(device="cpu")
    net.tie()
    register_shards((*net.named_parameters(), *net.named_buffers()), net.shards)
    for parameter in net.parameters():
        here = to_local(parameter.data)
        here.normal_(std=0.02) if parameter.is_floating_point() else here.zero_()
    optimizer = task.optimizer.build(
        task.adapter.param_groups(net), [p for each in net.layers for p in each.parameters()]
    )
    train_optimizer = task.memory.wrap_optimizer(optimizer, run)
    shape = ProbeStep(
        task.adapter, task.memory, task.optimizer, task.loss, task.max_grad_norm, task.micro(sizes), task.max_length, 1
    )
    batch = rows(shape)
    tokens = torch.randint(0, task.source.spec.vocab, batch.tokens.shape)
    targets = tokens.clone()
    targets[:, 0] = -100
    places = torch.arange(task.max_length).expand_as(tokens)
    batch = replace(batch, tokens=tokens, targets=targets, positions=places)
    passes = task.parts(sizes)
    for _ in range(steps):
        for i in range(1, passes + 1):
            run.set_gradient_sync(net, enabled=i == passes)
            (task.loss(net, batch) / batch.num_target_tokens).backward()
        train_optimizer.clip_grad_norm(task.max_grad_norm)
        train_optimizer.step()
        train_optimizer.zero_grad()


def measured(task: Workload) -> int:
    """Bytes of some steps at most, on any rank."""
    one: DecoderSpec = replace(task.source.spec, layers=task.source.spec.layers[:1])
    with DistributedContext(device="cpu", parallel=task.parallel) as run:
        for threshold in (malloc.TRIM_THRESHOLD, malloc.MMAP_THRESHOLD):  # `DistributedContext` has set them for speed
            ctypes.CDLL(None).mallopt(threshold, GIVEN_BACK)
        stepped(replace(task, source=replace(task.source, spec=one)), 1, run)
        return int(run.max_over_ranks(float(watched(task, run)))[0])


def watched(task: Workload, run: DistributedContext) -> int:
    """Bytes of two steps at most, in this process."""
    before, most, done = own(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.003):
            most[0] = max(most[0], own())

    thread = threading.Thread(target=watch)
    thread.start()
    if sparse(task):
        onednn_cache.make(FILLING)
    stepped(task, 2, run)
    done.set()
    thread.join()
    return most[0] - before


def child(way: str, layers: int, what: str) -> int:
    """One number from a process of its own, or from the first of several."""
    line = [sys.executable, str(HERE / "plan.py"), "--layers", str(layers), "--child", what, way]
    count = ranks(way) if what == "measured" else 1
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = dict(os.environ)
    if count > 1:
        env |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else env for rank in range(count)]
    started = [subprocess.Popen(line, env=one, stdout=subprocess.PIPE, text=True) for one in told]
    texts = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        raise SystemExit(f"{way}: a rank failed")
    return json.loads(texts[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.child:
        what, way = args.child
        chosen = task(way, args.layers)
        print(planned(chosen, ranks(way)) if what == "planned" else measured(chosen))
        return
    text = f"# What was planned, and what was taken, {date.today()}\n\n"
    text += f"{describe_hardware(CPU)}, torch {torch.__version__}. "
    text += f"{MODEL} with {args.layers} layers, rows of 512 tokens, 2 in a pass.\n\n"
    text += "| | planned MiB | measured MiB | off by | seconds to plan |\n|---|---|---|---|---|\n"
    print(text, end="", flush=True)
    for way in args.only:
        began = time.perf_counter()
        told = child(way, args.layers, "planned")
        spent, taken = time.perf_counter() - began, child(way, args.layers, "measured")
        line = f"| {way} | {told / 2**20:,.0f} | {taken / 2**20:,.0f} | {told / taken - 1:+.1%} | {spent:.0f} |\n"
        print(line, end="", flush=True)
        text += line
        (args.results / f"{date.today()}-plan.md").write_text(text)


if __name__ == "__main__":
    main()
