"""Every family of the tests on a GPU in bf16 next to the CPU in fp32: loss, gradients, and generated tokens.

python scripts/gpu/families.py cuda|cpu [--part K --parts N] [--names NAME ...]
"""

import argparse
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.random_checkpoints import SHAPES, make_checkpoint
from tunekit import build as assemble
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization
from tunekit.selftest import nano

LENGTHS = (20, 22, 18, 30)
ROWS = {"packed": [[0, 1], [2, 3]], "padded": [[0], [1], [2], [3]]}
# Of gradients; of losses, relative and absolute. Random models can be sensitive to rounding: gradients may differ from
# fp32 as much as those of bf16 on the CPU, and a little more where a router chooses other experts.
MIN_COSINE, MAX_DIFFERENCE, MARGIN = 0.97, 0.05, 0.05
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5]]


def build(source: HFCheckpoint, device: str, compute: str) -> Decoder:
    with DistributedContext(0, device) as dist:
        precision = PrecisionConfig(compute, "fp32", "fp32")  # type: ignore[arg-type]
        return assemble.build_model(source, NoQuantization(), NoAdapter(), precision, MemoryConfig(), dist)


def loss_and_gradients(model: Decoder, layout: str, device: str) -> tuple[float, Tensor]:
    """The loss of a batch, and all gradients in one vector."""
    documents = nano.random_documents(model.spec.vocab, LENGTHS)
    rows = [[documents[i] for i in row] for row in ROWS[layout]]
    batch = nano.packing(128 if layout == "packed" else 0, len(rows)).collate_rows(rows)[0]
    model.zero_grad(set_to_none=True)
    loss = CrossEntropy()(model, batch.to(torch.device(device)))
    loss.backward()
    named = sorted(model.named_parameters())
    return loss.item(), torch.cat([p.grad.flatten().double().cpu() for _, p in named if p.grad is not None])


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a, b, 0).item()


def check_family(name: str, device: str, folder: Path) -> bool:
    """Print a line for each layout. Whether all numbers are near."""
    source = HFCheckpoint.open(make_checkpoint(folder, name), name)
    reference, rounded, model = (
        build(source, "cpu", "fp32"),
        build(source, "cpu", "bf16"),
        build(source, device, "bf16"),
    )
    good = True
    for layout in ROWS:
        expected, gradients = loss_and_gradients(reference, layout, "cpu")
        on_cpu = cosine(gradients, loss_and_gradients(rounded, layout, "cpu")[1])
        actual, others = loss_and_gradients(model, layout, device)
        alike = cosine(gradients, others)
        near = abs(actual - expected) < MAX_DIFFERENCE * (abs(expected) + 1)
        near = near and alike > min(MIN_COSINE, on_cpu - MARGIN)
        good = good and near
        losses = f"loss {expected:.4f} {actual:.4f}"
        print(f"{name} {layout}: {losses}, cosine {alike:.4f}, CPU {on_cpu:.4f}{'' if near else ' FAIL'}")
    sampling = SamplingConfig(max_new_tokens=6, temperature=0)
    answers = [generate_batch(net, PROMPTS, sampling, frozenset()) for net in (reference, model)]
    print(f"{name}: generated tokens {'equal' if answers[0] == answers[1] else f'differ: {answers}'}", flush=True)
    return good


def main() -> int:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--names", nargs="*", default=[])
    args = parser.parse_args()
    failed = []
    for name in (args.names or [*SHAPES])[args.part :: args.parts]:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                good = check_family(name, args.device, Path(folder))
            except Exception as error:  # noqa: BLE001 (the other families are checked anyway)
                frame = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename][-1]
                text = " ".join(str(error).split())[:300]
                print(f"{name} FAIL {type(error).__name__}: {text} at {Path(frame.filename).name}:{frame.lineno}")
                good = False
        print(f"{name} {time.perf_counter() - start:.1f} s", flush=True)
        failed += [] if good else [name]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
