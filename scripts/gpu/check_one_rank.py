"""FSDP and NCCL (on the CPU: gloo) with one rank: loss and gradient norm of families, adapters and memory options.

python scripts/gpu/check_one_rank.py cuda|cpu [--families NAME ...]
"""

import argparse
import sys
import tempfile
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
from tunekit.selftest.worker import describe_error

FAMILIES = ("llama3.2", "gemma2", "gemma3", "phi3-long", "qwen3-moe", "llama4", "qwen3.5")
DOCUMENT_LENGTHS = (20, 22, 18, 30)
CONFIGS: dict[str, tuple[NoAdapter | LoRAConfig, MemoryConfig, ParallelConfig]] = {
    "full": (NoAdapter(), MemoryConfig(), ParallelConfig()),
    "lora": (LoRAConfig(4), MemoryConfig(), ParallelConfig()),
    "parallel.all_gather_dtype": (NoAdapter(), MemoryConfig(), ParallelConfig(all_gather_dtype="compute")),
    "memory.activation_checkpointing": (NoAdapter(), MemoryConfig(activation_checkpointing="full"), ParallelConfig()),
    "memory.activation_offloading": (LoRAConfig(4), MemoryConfig(activation_offloading=True), ParallelConfig()),
    "parallel.cpu_offload": (NoAdapter(), MemoryConfig(), ParallelConfig(cpu_offload=True)),
}


def compute_losses_and_grad_norm(source: HFCheckpoint, config: str, dist: DistributedContext) -> list[float]:
    """Loss of a packed batch, loss of a padded batch, and the norm of the sum of their gradients."""
    adapter, memory, dist.parallel = CONFIGS[config]
    model = build.build_model(source, NoQuantization(), adapter, PrecisionConfig("bf16", "fp32", "fp32"), memory, dist)
    documents, losses = nano.random_documents(model.spec.vocab, DOCUMENT_LENGTHS), []
    for capacity, rows in ((128, [documents[:2], documents[2:]]), (0, [[document] for document in documents])):
        batch = nano.packing(capacity, len(rows)).collate_rows(rows)[0]
        loss = CrossEntropy()(model, batch.to(dist.device))
        loss.backward()
        losses.append(loss.item())
    parameters = [p for p in model.parameters() if p.grad is not None]
    grad_norm = clip_grad.total_grad_norm(parameters, dist)
    clip_grad.clip_gradients(parameters, grad_norm, 1.0)
    return [round(value, 4) for value in (*losses, float(grad_norm))]


def iter_cases(families: list[str], device: str) -> Iterator[tuple[str, str]]:
    """Each family with each config that the device supports."""
    for family in families:
        for config, (_, memory, parallel) in CONFIGS.items():
            if device == "cuda" or not (memory.activation_offloading or parallel.cpu_offload):
                yield family, config


def main() -> int:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--families", nargs="*", default=[*FAMILIES], metavar="NAME")
    args = parser.parse_args()
    num_failures = 0
    with one_rank_environment(), DistributedContext(0, args.device) as dist:
        print("device mesh:", dist.mesh, flush=True)
        for family, config in iter_cases(args.families, args.device):
            with tempfile.TemporaryDirectory() as directory:
                try:
                    source = HFCheckpoint.open(make_checkpoint(Path(directory), family), family)
                    values = compute_losses_and_grad_norm(source, config, dist)
                    print(f"ok {family} {config}: losses and grad_norm {values}", flush=True)
                except Exception as error:  # noqa: BLE001 (the other cases run anyway)
                    print(f"FAIL {family} {config}: {describe_error(error)}", flush=True)
                    num_failures += 1
    print(f"failed: {num_failures}")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
