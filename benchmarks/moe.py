"""Time of a forward and backward pass of mixture-of-experts models, tunekit and transformers with the same weights.

python benchmarks/moe.py [--threads 2] [--dtype fp32] [--rounds 4]
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from interleave import Workload, measure_interleaved
from torch import Tensor, nn

from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import DTYPES, PrecisionConfig
from tunekit.quantization.config import NoQuantization

BATCH_SHAPE = (1, 512)
BASE_CONFIG = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
BASE_CONFIG |= {"num_key_value_heads": 4, "intermediate_size": 1024}
CONFIGS = {
    "Qwen3-MoE, 32 experts, top 4": {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True},
    "Mixtral, 8 experts, top 2": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss, 16 experts, top 4": {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 4}
    | {"intermediate_size": 512, "head_dim": 64},
}


def build_models(config: Mapping[str, Any], dtype: str) -> tuple[nn.Module, nn.Module]:
    """Models of tunekit and transformers with the same random weights."""
    torch.manual_seed(0)
    transformers_config = transformers.AutoConfig.for_model(**{**BASE_CONFIG, **config})
    transformers_model = transformers.AutoModelForCausalLM.from_config(transformers_config, dtype=DTYPES[dtype])
    options = NoQuantization(), NoAdapter(), PrecisionConfig(dtype, dtype, dtype), MemoryConfig()
    with tempfile.TemporaryDirectory() as directory:
        transformers_model.save_pretrained(directory)
        source = HFCheckpoint.open(Path(directory))
        return build.build_model(source, *options, DistributedContext(0, "cpu")), transformers_model


def compute_gradients(model: nn.Module, logits: Tensor) -> None:
    """Gradients of all weights that the logits depend on: not those of experts without tokens."""
    torch.autograd.grad(logits.float().logsumexp(-1).mean(), [*model.parameters()], allow_unused=True)


def measure_config(config: Mapping[str, Any], dtype: str, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each library, by round."""
    model, transformers_model = build_models(config, dtype)
    tokens = torch.randint(BASE_CONFIG["vocab_size"], BATCH_SHAPE)
    with torch.no_grad():
        expected = transformers_model(tokens).logits
        difference = (model(tokens) - expected).abs().max() / expected.abs().max()
    print(f"  maximum relative difference of logits {difference:.1e}")
    workloads: dict[str, Workload] = {
        "tunekit": lambda: compute_gradients(model, model(tokens)),
        "transformers": lambda: compute_gradients(transformers_model, transformers_model(tokens).logits),
    }
    return measure_interleaved(workloads, rounds, time.process_time, warmup=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} threads, {args.dtype}")
    for name, config in CONFIGS.items():
        print(name)
        times = measure_config(config, args.dtype, args.rounds)
        for library, seconds in times.items():
            print(f"  {library}, s: {' '.join(f'{s:.3f}' for s in seconds)}")
        tunekit_seconds, transformers_seconds = map(min, times.values())
        print(f"  minimum: tunekit {tunekit_seconds:.3f} s, transformers {transformers_seconds:.3f} s, "
              f"speedup {transformers_seconds / tunekit_seconds:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
