"""Layers, rows and experts that several ranks share, before a model holds numbers."""

from tunekit.distributed import context_parallel, expert_parallel, tensor_parallel
from tunekit.distributed.collectives import FakeMeshDim
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.models.decoder import Decoder


def parallelize(model: Decoder, context: DistributedContext) -> None:
    """Leave of a model what is for this rank, and say so in `model.splits`; UserError where it cannot be divided."""
    tensor_parallel.apply_tensor_parallel(model, context)
    context_parallel.apply_context_parallel(model, context)
    expert_parallel.apply_expert_parallel(model, context)
    model.tie()


def parallelize_fake(model: Decoder, dims: ParallelDims) -> None:
    """The same for the first of ranks that are not there: to see what it would have, or what cannot be divided."""
    if dims.tp > 1:
        tensor_parallel.shard_layers(model, FakeMeshDim(dims.tp), dims.ep > 1)
    if dims.cp > 1:
        model.cp_sharding = context_parallel.ContextParallelSharding(FakeMeshDim(dims.cp))
    if dims.ep > 1:
        expert_parallel.shard_experts(model, FakeMeshDim(dims.ep))
    model.tie()
