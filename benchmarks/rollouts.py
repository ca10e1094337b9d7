"""Tokens per second of rollouts on the CPU: groups of answers of different lengths, compared with transformers.

    python benchmarks/rollouts.py [--prompts 64] [--num-generations 8] [--static-batch-sizes 32 128 512] [--trl]
    python benchmarks/rollouts.py --decode [--preset llama3_2_1b]

A random Qwen3 with 4 layers in fp32. Answers have 16 to 512 tokens: lengths are log-normal around 128, as those of
chat models, and the same for all. transformers generates static batches, in the order of the prompts, until the
longest answer of a batch ends; the best of several batch sizes counts. TRL's GRPOTrainer generates all answers of a
step as one batch. Implementations alternate.

With `--decode`: 8 rows of a Llama in bf16, with the sizes of a preset, compared with the time to read its weights.
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from generation import count_weight_bytes, load_frozen_model, write_random_llama
from hardware_limits import measure_read_bandwidth
from interleave import Workload, measure_interleaved
from preset_shapes import PRESETS
from reporting import describe_environment

import tunekit
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder

QWEN3_CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
MIN_ANSWER_LENGTH, MAX_ANSWER_LENGTH = 16, 512
DECODE_ROWS = 8


def build_rollouts(num_prompts: int, num_generations: int) -> tuple[list[list[int]], list[int]]:
    """Prompt and answer length of each row. `num_generations` consecutive rows share a prompt of 32 to 96 tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt_lengths = torch.randint(32, 97, (num_prompts,), generator=generator).tolist()
    vocab = QWEN3_CONFIG["vocab_size"]
    prompts = [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in prompt_lengths]
    normal = torch.randn(num_prompts * num_generations, generator=generator)
    answer_lengths = (normal + 4.85).exp().clamp(MIN_ANSWER_LENGTH, MAX_ANSWER_LENGTH)
    return [prompt for prompt in prompts for _ in range(num_generations)], answer_lengths.int().tolist()


