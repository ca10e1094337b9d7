"""Time of a forward and backward pass of mixture-of-experts models, tunekit and transformers with the same weights.

python benchmarks/experts.py [--threads 2] [--dtype fp32] [--rounds 4]
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import DTYPES, PrecisionConfig
from tunekit.quantization.config import NoQuantization

ROWS = (1, 512)
SIZES = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "intermediate_size": 1024}
SHAPES = {
    "Qwen3-MoE, 32 experts, 4 chosen": {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True},
    "Mixtral, 8 experts, 2 chosen": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss, 16 experts, 4 chosen": {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 4}
    | {"intermediate_size": 512, "head_dim": 64},
}


def seconds(model: nn.Module, logits: Callable[[Any], torch.Tensor], tokens: torch.Tensor) -> float:
    """One step, without the optimizer."""
    start = time.process_time()
    logits(model(tokens)).float().logsumexp(-1).mean().backward()
    elapsed = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return elapsed


def measure(shape: Mapping[str, Any], dtype: str, rounds: int) -> tuple[float, float]:
    """Minimum over the rounds, of tunekit and transformers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**SIZES, **shape})
    other = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    tokens = torch.randint(config.vocab_size, ROWS)
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        choices = (
            NoQuantization(),
            NoAdapter(),
            PrecisionConfig(dtype, dtype, dtype),
            MemoryConfig(),
            DistributedContext(0, "cpu"),
        )
        mine = build.build_model(HFCheckpoint.open(Path(folder)), *choices)
    with torch.no_grad():
        gap = (mine(tokens) - other(tokens).logits).abs().max() / other(tokens).logits.abs().max()
    print(f"  largest relative difference of logits {gap:.1e}")
    times = [(seconds(mine, lambda y: y, tokens), seconds(other, lambda y: y.logits, tokens)) for _ in range(rounds)]
    for ours, theirs in times:
        print(f"  ours {ours:.3f} s, transformers {theirs:.3f} s")
    return min(ours for ours, _ in times), min(theirs for _, theirs in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} threads, {args.dtype}")
    for name, shape in SHAPES.items():
        print(name)
        ours, theirs = measure(shape, args.dtype, args.rounds)
        print(f"  best: ours {ours:.3f} s, transformers {theirs:.3f} s, {theirs / ours:.2f} times as fast")


if __name__ == "__main__":
    main()
