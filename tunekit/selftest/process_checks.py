"""One process against several, on the backend that training uses: NCCL on GPUs, gloo on the CPU."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tunekit.devices import device_capabilities, has_fast_bf16
from tunekit.distributed.clip_grad import total_grad_norm
from tunekit.distributed.context import ONE_RANK, DistributedContext
from tunekit.distributed.launcher import tune_command
from tunekit.kernels.kernel_case import relative_error
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.selftest import nano
from tunekit.selftest.context import Context
from tunekit.selftest.result import CheckFailedError, CheckSkippedError, Result

STEPS = 2
MAX_GPUS = 8
# Limits of relative errors of losses and gradients: sums in another order, and in bf16 other roundings.
LIMITS = {"fp32": 1e-4, "bf16": 2e-2}
LOG_LINES = 6


def check_one_rank(context: Context) -> Result:
    """A process group of one rank: collectives, and the loss and gradient norm of sharded weights."""
    backend = require_backend(context)
    compute = "bf16" if context.device.type == "cuda" else "fp32"
    expected = loss_and_gradient(context, compute)
    with one_rank_environment():
        actual = loss_and_gradient(context, compute)
    for name, a, b in zip(("loss", "gradient norm"), actual, expected, strict=True):
        error = relative_error(torch.tensor(a), torch.tensor(b))
        if not error <= LIMITS[compute]:
            raise CheckFailedError(f"{name} of sharded weights is {a:.6g}, without sharding {b:.6g} ({compute})")
    values = {"backend": backend, "loss": actual[0], "gradient_norm": actual[1]}
    return Result(f"{backend}: collectives, FSDP loss and gradient norm equal those without sharding", values)


def loss_and_gradient(context: Context, compute: str) -> tuple[float, float]:
    """Loss and gradient norm of a packed batch. With a process group, weights are sharded and the norm is reduced."""
    with DistributedContext(0, context.device.type) as dist:
        model = nano.open_model(dist, compute)
        model.requires_grad_(True).train()
        batch = nano.packed_batch(model.spec.vocab)[0].to(dist.device)
        loss = CrossEntropy()(model, batch) / batch.num_target_tokens
        loss.backward()
        return float(loss.detach()), float(total_grad_norm(model.parameters(), dist))


@contextmanager
def one_rank_environment() -> Iterator[None]:
    """Variables that make this process the only rank of a group."""
    variables = {ONE_RANK: "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def check_several_ranks(context: Context) -> Result:
    """Losses of N processes equal those of one process."""
    count, kind = num_ranks(context)
    batch = f"global_batch_size={max(8, 2 * count)}", "micro_batch_size=1", f"max_steps={STEPS}"
    nano.train_nano(context.directory / "alone", context.device.type, *batch)
    run_ranks(context.directory / "ranks", context.device.type, count, batch)
    alone, ranks = (nano.read_metrics(context.directory / name) for name in ("alone", "ranks"))
    if len(alone) != STEPS or len(ranks) != STEPS:
        raise CheckFailedError(f"{len(ranks)} steps of {count} processes, {len(alone)} of one, expected {STEPS}")
    # On a CPU weights travel in fp32, and each process computes what one process computes.
    limit = LIMITS["bf16" if context.device.type != "cpu" and has_fast_bf16(context.device) else "fp32"]
    errors = [abs(b["loss"] - a["loss"]) / abs(a["loss"]) for a, b in zip(alone, ranks, strict=True)]
    if not max(errors) <= limit:
        raise CheckFailedError(
            f"losses of {count} processes {[line['loss'] for line in ranks]}, of one {[line['loss'] for line in alone]}"
        )
    values = {"processes": count, "backend": kind, "error": max(errors)}
    return Result(
        f"{kind}: losses of {count} processes and of one differ by up to {max(errors):.1g} (relative)", values
    )


def num_ranks(context: Context) -> tuple[int, str]:
    """How many processes this machine can run, and their backend."""
    backend = require_backend(context)
    if context.device.type == "cpu":
        return 2, backend
    count = torch.get_device_module(context.device).device_count()
    if count < 2:
        raise CheckSkippedError(f"{backend} needs a GPU for each process, and there is one: see processes.one_rank")
    return min(count, MAX_GPUS), backend


def require_backend(context: Context) -> str:
    """The name of the device's backend; CheckSkippedError if there is none."""
    backend = device_capabilities(context.device).backend
    if backend is None:
        raise CheckSkippedError(f"torch has no backend for several processes on {context.device.type}")
    if backend == "nccl" and torch.version.hip is not None:
        return "RCCL"
    return backend if backend == "gloo" else backend.upper()


def run_ranks(directory: Path, device: str, count: int, more: tuple[str, ...]) -> None:
    """`tune run --nproc-per-node N`, as a user starts it."""
    words: list[Any] = ["run", "sft", nano.CONFIG, *nano.overrides(directory, device, *more), "--nproc-per-node", count]
    done = subprocess.run(tune_command(tuple(map(str, words))), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-LOG_LINES:]
        raise CheckFailedError(f"{count} processes ended with code {done.returncode}: {' | '.join(lines)}")


FUNCTIONS = {"one_rank": check_one_rank, "several_ranks": check_several_ranks}