def build_tunekit_workload(model: Decoder, prompts: list[list[int]], lengths: list[int], max_num_seqs: int) -> Workload:
    def generate() -> None:
        engine = GenerationEngine(model, max_num_seqs, max(map(len, prompts)) + MAX_ANSWER_LENGTH, None)
        requests = [
            GenerationRequest(f"{i}", prompt, SamplingConfig(1.0, max_new_tokens=length))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        assert [len(answer) for answer in engine.generate(requests).values()] == lengths

    return generate


def build_transformers_workload(
    directory: Path, prompts: list[list[int]], lengths: list[int], batch_size: int
) -> Workload:
    """Static batches in the order of the prompts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate() -> None:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            max_new_tokens, width = max(lengths[start : start + batch_size]), max(map(len, batch))
            input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
            output = model.generate(input_ids, attention_mask=mask, eos_token_id=None, **options)
            assert output.shape[1] == width + max_new_tokens

    return generate


class StopAtLength(transformers.StoppingCriteria):
    """Ends each row at its own length, including the prompt."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


def build_trl_workload(directory: Path, prompts: list[list[int]], lengths: list[int], num_generations: int) -> Workload:
    """Generation of GRPOTrainer, from token ids of prompts to those of answers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    args = trl.GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=len(prompts), num_generations=num_generations, top_k=0,
        max_completion_length=MAX_ANSWER_LENGTH, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(tunekit.__file__).with_name("bundled") / "model")
    dataset = Dataset.from_list([{"prompt": "unused"}])
    trainer = trl.GRPOTrainer(model, lambda **columns: [], args, train_dataset=dataset, processing_class=tokenizer)
    total_lengths = torch.tensor(lengths) + max(map(len, prompts))
    trainer.model.generate = partial(trainer.model.generate, stopping_criteria=[StopAtLength(total_lengths)])
    trainer.generation_config.eos_token_id = None
    trainer.generation_config.pad_token_id = trainer.eos_token_ids[0]  # TRL truncates answers at EOS

    def generate() -> None:
        completions, _ = trainer._generate_single_turn(prompts, None, {}, num_generations)
        assert len(completions) == len(prompts)

    return generate


def compare_rollouts(args: argparse.Namespace) -> None:
    prompts, lengths = build_rollouts(args.prompts, args.num_generations)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.manual_seed(0)
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3_CONFIG)).save_pretrained(directory)
        model, workloads = load_frozen_model(directory, "fp32"), {}
        for size in args.max_num_seqs:
            workloads[f"tunekit, {size} rows"] = build_tunekit_workload(model, prompts, lengths, size)
        for size in args.static_batch_sizes:
            workload = build_transformers_workload(directory, prompts, lengths, size)
            workloads[f"transformers, batches of {size}"] = workload
        if args.trl:
            workloads["TRL"] = build_trl_workload(directory, prompts, lengths, args.num_generations)
    clock = time.process_time if args.cpu_time else time.perf_counter
    times = measure_interleaved(workloads, args.rounds, clock, warmup=args.warmup)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    baseline = min(median for name, median in medians.items() if name.startswith("transformers"))
    print(f"{len(prompts)} answers with {sum(lengths):,} tokens, {min(lengths)} to {max(lengths)}\n")
    print("| | s | tokens/s | speedup over the best static batch |\n|---|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.1f} | {sum(lengths) / median:,.0f} | {baseline / median:.2f} |")


def measure_decode(args: argparse.Namespace) -> None:
    """Print the step time of the engine, relative to the time to read the weights."""
    bandwidth = measure_read_bandwidth()
    with tempfile.TemporaryDirectory() as directory:
        config = json.loads((PRESETS / args.preset / "config.json").read_text("utf-8"))
        model = load_frozen_model(write_random_llama(Path(directory), config), "bf16")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 49152, (64,), generator=generator).tolist() for _ in range(DECODE_ROWS)]
    sampling = SamplingConfig(1.0, max_new_tokens=args.tokens + 1)
    clock = time.process_time if args.cpu_time else time.perf_counter
    step_times = []
    for _ in range(args.rounds + 1):
        engine = GenerationEngine(model, DECODE_ROWS, 256, None)
        for i, prompt in enumerate(prompts):
            engine.add_request(GenerationRequest(f"{i}", prompt, sampling))
        engine.step()
        start = clock()
        for _ in range(args.tokens):
            assert len(engine.step()) == DECODE_ROWS
        step_times.append((clock() - start) / args.tokens)
    step_time, min_seconds = statistics.median(step_times[1:]), count_weight_bytes(model) / bandwidth
    print(f"{DECODE_ROWS} rows: {step_time * 1e3:.1f} ms per step, {DECODE_ROWS / step_time:.0f} tokens/s. Reading the "
          f"weights takes {min_seconds * 1e3:.1f} ms at {bandwidth / 1e9:.1f} GB/s: {min_seconds / step_time:.0%} of "
          "the limit")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--num-generations", type=int, default=8, help="answers per prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not measured")
    parser.add_argument("--trl", action="store_true", help="also measure the generation of GRPOTrainer")
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[64], help="rows of the engine of tunekit")
    parser.add_argument(
        "--static-batch-sizes", type=int, nargs="+", default=[32, 128, 512], help="batch sizes of transformers"
    )
    parser.add_argument("--decode", action="store_true", help="measure only decoding of 8 rows with tunekit")
    parser.add_argument("--preset", default="smollm2_135m", help="with --decode: sizes of the model")
    parser.add_argument("--tokens", type=int, default=127, help="with --decode: tokens of each row")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, which other processes affect less")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    print(f"{describe_environment('transformers', 'trl')}\n")
    measure_decode(args) if args.decode else compare_rollouts(args)


if __name__ == "__main__":
    main()
