"""Norm and clipping of gradients on a device other than the CPU: few launches, and the numbers of torch."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tunekit.distributed.clip_grad import clip_gradients, squares_of, total_grad_norm
from tunekit.distributed.context import DistributedContext

VIEWS = {"view", "reshape", "_unsafe_view", "slice", "detach", "alias", "empty", "unsqueeze"}


class Launches(TorchDispatchMode):
    """Names of the operations that would launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def weights(device: str, count: int = 448, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weights with gradients: factors of a LoRA by default."""
    tensors = [torch.zeros(16, 64 + i % 3, device=device, dtype=dtype) for i in range(count)]
    generator = torch.Generator().manual_seed(0)
    for weight in tensors:
        weight.grad = torch.randn(weight.shape, generator=generator).to(device, dtype)
    return tensors


def on(device: str) -> DistributedContext:
    dist = DistributedContext.single_process()
    dist.device = torch.device(device)
    return dist


def test_launches_do_not_grow_with_the_number_of_weights() -> None:
    lora = weights("meta")
    with Launches() as launches:
        clip_gradients(lora, total_grad_norm(lora, on("meta")), 1.0)
    assert len(launches.names) < 20, launches.names
    assert launches.names.count("_foreach_norm") == launches.names.count("_foreach_mul_") == 1


def test_dtypes_and_devices_may_differ() -> None:
    mixed = [*weights("meta", 3), *weights("meta", 3, torch.bfloat16), *weights("cpu", 3)]
    norm = total_grad_norm(mixed, on("meta"))
    assert norm.device.type == "meta" and norm.dtype == torch.float32
    cpu = [*weights("cpu", 3), *weights("cpu", 3, torch.bfloat16)]
    clip_gradients(cpu, total_grad_norm(cpu, on("cpu")), 1.0)
    assert total_grad_norm(cpu, on("cpu")).item() == pytest.approx(1.0, rel=1e-2)


def test_norm_of_offloaded_gradients_is_on_the_device_of_the_run() -> None:
    """Where the loss is: metrics and the step guard stack both."""
    run = on("meta")
    loss, norm = torch.zeros((), device="meta"), total_grad_norm(weights("cpu", 4), run)
    assert torch.stack([loss, norm]).device == run.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_to_add_up_agree_with_fp64(dtype: torch.dtype) -> None:
    lora = weights("cpu", 50, dtype)
    lora.append(torch.zeros(0, 5, dtype=dtype))  # a shard without rows
    lora[-1].grad = torch.zeros(0, 5, dtype=dtype)
    exact = torch.cat([weight.grad.double().flatten() for weight in lora if weight.grad is not None]).norm().item()
    assert total_grad_norm(lora, on("cpu")).item() == pytest.approx(exact, rel=1e-6)
    fused = squares_of([weight.grad for weight in lora if weight.grad is not None and weight.numel()])
    assert fused.sqrt().item() == pytest.approx(exact, rel=1e-6)


def test_clipping_equals_that_of_torch() -> None:
    ours, theirs = weights("cpu", 20), weights("cpu", 20)
    clip_gradients(ours, total_grad_norm(ours, on("cpu")), 0.5)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
