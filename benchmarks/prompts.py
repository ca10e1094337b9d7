"""Pairs whose prompts are computed once, beside pairs that are written whole: time and memory of a pass, in turns.

python benchmarks/prompts.py [--layers 6] [--pairs 4] [--prompt 256] [--answer 64] [--rounds 4] [--steps 4]

The log-probabilities of both answers of each pair, what DPO makes of them, and its gradients. Each run is a process.
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


def pairs(args: argparse.Namespace, vocab: int) -> TokenizedDataset:
    """Chosen and rejected in turn."""
    random, found = np.random.default_rng(0), []
    for _ in range(args.pairs):
        prompt = random.integers(1, vocab, args.prompt)
        for answer in random.integers(1, vocab, (2, args.answer)):
            learnt = np.arange(args.prompt + args.answer) >= args.prompt
            found.append(Document(np.concatenate([prompt, answer]).astype(np.int32), learnt, len(learnt)))
    return TokenizedDataset(found)


def batch(args: argparse.Namespace, vocab: int) -> Batch:
    """All pairs in one packed row."""
    documents = pairs(args, vocab)
    capacity = int(documents.lengths.sum())
    layout = Collator(1, 1, 0, 1, 0, capacity, 2, with_document_ids=True, share_prefixes=args.child == "shared")
    return layout.micro_batches(documents, [np.arange(len(documents))])[0]


def loss(model: Decoder, rows: Batch) -> Tensor:
    chosen, rejected = sequence_logps(model, rows).pairs
    return -F.logsigmoid(BETA * (chosen.logps - rejected.logps)).sum()


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def child(args: argparse.Namespace) -> None:
    """Passes of one form; their seconds, what they need beside the model, and the loss."""
    torch.set_num_threads(args.threads)
    shape = Shape(layers=args.layers)
    (args.folder / "config.json").write_text(json.dumps(shape.config))
    with DistributedContext(0, "cpu") as run:
        precision = PrecisionConfig("bf16", "fp32", "bf16")
        adapter, source = ADAPTERS[args.adapter], HFCheckpoint.open(args.folder)
        model = build.build_model(source, NoQuantization(), adapter, precision, MemoryConfig(), run, True)
        rows, before, seconds = batch(args, shape.vocab), resident("VmRSS"), []
        for _ in range(args.steps + 1):
            began = time.perf_counter()
            found = loss(model, rows)
            found.backward()
            seconds.append(time.perf_counter() - began)
            model.zero_grad()
    told = {
        "seconds": seconds[1:],
        "tokens": rows.num_tokens,
        "memory": resident("VmHWM") - before,
        "loss": float(found),
    }
    print(json.dumps(told))


def started(args: argparse.Namespace, form: str, adapter: str) -> dict:
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
    kept = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    print(f"# Prompts computed once, {date.today()}\n")
    print(
        f"{args.pairs} pairs a pass, each a prompt of {args.prompt} tokens and two answers of {args.answer}; a Llama of"
    )
    print(f"the 135M shape with {args.layers} layers, bf16 products, one packed row, forward and backward.")
    print(f"{kept}.\n{describe_hardware(torch.device('cpu'))}, {args.threads} threads; {args.rounds} rounds in turns.")
    print("Medians of all passes, and least and most. Memory is what a process had at most beside the model.\n")
    print("| | tokens | seconds | memory, MB | loss |\n|---|---|---|---|---|")
    for adapter in ADAPTERS:
        found: dict[str, list[dict]] = {form: [] for form in FORMS}
        for number in range(args.rounds):
            for form in FORMS if number % 2 == 0 else FORMS[::-1]:
                found[form].append(started(args, form, adapter))
        middle = {}
        for form, runs in found.items():
            times, memory = [second for run in runs for second in run["seconds"]], [run["memory"] / 1e6 for run in runs]
            middle[form] = statistics.median(times), statistics.median(memory)
            told = spread(times, ".2f"), spread(memory, ".0f"), f"{runs[0]['loss']:.5f}"
            print(f"| {adapter}, {form} | {runs[0]['tokens']:,} | {' | '.join(told)} |")
        time_, memory_ = (b / a for a, b in zip(middle["whole"], middle["shared"], strict=True))
        print(f"| {adapter}, shared / whole | | {time_:.2f} | {memory_:.2f} | |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, usual in {
        "layers": 6,
        "pairs": 4,
        "prompt": 256,
        "answer": 64,
        "rounds": 4,
        "steps": 4,
        "threads": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--adapter", choices=ADAPTERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    (child if given.child else main)(given)
