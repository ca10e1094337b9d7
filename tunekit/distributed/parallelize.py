"""Applies tensor, context and expert parallelism to a model on the meta device."""

from tunekit.distributed import context_parallel, expert_parallel, tensor_parallel
from tunekit.distributed.collectives import FakeMeshDim
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.distributed.sharding import use_sharded_storage
from tunekit.models.decoder import Decoder


def parallelize(model: Decoder, context: DistributedContext) -> None:
    """Keep the local shards of a model and record them in `model.shards`. Raise UserError if it cannot be split."""
    tensor_parallel.apply_tensor_parallel(model, context)
    context_parallel.apply_context_parallel(model, context)
    expert_parallel.apply_expert_parallel(model, context)
    use_sharded_storage(model)
    model.tie()


def parallelize_fake(model: Decoder, dims: ParallelDims) -> None:
    """Apply the shards of the first rank without other ranks: to estimate memory and check divisibility."""
    if dims.tp > 1:
        tensor_parallel.shard_layers(model, FakeMeshDim(dims.tp), dims.ep > 1)
    if dims.cp > 1:
        model.cp_sharding = context_parallel.ContextParallelSharding(FakeMeshDim(dims.cp))
    if dims.ep > 1:
        expert_parallel.shard_experts(model, FakeMeshDim(dims.ep))
    use_sharded_storage(model)
    model.tie()
