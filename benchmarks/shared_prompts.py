"""Preference pairs with shared prompts compared with repeated prompts: time and memory of a training pass.

    python benchmarks/shared_prompts.py [--layers 6] [--pairs 4] [--prompt-length 256] [--answer-length 64] [--rounds 4]

Log-probabilities of both answers, the DPO loss, and gradients. Each run is a process; the variants alternate.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from reporting import describe_environment, format_range
from resource_usage import read_memory
from subprocesses import run_script
from torch import Tensor
from training_inputs import LlamaShape

from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.distributed.context import DistributedContext
from tunekit.losses.sequence_logps import sequence_logps
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization

VARIANTS, ADAPTERS = ("repeated", "shared"), {"LoRA": LoRAConfig(16), "full": NoAdapter()}
BETA = 0.1
OPTIONS = {"layers": 6, "pairs": 4, "prompt-length": 256, "answer-length": 64, "rounds": 4, "steps": 4, "threads": 2}


def build_documents(args: argparse.Namespace, vocab: int) -> TokenizedDataset:
    """Chosen and rejected documents alternate."""
    rng, documents = np.random.default_rng(0), []
    length = args.prompt_length + args.answer_length
    for _ in range(args.pairs):
        prompt = rng.integers(1, vocab, args.prompt_length)
        for answer in rng.integers(1, vocab, (2, args.answer_length)):
            loss_mask = np.arange(length) >= args.prompt_length
            documents.append(Document(np.concatenate([prompt, answer]).astype(np.int32), loss_mask, length))
    return TokenizedDataset.from_documents(documents)


def build_batch(args: argparse.Namespace, vocab: int, share_prefixes: bool) -> Batch:
    """All pairs in one packed row."""
    documents = build_documents(args, vocab)
    capacity = int(documents.lengths.sum())
    collator = Collator(1, 1, 0, 1, 0, capacity, 2, with_document_ids=True, share_prefixes=share_prefixes)
    return collator.micro_batches(documents, [np.arange(len(documents))])[0]


def compute_dpo_loss(model: Decoder, batch: Batch) -> Tensor:
    chosen, rejected = sequence_logps(model, batch).pairs
    return -F.logsigmoid(BETA * (chosen.logps - rejected.logps)).sum()


def measure_in_child(args: argparse.Namespace) -> dict[str, float | list[float]]:
    """Forward and backward passes of one variant: times, memory in addition to the model, and the loss."""
    variant, adapter = args.child
    torch.set_num_threads(args.threads)
    shape = LlamaShape(layers=args.layers)
    with tempfile.TemporaryDirectory() as directory, DistributedContext(0, "cpu") as dist:
        Path(directory, "config.json").write_text(json.dumps(shape.config))
        options = NoQuantization(), ADAPTERS[adapter], PrecisionConfig("bf16", "fp32", "bf16"), MemoryConfig(), dist
        model = build.build_model(HFCheckpoint.open(Path(directory)), *options, from_scratch=True)
        batch = build_batch(args, shape.vocab, share_prefixes=variant == "shared")
        initial_bytes, seconds = read_memory("VmRSS"), []
        for _ in range(args.steps + 1):
            start = time.perf_counter()
            loss = compute_dpo_loss(model, batch)
            loss.backward()
            seconds.append(time.perf_counter() - start)
            model.zero_grad()
    peak_bytes = read_memory("VmHWM") - initial_bytes
    return {"seconds": seconds[1:], "tokens": batch.num_tokens, "peak": peak_bytes, "loss": float(loss)}


def run_child(args: argparse.Namespace, variant: str, adapter: str) -> dict:
    options = [f"--{name}={vars(args)[name.replace('-', '_')]}" for name in OPTIONS]
    return run_script(__file__, *options, "--child", variant, adapter, env={"OMP_NUM_THREADS": str(args.threads)})


def print_rows(args: argparse.Namespace, adapter: str) -> None:
    """Print a row per variant, and one with the ratios."""
    results: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
    for i in range(args.rounds):
        for variant in VARIANTS[:: -1 if i % 2 else 1]:
            results[variant].append(run_child(args, variant, adapter))
    medians = {}
    for variant, runs in results.items():
        seconds, peaks = [s for run in runs for s in run["seconds"]], [run["peak"] / 1e6 for run in runs]
        medians[variant] = statistics.median(seconds), statistics.median(peaks)
        cells = format_range(seconds), format_range(peaks, 0), f"{runs[0]['loss']:.5f}"
        print(f"| {adapter}, {variant} | {runs[0]['tokens']:,} | {' | '.join(cells)} |")
    time_ratio, memory_ratio = (b / a for a, b in zip(medians["repeated"], medians["shared"], strict=True))
    print(f"| {adapter}, shared / repeated | | {time_ratio:.2f} | {memory_ratio:.2f} | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "ADAPTER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_in_child(args)))
        return
    torch.set_num_threads(args.threads)
    print(f"# Shared prompts, {date.today()}\n")
    print(f"{args.pairs} pairs per pass, each a prompt of {args.prompt_length} tokens and two answers of "
          f"{args.answer_length}; a Llama\nwith the shapes of the 135M model and {args.layers} layers, bf16 matmuls, "
          "one packed row, forward and backward.")  # fmt: skip
    print(f"{describe_environment('tunekit')}; {args.rounds} alternating rounds.\nMedian (minimum to maximum) of all "
          "passes. Memory is the peak in addition to the model.\n")  # fmt: skip
    print("| | tokens | seconds | memory, MB | loss |\n|---|---|---|---|---|")
    for adapter in ADAPTERS:
        print_rows(args, adapter)


if __name__ == "__main__":
    main()
