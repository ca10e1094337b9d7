"""FSDP and NCCL (on the CPU: gloo) with one rank: loss and gradient norm of families, adapters and memory options.

python scripts/gpu/one_rank.py cuda|cpu [--names NAME ...]
"""

import argparse
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.random_checkpoints import make_checkpoint
from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed import clip_grad
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization
from tunekit.selftest import nano
from tunekit.selftest.process_checks import one_rank_environment

NAMES = ("llama3.2", "gemma2", "gemma3", "phi3-long", "qwen3-moe", "llama4", "qwen3.5")
LENGTHS = (20, 22, 18, 30)
CASES: dict[str, tuple[NoAdapter | LoRAConfig, MemoryConfig, ParallelConfig]] = {
    "full": (NoAdapter(), MemoryConfig(), ParallelConfig()),
    "lora": (LoRAConfig(4), MemoryConfig(), ParallelConfig()),
    "gather=compute": (NoAdapter(), MemoryConfig(), ParallelConfig(all_gather_dtype="compute")),
    "recompute": (NoAdapter(), MemoryConfig(activation_checkpointing="full"), ParallelConfig()),
    "memory.activation_offloading": (LoRAConfig(4), MemoryConfig(activation_offloading=True), ParallelConfig()),
    "parallel.cpu_offload": (NoAdapter(), MemoryConfig(), ParallelConfig(cpu_offload=True)),
}


def numbers(source: HFCheckpoint, case: str, dist: DistributedContext) -> list[float]:
    """Losses packed and padded, and the gradient norm."""
    adapter, memory, dist.parallel = CASES[case]
    model = build.build_model(source, NoQuantization(), adapter, PrecisionConfig("bf16", "fp32", "fp32"), memory, dist)
    documents, losses = nano.random_documents(model.spec.vocab, LENGTHS), []
    for capacity, rows in ((128, [documents[:2], documents[2:]]), (0, [[document] for document in documents])):
        batch = nano.packing(capacity, len(rows)).collate_rows(rows)[0]
        loss = CrossEntropy()(model, batch.to(dist.device))
        loss.backward()
        losses.append(loss.item())
    trained = [p for p in model.parameters() if p.grad is not None]
    length = clip_grad.total_grad_norm(trained, dist)
    clip_grad.clip_gradients(trained, length, 1.0)
    return [round(value, 4) for value in (*losses, float(length))]


def cases(names: list[str], device: str) -> Iterator[tuple[str, str]]:
    for name in names:
        for case, (_, memory, parallel) in CASES.items():
            if device == "cuda" or not (memory.activation_offloading or parallel.cpu_offload):
                yield name, case


def main() -> int:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--names", nargs="*", default=[*NAMES])
    args = parser.parse_args()
    failed = 0
    with one_rank_environment(), DistributedContext(0, args.device) as dist:
        print("process group:", dist.mesh, flush=True)
        for name, case in cases(args.names, args.device):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    source = HFCheckpoint.open(make_checkpoint(Path(folder), name), name)
                    print(f"ok {name} {case} {numbers(source, case, dist)}", flush=True)
                except Exception as error:  # noqa: BLE001 (the other cases are tried anyway)
                    trace = traceback.extract_tb(error.__traceback__)
                    frame = [f for f in trace if "site-packages" not in f.filename][-1]
                    text = " ".join(str(error).split())[:300]
                    at = f"{Path(frame.filename).name}:{frame.lineno}"
                    print(f"FAIL {name} {case} {type(error).__name__}: {text} at {at}", flush=True)
                    failed += 1
    print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
