"""Preference pairs with shared prompts compared with repeated prompts: time and memory of a training pass.

    python benchmarks/prompts.py [--layers 6] [--pairs 4] [--prompt 256] [--answer 64] [--rounds 4] [--steps 4]

Log-probabilities of both answers, the DPO loss, and gradients. Each run is a process; the variants alternate.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from stage import Shape
from torch import Tensor

from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import describe_hardware, package_versions
from tunekit.losses.sequence_logps import sequence_logps
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization

FORMS, ADAPTERS = ("whole", "shared"), {"LoRA": LoRAConfig(16), "full": NoAdapter()}
BETA = 0.1


def make_pairs(args: argparse.Namespace, vocab: int) -> TokenizedDataset:
    """Chosen and rejected documents alternate."""
    rng, documents = np.random.default_rng(0), []
    for _ in range(args.pairs):
        prompt = rng.integers(1, vocab, args.prompt)
        for answer in rng.integers(1, vocab, (2, args.answer)):
            loss_mask = np.arange(args.prompt + args.answer) >= args.prompt
            documents.append(Document(np.concatenate([prompt, answer]).astype(np.int32), loss_mask, len(loss_mask)))
    return TokenizedDataset(documents)


def make_batch(args: argparse.Namespace, vocab: int) -> Batch:
    """All pairs in one packed row."""
    documents = make_pairs(args, vocab)
    capacity = int(documents.lengths.sum())
    layout = Collator(1, 1, 0, 1, 0, capacity, 2, with_document_ids=True, share_prefixes=args.child == "shared")
    return layout.micro_batches(documents, [np.arange(len(documents))])[0]


def loss(model: Decoder, rows: Batch) -> Tensor:
    chosen, rejected = sequence_logps(model, rows).pairs
    return -F.logsigmoid(BETA * (chosen.logps - rejected.logps)).sum()


def process_memory(name: str) -> int:
    """Memory of this process in bytes: current (VmRSS) or peak (VmHWM)."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def child(args: argparse.Namespace) -> None:
    """Passes of one variant: times, memory in addition to the model, and the loss."""
    torch.set_num_threads(args.threads)
    shape = Shape(layers=args.layers)
    (args.folder / "config.json").write_text(json.dumps(shape.config))
    with DistributedContext(0, "cpu") as dist:
        precision = PrecisionConfig("bf16", "fp32", "bf16")
        adapter, source = ADAPTERS[args.adapter], HFCheckpoint.open(args.folder)
        model = build.build_model(source, NoQuantization(), adapter, precision, MemoryConfig(), dist, True)
        rows, before, seconds = make_batch(args, shape.vocab), process_memory("VmRSS"), []
        for _ in range(args.steps + 1):
            start = time.perf_counter()
            value = loss(model, rows)
            value.backward()
            seconds.append(time.perf_counter() - start)
            model.zero_grad()
    result = {
        "seconds": seconds[1:],
        "tokens": rows.num_tokens,
        "memory": process_memory("VmHWM") - before,
        "loss": float(value),
    }
    print(json.dumps(result))


def run_child(args: argparse.Namespace, form: str, adapter: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"--{name}={value}" for name, value in vars(args).items() if name not in ("child", "folder", "adapter")
        ]
        command = [sys.executable, __file__, *words, "--child", form, "--adapter", adapter, "--folder", folder]
        env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{form}: {done.stderr[-3000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main(args: argparse.Namespace) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    print(f"# Prompts computed once, {date.today()}\n")
    print(
        f"{args.pairs} pairs a pass, each a prompt of {args.prompt} tokens and two answers of {args.answer}; a Llama of"
    )
    print(f"the 135M shape with {args.layers} layers, bf16 products, one packed row, forward and backward.")
    print(
        f"{versions}.\n{describe_hardware(torch.device('cpu'))}, {args.threads} threads; {args.rounds} rounds in turns."
    )
    print("Medians of all passes, and least and most. Memory is the peak in addition to the model.\n")
    print("| | tokens | seconds | memory, MB | loss |\n|---|---|---|---|---|")
    for adapter in ADAPTERS:
        results: dict[str, list[dict]] = {form: [] for form in FORMS}
        for number in range(args.rounds):
            for form in FORMS if number % 2 == 0 else FORMS[::-1]:
                results[form].append(run_child(args, form, adapter))
        middle = {}
        for form, runs in results.items():
            times, memory = [second for run in runs for second in run["seconds"]], [run["memory"] / 1e6 for run in runs]
            middle[form] = statistics.median(times), statistics.median(memory)
            cells = spread(times, ".2f"), spread(memory, ".0f"), f"{runs[0]['loss']:.5f}"
            print(f"| {adapter}, {form} | {runs[0]['tokens']:,} | {' | '.join(cells)} |")
        time_, memory_ = (b / a for a, b in zip(middle["whole"], middle["shared"], strict=True))
        print(f"| {adapter}, shared / whole | | {time_:.2f} | {memory_:.2f} | |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in {
        "layers": 6,
        "pairs": 4,
        "prompt": 256,
        "answer": 64,
        "rounds": 4,
        "steps": 4,
        "threads": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--adapter", choices=ADAPTERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    (child if given.child else main)(given)
