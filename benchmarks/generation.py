"""Tokens per second of generation on the CPU, compared with transformers' `generate`, with the same random
checkpoint.

    python benchmarks/generation.py [--threads 2] [--rounds 3] [--tokens 128] [--batch 1 4]

A Llama with 135 million parameters in bf16; prompts have 64 tokens, and decoding is greedy. Implementations
alternate; the table shows medians. The limit is the memory bandwidth: all weights are read once per token.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from nf4 import SMALL

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

PROMPT = 64
NO_STOP_TOKENS: frozenset[int] = frozenset()  # no token ends an answer
Answer = Callable[[list[list[int]]], list[list[int]]]


def make_checkpoint(folder: Path, sizes: Mapping[str, Any] = SMALL) -> Path:
    """Random bf16 weights of a Llama in the format of transformers."""
    config = transformers.LlamaConfig(**{key: value for key, value in sizes.items() if key != "architectures"})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def ours(model: Decoder, tokens: int) -> Answer:
    return lambda rows: generate_batch(model, rows, SamplingConfig(max_new_tokens=tokens), NO_STOP_TOKENS)


def theirs(folder: Path, tokens: int) -> Answer:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}

    @torch.inference_mode()
    def answer(rows: list[list[int]]) -> list[list[int]]:
        prompts = torch.tensor(rows)
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        return output[:, PROMPT:].tolist()

    return answer


def bytes_per_token(model: torch.nn.Module) -> int:
    """Bytes of weights that are read per token: all except an untied embedding."""
    sizes = {id(p): p.nbytes for p in model.parameters()}
    return sum(sizes.values())


def bandwidth() -> float:
    """Bytes per second while summing 512 MB, which no cache holds."""
    tensor, seconds = torch.ones(2**27), []
    for _ in range(5):
        start = time.perf_counter()
        tensor.sum()
        seconds.append(time.perf_counter() - start)
    return tensor.nbytes / min(seconds)


def compare(
    implementations: dict[str, Answer], batch: int, rounds: int, tokens: int, bytes_: dict[str, int], rate: float
) -> None:
    """Print a line per implementation: tokens per second, milliseconds per token, and the fraction of the limit."""
    rows = torch.randint(0, SMALL["vocab_size"], (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    for i in range(rounds + 1):
        for name, answer in implementations.items():
            start = time.perf_counter()
            output = answer(rows.tolist())
            assert [len(row) for row in output] == [tokens] * batch
            if i:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        middle = statistics.median(times)
        speed = f"{batch * tokens / middle:.1f} | {middle / tokens * 1e3:.1f} | {first / middle:.2f}"
        print(f"| {name} | {batch} | {speed} | {bytes_[name] / rate * 1e3:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    rate = bandwidth()
    print(f"{describe_hardware(torch.device('cpu'))}, {args.threads} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, Python {platform.python_version()}; "
          f"load {os.getloadavg()[0]:.1f}; memory is read at {rate / 1e9:.1f} GB/s\n")  # fmt: skip
    precision = PrecisionConfig("bf16", frozen_dtype="bf16")
    with tempfile.TemporaryDirectory() as place:
        folder = make_checkpoint(Path(place))
        kinds = {
            "tunekit": NoQuantization(),
            "tunekit, nf4": NF4Config(),
            "tunekit, nf4 nested": NF4Config(double_quant=True),
        }
        models = {
            name: build.build_model(
                HFCheckpoint.open(folder),
                weights,
                FrozenModel(),
                precision,
                MemoryConfig(),
                DistributedContext(0, "cpu"),
            )
            for name, weights in kinds.items()
        }
        answers = {"transformers": theirs(folder, args.tokens)}
        answers |= {name: ours(model, args.tokens) for name, model in models.items()}
    bytes_ = {name: bytes_per_token(model) for name, model in models.items()}
    bytes_["transformers"] = bytes_["tunekit"]
    print("| | rows | tokens/s | ms a token | times transformers | ms a token that reading takes |")
    print("|---|---|---|---|---|---|")
    for batch in args.batch:
        compare(answers, batch, args.rounds, args.tokens, bytes_, rate)


if __name__ == "__main__":
    main()
