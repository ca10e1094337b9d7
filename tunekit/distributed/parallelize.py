"""Applies tensor, context and expert parallelism to a model on the meta device."""

from collections.abc import Mapping

from tunekit.distributed import expert_parallel, tensor_parallel
from tunekit.distributed.collectives import FakeMeshDim, MeshDim
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.context_parallel import ContextParallelSharding
from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.distributed.sharding import use_sharded_storage
from tunekit.models.decoder import Decoder


def parallelize(model: Decoder, context: DistributedContext) -> None:
    """Keep the local shards of a model and record them in `model.shards`. Raise UserError if it cannot be split."""
    meshes = {"tensor": context.mesh, "context": context.cp_mesh, "expert": context.ep_mesh}
    shard_model(model, {name: MeshDim.from_mesh(mesh, name) for name, mesh in meshes.items() if mesh is not None})


def parallelize_fake(model: Decoder, dims: ParallelDims) -> None:
    """Apply the shards of the first rank without other ranks: to estimate memory and check divisibility."""
    sizes = {"tensor": dims.tp, "context": dims.cp, "expert": dims.ep}
    shard_model(model, {name: FakeMeshDim(size) for name, size in sizes.items()})


def shard_model(model: Decoder, mesh_dims: Mapping[str, MeshDim]) -> None:
    """Apply the plans of all mesh dimensions with several ranks."""
    split = {name: mesh_dim for name, mesh_dim in mesh_dims.items() if mesh_dim.size > 1}
    if "tensor" in split:
        tensor_parallel.shard_layers(model, split["tensor"], expert_parallel="expert" in split)
    if "context" in split:
        model.cp_sharding = ContextParallelSharding(split["context"])
    if "expert" in split:
        expert_parallel.shard_experts(model, split["expert"])
    use_sharded_storage(model)
    model.tie()
