"""Every model family on a GPU in bf16 compared with the CPU in fp32: loss, gradients, and generated tokens.

python scripts/gpu/compare_families.py cuda|cpu [--shard-id K --num-shards N] [--families NAME ...]
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tests.helpers.random_checkpoints import SHAPES, make_checkpoint
from tunekit import build
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
from tunekit.selftest.worker import describe_error

DOCUMENT_LENGTHS = (20, 22, 18, 30)
BATCH_LAYOUTS = {"packed": [[0, 1], [2, 3]], "padded": [[0], [1], [2], [3]]}  # documents of each row
MAX_LOSS_DIFFERENCE = 0.05  # relative to 1 + the absolute value of the loss
# Cosine similarity of all gradients. Random models can be sensitive to rounding: the similarity to fp32 may be as low
# as that of bf16 on the CPU, and a little lower because the router may select other experts.
MIN_GRAD_SIMILARITY, GRAD_SIMILARITY_TOLERANCE = 0.97, 0.05
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5]]


def build_model(source: HFCheckpoint, device: str, compute_dtype: str) -> Decoder:
    with DistributedContext(0, device) as dist:
        precision = PrecisionConfig(compute_dtype, "fp32", "fp32")  # type: ignore[arg-type]
        return build.build_model(source, NoQuantization(), NoAdapter(), precision, MemoryConfig(), dist)


def compute_loss_and_gradients(model: Decoder, layout: str, device: str) -> tuple[float, Tensor]:
    """The loss of a batch, and all gradients as one vector."""
    documents = nano.random_documents(model.spec.vocab, DOCUMENT_LENGTHS)
    rows = [[documents[i] for i in row] for row in BATCH_LAYOUTS[layout]]
    batch = nano.packing(128 if layout == "packed" else 0, len(rows)).collate_rows(rows)[0]
    model.zero_grad(set_to_none=True)
    loss = CrossEntropy()(model, batch.to(torch.device(device)))
    loss.backward()
    parameters = sorted(model.named_parameters())
    return loss.item(), torch.cat([p.grad.flatten().double().cpu() for _, p in parameters if p.grad is not None])


def compare_family(family: str, device: str, directory: Path) -> bool:
    """Print a line for each batch layout. Returns whether all differences are within the tolerances."""
    source = HFCheckpoint.open(make_checkpoint(directory, family), family)
    reference, cpu_bf16 = build_model(source, "cpu", "fp32"), build_model(source, "cpu", "bf16")
    model = build_model(source, device, "bf16")
    passed = True
    for layout in BATCH_LAYOUTS:
        expected_loss, expected_grads = compute_loss_and_gradients(reference, layout, "cpu")
        _, cpu_grads = compute_loss_and_gradients(cpu_bf16, layout, "cpu")
        loss, grads = compute_loss_and_gradients(model, layout, device)
        cpu_similarity = cosine_similarity(expected_grads, cpu_grads, 0).item()
        similarity = cosine_similarity(expected_grads, grads, 0).item()
        is_close = abs(loss - expected_loss) < MAX_LOSS_DIFFERENCE * (abs(expected_loss) + 1)
        is_close = is_close and similarity > min(MIN_GRAD_SIMILARITY, cpu_similarity - GRAD_SIMILARITY_TOLERANCE)
        passed = passed and is_close
        losses = f"loss {expected_loss:.4f} (CPU, fp32) {loss:.4f} ({device}, bf16)"
        similarities = f"gradient similarity {similarity:.4f}, CPU in bf16 {cpu_similarity:.4f}"
        print(f"{family} {layout}: {losses}, {similarities}{'' if is_close else ' FAIL'}")
    sampling = SamplingConfig(max_new_tokens=6, temperature=0)
    answers = [generate_batch(decoder, PROMPTS, sampling, frozenset()) for decoder in (reference, model)]
    print(f"{family}: generated tokens {'equal' if answers[0] == answers[1] else f'differ: {answers}'}", flush=True)
    return passed


def main() -> int:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--shard-id", type=int, default=0, help="from 0")
    parser.add_argument("--num-shards", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=[], metavar="NAME", help=f"default: {', '.join(SHAPES)}")
    args = parser.parse_args()
    failures = []
    for family in (args.families or [*SHAPES])[args.shard_id :: args.num_shards]:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            try:
                passed = compare_family(family, args.device, Path(directory))
            except Exception as error:  # noqa: BLE001 (the other families are compared anyway)
                print(f"{family} FAIL {describe_error(error)}")
                passed = False
        print(f"{family} {time.perf_counter() - start:.1f} s", flush=True)
        failures += [] if passed else [family]
    print(f"failed: {', '.join(failures) or 'none'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
