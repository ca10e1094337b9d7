"""FSDP2: weights, gradients and optimizer state are sharded; the weights of each layer are gathered while it computes.

Embedding, head and final norm stay gathered during the forward pass. Quantized weights are gathered in quantized form.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tunekit.devices import is_pinned_on
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import use_sharded_storage
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import Experts, Router

# Maximum size of full gradients, relative to the sharded weights, to reduce them in the last pass of a step only.
MAX_UNREDUCED_FRACTION = 0.05


def apply_fsdp(model: Decoder, context: DistributedContext) -> None:
    """Apply FSDP to a model on the meta device."""
    trained = any(p.requires_grad for p in model.parameters())
    ranks = context.dims.grad_avg_size if trained else context.dims.fsdp_size  # frozen replicas do not communicate
    if context.mesh is None or (ranks == 1 and context.world_size > 1):
        return
    use_sharded_storage(model)
    options = fsdp_kwargs(model, context, fsdp_mesh(context.mesh, trained))
    context.delays_gradient_sync = can_delay_gradient_sync(model, context.dims.fsdp_size)
    if context.ep_mesh is not None:  # experts differ between expert parallel ranks
        expert_options = fsdp_kwargs(model, context, fsdp_mesh(context.ep_mesh, trained))
        for module in [module for module in model.modules() if isinstance(module, Experts)]:
            shard_module(module, **expert_options)
    # Routers are small and sensitive, and may be fp32 in a bf16 checkpoint: keep their dtype.
    router_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    router_options = options | {"mp_policy": router_policy}
    if options["mp_policy"].param_dtype is not None:
        for module in [module for module in model.modules() if isinstance(module, Router)]:
            shard_module(module, **router_options)
    blocks = [shard_module(layer, **options) for layer in model.layers]
    options["reshard_after_forward"] = False
    shard_module(model, **options)
    set_prefetch(blocks, context.parallel.prefetch_layers)


def shard_module(module: nn.Module, **options: Any) -> FSDPModule:
    """`fully_shard` that also accepts modules with integer parameters, such as quantized weights."""
    has_integers = not all(parameter.is_floating_point() for parameter in module.parameters())
    with SkipIntegerRequiresGrad() if has_integers else nullcontext():
        return fully_shard(module, **options)


class SkipIntegerRequiresGrad(TorchFunctionMode):
    """Ignores `requires_grad_` of integer tensors. FSDP of torch 2.11 calls it for each parameter, and otherwise does
    not copy `requires_grad` of the original parameter."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.requires_grad_ and not args[0].is_floating_point():
            return args[0]
        return func(*args, **(kwargs or {}))


def allocate(model: Decoder, context: DistributedContext) -> None:
    """Allocate all tensors of a model on the device. With CPU offload, parameters are on the CPU, but not buffers: FSDP
    moves only parameters to the device."""
    offloaded = context.parallel.cpu_offload and isinstance(model, FSDPModule)

    def empty(tensor: Tensor) -> Tensor:
        device = torch.device("cpu") if offloaded and isinstance(tensor, nn.Parameter) else context.device
        if isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device=device)
        # Of meta tensors, empty_like goes through torch's decompositions in Python.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    with torch.no_grad():
        model._apply(empty)
    model.compute_device = context.device if offloaded else None


def fsdp_kwargs(model: Decoder, context: DistributedContext, mesh: DeviceMesh) -> dict[str, Any]:
    """Arguments of `fully_shard` for the parallel config."""
    # torch 2.11 would also cast quantized weights.
    can_cast = all(parameter.is_floating_point() for parameter in model.parameters())
    casts = can_cast and context.parallel.resolve_auto(context.device.type).all_gather_dtype == "compute"
    gather_dtype = model.compute_dtype if casts else None
    reduce_dtype = torch.float32 if gather_dtype else None
    offload = CPUOffloadPolicy(is_pinned_on(context.device)) if context.parallel.cpu_offload else OffloadPolicy()
    return {
        "mesh": mesh,
        "reshard_after_forward": context.parallel.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(gather_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": offload,
    }


def fsdp_mesh(mesh: DeviceMesh, trained: bool) -> DeviceMesh:
    """Mesh dimensions that shard and replicate a weight."""
    return mesh["shard"] if mesh["replicate"].size() == 1 or not trained else mesh["replicate", "shard"]


def can_delay_gradient_sync(model: nn.Module, ranks: int) -> bool:
    """Whether full gradients are small relative to the model's local weights: then they are reduced once per step."""
    sizes = {p: p.numel() * p.element_size() for p in model.parameters()}
    trained = sum(size for p, size in sizes.items() if p.requires_grad)
    return trained <= MAX_UNREDUCED_FRACTION * sum(sizes.values()) / ranks


def set_prefetch(blocks: list[Any], count: int) -> None:
    """Gather the weights of `count` layers in advance. FSDP prefetches one by default."""
    if count < 2:
        return
    for i, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + count])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - count) : i][::-1])
