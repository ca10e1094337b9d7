"""Tokens per second of generation on the CPU, compared with transformers' `generate`, with the same random
checkpoint.

    python benchmarks/generation.py [--threads 2] [--rounds 3] [--tokens 128] [--batch-sizes 1 4]

A Llama with 135 million parameters in bf16; prompts have 64 tokens, and decoding is greedy. Implementations
alternate; the table shows medians. The limit is the memory bandwidth: all weights are read once per token.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from hardware_limits import measure_read_bandwidth
from interleave import Workload, measure_interleaved
from reporting import describe_environment
from training_step import LLAMA_135M

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

PROMPT_LENGTH = 64
NO_STOP_TOKENS: frozenset[int] = frozenset()
QUANTIZATIONS = {
    "tunekit": NoQuantization(),
    "tunekit, nf4": NF4Config(),
    "tunekit, nf4 with double quantization": NF4Config(double_quant=True),
}
GenerateFunction = Callable[[list[list[int]]], list[list[int]]]  # prompts to answers


def write_random_llama(directory: Path, config: Mapping[str, Any]) -> Path:
    """Random bf16 weights of a Llama in the format of transformers."""
    options = {key: value for key, value in config.items() if key != "architectures"}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).bfloat16().save_pretrained(directory)
    return directory


def load_frozen_model(
    directory: Path, dtype: Literal["bf16", "fp32"], quantization: NoQuantization | None = None
) -> Decoder:
    quantization = quantization or NoQuantization()
    options = quantization, FrozenModel(), PrecisionConfig(dtype, frozen_dtype=dtype), MemoryConfig()
    return build.build_model(HFCheckpoint.open(directory), *options, DistributedContext(0, "cpu"))


def build_tunekit_generate(model: Decoder, max_new_tokens: int) -> GenerateFunction:
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    return lambda prompts: generate_batch(model, prompts, sampling, NO_STOP_TOKENS)


def build_transformers_generate(directory: Path, max_new_tokens: int) -> GenerateFunction:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    options = {"do_sample": False, "min_new_tokens": max_new_tokens, "max_new_tokens": max_new_tokens}

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), pad_token_id=0, **options)
        return output[:, PROMPT_LENGTH:].tolist()

    return generate


def count_weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that are read per token: all, since the embedding is tied to the head."""
    return sum(p.nbytes for p in model.parameters())


def print_rows(
    functions: dict[str, GenerateFunction],
    batch_size: int,
    max_new_tokens: int,
    rounds: int,
    min_seconds: dict[str, float],
) -> None:
    """Print a row per implementation. `min_seconds`: time per token to read the weights."""
    generator = torch.Generator().manual_seed(batch_size)
    prompts = torch.randint(0, LLAMA_135M["vocab_size"], (batch_size, PROMPT_LENGTH), generator=generator).tolist()

    def build_workload(generate: GenerateFunction) -> Workload:
        def run() -> None:
            assert [len(answer) for answer in generate(prompts)] == [max_new_tokens] * batch_size

        return run

    times = measure_interleaved({name: build_workload(generate) for name, generate in functions.items()}, rounds)
    baseline = statistics.median(next(iter(times.values())))
    for name, seconds in times.items():
        median = statistics.median(seconds)
        speed = f"{batch_size * max_new_tokens / median:.1f} | {median / max_new_tokens * 1e3:.1f}"
        print(
            f"| {name} | {batch_size} | {speed} | {baseline / median:.2f} | {min_seconds[name] * 1e3:.1f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    bandwidth = measure_read_bandwidth()
    print(f"{describe_environment('transformers')}; memory read bandwidth {bandwidth / 1e9:.1f} GB/s\n")
    with tempfile.TemporaryDirectory() as name:
        directory = write_random_llama(Path(name), LLAMA_135M)
        models = {name: load_frozen_model(directory, "bf16", config) for name, config in QUANTIZATIONS.items()}
        functions = {"transformers": build_transformers_generate(directory, args.tokens)}
    functions |= {name: build_tunekit_generate(model, args.tokens) for name, model in models.items()}
    min_seconds = {name: count_weight_bytes(model) / bandwidth for name, model in models.items()}
    min_seconds["transformers"] = min_seconds["tunekit"]
    print("| | rows | tokens/s | ms per token | speedup over transformers | ms per token to read the weights |")
    print("|---|---|---|---|---|---|")
    for batch_size in args.batch_sizes:
        print_rows(functions, batch_size, args.tokens, args.rounds, min_seconds)


if __name__ == "__main__":
    main()
