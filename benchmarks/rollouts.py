"""Tokens per second of rollouts on the CPU: groups of answers of different lengths, compared with transformers.

    python benchmarks/rollouts.py [--threads 2] [--prompts 64] [--answers 8] [--rounds 2] [--static 32 128 512] [--trl]
    python benchmarks/rollouts.py --decode [--preset llama3_2_1b]

A random Qwen3 with 4 layers in fp32. Answers have 16 to 512 tokens: lengths are log-normal around 128, as those of
chat models, and the same for all. transformers generates static batches, in the order of the prompts, until the
longest answer of a batch ends; the best of several batch sizes counts. TRL's GRPOTrainer generates all answers of a
step as one batch. Implementations alternate.

With `--decode`: 8 rows of a Llama in bf16, with the sizes of a preset, compared with the time to read its weights.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from generation import bandwidth, bytes_per_token, make_checkpoint
from preset_shapes import PRESETS
from turns import turns

import tunekit
from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization

QWEN = {
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
SHORTEST, LONGEST = 16, 512
Work = Callable[[], object]


def draw_rows(prompts: int, answers: int) -> tuple[list[list[int]], list[int]]:
    """A prompt and an answer length of each row; `answers` rows in a row have the same prompt of 32 to 96 tokens."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(32, 97, (prompts,), generator=generator).tolist()
    rows = [torch.randint(0, QWEN["vocab_size"], (count,), generator=generator).tolist() for count in counts]
    lengths = (torch.randn(prompts * answers, generator=generator) + 4.85).exp().clamp(SHORTEST, LONGEST)
    return [row for row in rows for _ in range(answers)], lengths.int().tolist()


def load(folder: Path, dtype: str) -> Decoder:
    options = NoQuantization(), FrozenModel(), PrecisionConfig(dtype, frozen_dtype=dtype), MemoryConfig()
    return build.build_model(HFCheckpoint.open(folder), *options, DistributedContext(0, "cpu"))


def ours(model: Decoder, rows: list[list[int]], lengths: list[int], max_num_seqs: int) -> Work:
    def work() -> None:
        engine = GenerationEngine(model, max_num_seqs, max(map(len, rows)) + LONGEST, None)
        requests = [
            GenerationRequest(f"{i}", row, SamplingConfig(1.0, max_new_tokens=length))
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]
        outputs = engine.generate(requests)
        assert [len(row) for row in outputs.values()] == lengths

    return work


def theirs(folder: Path, rows: list[list[int]], lengths: list[int], batch_size: int) -> Work:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def work() -> None:
        for start in range(0, len(rows), batch_size):
            batch, longest = rows[start : start + batch_size], max(lengths[start : start + batch_size])
            width = max(map(len, batch))
            prompts = torch.tensor([[0] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": longest, "pad_token_id": 0}
            output = model.generate(prompts, attention_mask=mask, eos_token_id=None, **options)
            assert output.shape[1] == width + longest

    return work


class StopAtLength(transformers.StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, ends: torch.Tensor) -> None:
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def trl_loop(folder: Path, rows: list[list[int]], lengths: list[int], answers: int) -> Work:
    """Generation of GRPOTrainer, which gets rows of token ids and returns the ids of their answers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    args = trl.GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=len(rows), num_generations=answers, top_k=0, use_cpu=True,
        max_completion_length=LONGEST, bf16=False, report_to=[], gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(tunekit.__file__).with_name("bundled") / "model")
    prompts = Dataset.from_list([{"prompt": "unused"}])
    trainer = trl.GRPOTrainer(model, lambda **columns: [], args, train_dataset=prompts, processing_class=tokenizer)
    ends = torch.tensor(lengths) + max(map(len, rows))
    generate = partial(trainer.model.generate, stopping_criteria=[StopAtLength(ends)])
    trainer.model.generate = generate
    trainer.generation_config.eos_token_id = None
    trainer.generation_config.pad_token_id = trainer.eos_token_ids[0]  # what TRL cuts off

    def work() -> None:
        completions, _ = trainer._generate_single_turn(rows, None, {}, answers)
        assert len(completions) == len(rows)

    return work


def compare_rollouts(args: argparse.Namespace) -> None:
    rows, lengths = draw_rows(args.prompts, args.answers)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN)).save_pretrained(folder)
        model = load(Path(folder), "fp32")
        works = {f"tunekit, {size} rows": ours(model, rows, lengths, size) for size in args.seqs}
        works |= {f"transformers, batches of {size}": theirs(Path(folder), rows, lengths, size) for size in args.static}
        if args.trl:
            works["TRL"] = trl_loop(Path(folder), rows, lengths, args.answers)
    seconds = turns(works, args.rounds, args.clock, warmup=args.warmup)
    times = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(value for name, value in times.items() if name.startswith("transformers"))
    print(f"{len(rows)} answers with {sum(lengths):,} tokens, {min(lengths)} to {max(lengths)}\n")
    print("| | s | tokens/s | times the best static batch |")
    print("|---|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {seconds:.1f} | {sum(lengths) / seconds:,.0f} | {best / seconds:.2f} |")


def measure_decode(args: argparse.Namespace) -> None:
    rate = bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((PRESETS / args.preset / "config.json").read_text("utf-8"))
        model = load(make_checkpoint(Path(folder), config), "bf16")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 49152, (64,), generator=generator).tolist() for _ in range(8)]
    limit = bytes_per_token(model) / rate
    seconds = []
    for _ in range(args.rounds + 1):
        engine = GenerationEngine(model, 8, 256, None)
        for i, row in enumerate(rows):
            engine.add_request(GenerationRequest(f"{i}", row, SamplingConfig(1.0, max_new_tokens=args.tokens + 1)))
        engine.step()
        start = args.clock()
        for _ in range(args.tokens):
            assert len(engine.step()) == 8
        seconds.append((args.clock() - start) / args.tokens)
    step = statistics.median(seconds[1:])
    print(f"8 rows: {step * 1e3:.1f} ms a step, {8 / step:.0f} tokens/s. Reading the weights takes "
          f"{limit * 1e3:.1f} ms at {rate / 1e9:.1f} GB/s: {limit / step:.0%} of the limit")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="further rounds before")
    parser.add_argument("--trl", action="store_true", help="measure the generation of GRPOTrainer, too")
    parser.add_argument("--seqs", type=int, nargs="+", default=[64], help="rows of the engine")
    parser.add_argument("--static", type=int, nargs="+", default=[32, 128, 512], help="batch sizes of transformers")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--preset", default="smollm2_135m", help="with --decode: sizes of the model")
    parser.add_argument("--tokens", type=int, default=127, help="with --decode: tokens of each row")
    parser.add_argument("--cpu", action="store_true", help="CPU time, which other processes affect less")
    args = parser.parse_args()
    args.clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    print(f"{describe_hardware(torch.device('cpu'))}, {args.threads} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, Python {platform.python_version()}; "
          f"load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    measure_decode(args) if args.decode else compare_rollouts(args)


if __name__ == "__main__":
    main()
