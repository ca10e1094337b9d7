"""Weights, gradients and optimizer divided over the ranks; each layer's are gathered while it computes (FSDP2).

Embedding, head and last norm are gathered for the whole pass. What is kept in few bits travels so.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.overrides import TorchFunctionMode

from tunekit.devices import is_pinned_on
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder
from tunekit.models.moe import Experts, Router

# Bytes of whole gradients beside those of the sharded weights, up to which they may wait for the last pass of a step.
MAX_UNREDUCED_FRACTION = 0.05


def apply_fsdp(model: Decoder, context: DistributedContext) -> None:
    """Divide a model that holds no numbers yet."""
    trained = any(p.requires_grad for p in model.parameters())
    ranks = (
        context.dims.grad_avg_size if trained else context.dims.fsdp_size
    )  # copies that are not trained exchange nothing
    if context.mesh is None or (ranks == 1 and context.world_size > 1):
        return
    options = fsdp_kwargs(model, context, fsdp_mesh(context.mesh, trained))
    context.delays_gradient_sync = can_delay_gradient_sync(model, context.dims.fsdp_size)
    if context.ep_mesh is not None:  # other ranks may have other experts
        expert_options = fsdp_kwargs(model, context, fsdp_mesh(context.ep_mesh, trained))
        for module in [module for module in model.modules() if isinstance(module, Experts)]:
            shard_module(module, **expert_options)
    # Routers decide much, are small, and may be stored in fp32 when all else is not: their dtype remains.
    router_options = {
        **options,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
    }
    if options["mp_policy"].param_dtype is not None:
        for module in [module for module in model.modules() if isinstance(module, Router)]:
            shard_module(module, **router_options)
    blocks = [shard_module(layer, **options) for layer in model.layers]
    options["reshard_after_forward"] = False
    shard_module(model, **options)
    set_prefetch(blocks, context.parallel.prefetch_layers)


def shard_module(module: nn.Module, **options: Any) -> FSDPModule:
    """`fully_shard` for modules with integer parameters, too, such as the codes of quantized weights."""
    with SkipIntegerRequiresGrad():
        return fully_shard(module, **options)


class SkipIntegerRequiresGrad(TorchFunctionMode):
    """Requests for gradients of integer tensors do nothing. FSDP of torch 2.11 requests one for each parameter, and
    copies `requires_grad` of the original parameter only then."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.requires_grad_ and not args[0].is_floating_point():
            return args[0]
        return func(*args, **(kwargs or {}))


def allocate(model: Decoder, context: DistributedContext) -> None:
    """Memory for all tensors of a model on the device of the run. Offloaded parameters are on the CPU: FSDP moves them
    to the device a layer at a time, but not buffers."""
    offloaded = context.parallel.cpu_offload and isinstance(model, FSDPModule)

    def empty(tensor: Tensor) -> Tensor:
        on_host = offloaded and isinstance(tensor, nn.Parameter)
        return torch.empty_like(tensor, device="cpu" if on_host else context.device)

    with torch.no_grad():
        model._apply(empty)
    model.compute_device = context.device if offloaded else None


def fsdp_kwargs(model: Decoder, context: DistributedContext, mesh: DeviceMesh) -> dict[str, Any]:
    """What a config says of it, in torch's words."""
    # torch 2.11 would cast quantized weights, too, whose bytes are codes.
    can_cast = all(parameter.is_floating_point() for parameter in model.parameters())
    gather_dtype = (
        model.compute_dtype
        if can_cast and context.parallel.resolve_auto(context.device.type).all_gather_dtype == "compute"
        else None
    )
    offload = CPUOffloadPolicy(is_pinned_on(context.device)) if context.parallel.cpu_offload else OffloadPolicy()
    return {
        "mesh": mesh,
        "reshard_after_forward": context.parallel.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            gather_dtype, torch.float32 if gather_dtype else None, cast_forward_inputs=False
        ),
        "offload_policy": offload,
    }


def fsdp_mesh(mesh: DeviceMesh, trained: bool) -> DeviceMesh:
    """Over which ranks a weight is divided, and over which it is copied."""
    return mesh["shard"] if mesh["replicate"].size() == 1 or not trained else mesh["replicate", "shard"]


def can_delay_gradient_sync(model: nn.Module, ranks: int) -> bool:
    """Whether whole gradients take little beside the rest of what a rank has: then they are exchanged once a step."""
    sizes = {p: p.numel() * p.element_size() for p in model.parameters()}
    trained = sum(size for p, size in sizes.items() if p.requires_grad)
    return trained <= MAX_UNREDUCED_FRACTION * sum(sizes.values()) / ranks


def set_prefetch(blocks: list[Any], count: int) -> None:
    """Gather the weights of so many layers before they are asked for. torch itself looks one ahead."""
    if count < 2:
        return
    for i, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + count])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - count) : i][::-1])
