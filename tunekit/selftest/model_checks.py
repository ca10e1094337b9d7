"""The bundled nano model: packed documents, cached generation, and a run that is resumed."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from tunekit import devices
from tunekit.checkpoint import run_dir
from tunekit.checkpoint.final_checkpoint import VERIFICATION
from tunekit.distributed.context import DistributedContext
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder
from tunekit.selftest import nano
from tunekit.selftest.context import Context
from tunekit.selftest.result import CheckFailedError, Result
from tunekit.training.packing_check import LIMITS, PackingProbe, logit_differences

PROMPTS = (5, 17, 30)  # lengths
NEW_TOKENS = 24
STEPS, SAVED = 4, 2  # of a run, and the step after which it is interrupted


def computations(context: Context) -> tuple[str, ...]:
    """The dtypes that are checked. On a GPU fp32 needs FlexAttention, which would be compiled for the nano alone."""
    return ("bf16",) if context.device.type == "cuda" else ("fp32", "bf16")


def check_packing(context: Context) -> Result:
    """Logits of packed documents equal those of each document alone."""
    worst = {}
    for compute in computations(context):
        with DistributedContext(0, context.device.type) as dist:
            model = nano.open_model(dist, compute)
            batch, documents, spans = nano.packed_batch(model.spec.vocab)
            with torch.no_grad():
                errors = logit_differences(model, PackingProbe(batch.to(dist.device), documents, spans), dist)
        worst[compute], limit = max(errors), LIMITS[model.compute_dtype or torch.float32]
        if not all(value <= limit for value in errors):
            position = max(range(len(errors)), key=errors.__getitem__)
            text = f"document {position} differs by {worst[compute]:.2g} standard deviations of its logits"
            raise CheckFailedError(f"packed and alone in {compute}: {text}, limit {limit:g}")
    text = ", ".join(f"{value:.1g} in {compute}" for compute, value in worst.items())
    return Result(f"logits differ by up to {text} (standard deviations)", {"differences": worst})


def check_generation(context: Context) -> Result:
    """Tokens that are generated with a cache are those that the model without a cache predicts."""
    gaps, equal = {}, {}
    for compute in computations(context):
        with DistributedContext(0, context.device.type) as dist:
            model = nano.open_model(dist, compute)
            documents = nano.random_documents(model.spec.vocab, PROMPTS)
            prompts = [document.tokens.tolist() for document in documents]
            answers = generate_batch(
                model, prompts, SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0), frozenset()
            )
            pairs = zip(prompts, answers, strict=True)
            predictions = [prediction_gaps(model, prompt, answer) for prompt, answer in pairs]
        gap = torch.cat(predictions)
        gaps[compute], equal[compute] = float(gap.max()), float((gap == 0).double().mean())
        limit = LIMITS[model.compute_dtype or torch.float32]
        if not gaps[compute] <= limit:
            text = f"a cached token is {gaps[compute]:.2g} standard deviations below the best one, limit {limit:g}"
            raise CheckFailedError(f"generation in {compute}: {text}")
    text = ", ".join(f"{fraction:.1%} in {compute}" for compute, fraction in equal.items())
    return Result(f"same token as without a cache: {text}", {"largest_gap": gaps, "same_tokens": equal})


@torch.no_grad()
def prediction_gaps(model: Decoder, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """By how many standard deviations the logit of each generated token is below the largest one, without a cache."""
    if len(answer) != NEW_TOKENS:
        raise CheckFailedError(f"{len(answer)} tokens were generated, expected {NEW_TOKENS}")
    device = model.device
    logits = model(torch.tensor([prompt + answer], device=device))[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer, device=device)[:, None])[:, 0]
    return (logits.amax(1) - chosen) / logits.std(1)


def check_resume(context: Context) -> Result:
    """A run that is interrupted and resumed writes the same files, bit for bit, and they are verified."""
    full, resumed = context.directory / "full", context.directory / "resumed"
    steps = f"max_steps={STEPS}", f"save_every={SAVED}", f"save_total_limit={STEPS}"
    with deterministic(context):
        nano.train_nano(full, context.device.type, *steps)
        verification = json.loads((full / run_dir.FINAL / VERIFICATION).read_text("utf-8"))
        if not verification["passed"]:
            raise CheckFailedError(f"saved files do not have the logits of the model: {verification}")
        interrupt(full, resumed)
        nano.train_nano(resumed, context.device.type, *steps)
    losses = [[line["loss"] for line in nano.read_metrics(directory)] for directory in (full, resumed)]
    check_same_weights(full / run_dir.FINAL, resumed / run_dir.FINAL)
    if losses[0] != losses[1]:
        raise CheckFailedError(f"losses {losses[0]}, after resuming {losses[1]}")
    values = {"losses": losses[0], "verification": verification}
    return Result(f"saved, verified, resumed at step {SAVED} of {STEPS}: the same bits", values)


@contextmanager
def deterministic(context: Context) -> Iterator[None]:
    """On a GPU, sums whose order is not fixed differ from run to run: algorithms that fix it are used."""
    if context.device.type == "cpu":
        yield
        return
    before = devices.read_numerics()
    # No errors: torch asks for the settings of cuBLAS once per process, and earlier checks have used it.
    devices.use_deterministic_algorithms(warn_only=True)
    try:
        yield
    finally:
        devices.set_numerics(before)


def interrupt(full: Path, resumed: Path) -> None:
    """A copy of a run as it was after step SAVED."""
    shutil.copytree(full, resumed, ignore=shutil.ignore_patterns(run_dir.FINAL))
    states = sorted((resumed / run_dir.STATE).iterdir())
    if [int(state.name) for state in states] != [SAVED, STEPS]:
        raise CheckFailedError(f"saved states {[state.name for state in states]}, expected steps {SAVED} and {STEPS}")
    shutil.rmtree(states[-1])


def check_same_weights(full: Path, resumed: Path) -> None:
    """Raise CheckFailedError if a tensor differs in a bit."""
    expected, actual = (load_file(directory / "model.safetensors") for directory in (full, resumed))
    for name, tensor in expected.items():
        if name not in actual or not torch.equal(tensor.view(torch.uint8), actual[name].view(torch.uint8)):
            raise CheckFailedError(f"{name} of the resumed run differs from that of the uninterrupted run")


FUNCTIONS = {"packing": check_packing, "generation": check_generation, "resume": check_resume}
