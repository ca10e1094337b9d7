"""Tensor parallelism (arXiv:1909.08053): heads, hidden channels and vocabulary are split over ranks.

Between layers, each rank holds a shard of the tokens (sequence parallelism, arXiv:2205.05198); losses use sharded
logits. Layers that cannot be split are replicated or rejected.
"""

from dataclasses import dataclass, replace

from torch import nn

from tunekit.distributed.collectives import (
    MeshDim,
    ReplicatedRegion,
    SequenceParallelRegion,
    VocabShard,
    check_splittable,
    shard_parameters,
)
from tunekit.errors import UserError
from tunekit.kernels.nf4 import BLOCK
from tunekit.models.attention import AllHeadNorm, SelfAttention
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import Experts, GatedMLP, MixtureOfExperts
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.mla import MultiLatentAttention
from tunekit.models.recurrent import RecurrentMixer
from tunekit.models.tp_region import NO_PARALLEL

# Layers that are sharded by outputs (colwise), and by inputs (rowwise).
COLWISE = {
    SelfAttention: ("q_proj", "k_proj", "v_proj"),
    MultiLatentAttention: ("q_proj", "q_b_proj", "kv_b_proj"),
    GatedMLP: ("gate_proj", "up_proj"),
    Experts: ("gate_proj", "up_proj"),
}
ROWWISE = {SelfAttention: "o_proj", MultiLatentAttention: "o_proj", GatedMLP: "down_proj", Experts: "down_proj"}
# Sharded dimension of each tensor, in linear layers and in grouped linear layers.
COLWISE_DIMS = {"weight": 0, "quantized_weight": 0, "scales": 0, "bias": 0, "lora_B.weight": 0, "lora_B0": 0}
COLWISE_DIMS |= {"lora_magnitude_vector": 0}
ROWWISE_DIMS = {"weight": 1, "quantized_weight": 1, "scales": 1, "lora_A.weight": 1, "lora_A0": 1}
GROUPED_COLWISE_DIMS = {"weight": 1, "quantized_weight": 1, "scales": 1, "bias": 1, "lora_B": 1}
GROUPED_ROWWISE_DIMS = {"weight": 2, "quantized_weight": 2, "scales": 2, "lora_A": 2}
VOCAB_DIMS = {"weight": 0, "lora_embedding_A": 1}


def shard_layers(model: Decoder, mesh_dim: MeshDim, expert_parallel: bool) -> None:
    """Keep the local shard of each layer. With `expert_parallel`, experts are not split by channels."""
    model.tp_region = SequenceParallelRegion(mesh_dim)
    shard_vocabulary(model, mesh_dim)
    for name, module in [*model.named_modules()][::-1]:  # inner modules first
        TensorParallelPlan(model, mesh_dim, name, expert_parallel).apply(module)


def shard_vocabulary(model: Decoder, mesh_dim: MeshDim) -> None:
    """Split embedding and head by vocabulary ids."""
    if model.spec.extra_embeddings:
        raise UserError(
            f"parallel.tp: the embedding has {model.spec.extra_embeddings} rows outside the vocabulary and cannot be "
            "split. Use parallel.dp_shard or parallel.cp."
        )
    vocab_shard = VocabShard(mesh_dim, mesh_dim.split_sizes(model.spec.vocab))
    model.embed.vocab_shard = model.head.vocab_shard = vocab_shard
    shard_parameters(model, "embed", VOCAB_DIMS, vocab_shard.sizes, mesh_dim, "tensor")
    model.embed.num_embeddings = model.head.out_features = vocab_shard.sizes[mesh_dim.index]
    model.head.colwise_mesh = mesh_dim
    if model.spec.tie_word_embeddings:
        model.head.weight, model.shards["head.weight"] = model.embed.weight, model.shards["embed.weight"]
    own_weight = not model.spec.tie_word_embeddings
    head_dims = {leaf: dim for leaf, dim in COLWISE_DIMS.items() if leaf != "weight" or own_weight}
    shard_parameters(model, "head", head_dims, vocab_shard.sizes, mesh_dim, "tensor")


@dataclass(frozen=True)
class TensorParallelPlan:
    """Shards the layers of one module."""

    model: Decoder
    mesh_dim: MeshDim
    name: str
    expert_parallel: bool  # experts are split over ranks by expert

    def apply(self, module: nn.Module) -> None:
        match module:
            case SelfAttention():
                self.shard_attention(module)
            case MultiLatentAttention():
                self.check_divisible("heads", module.spec.heads)
                module.heads = module.spec.heads // self.mesh_dim.size
                module.tp_region = SequenceParallelRegion(self.mesh_dim)
                self.shard_linears(module)
            case RecurrentMixer():
                module.tp_region = ReplicatedRegion(self.mesh_dim)
            case GatedMLP() if module.sparsity:
                raise UserError(
                    f"parallel.tp: {self.name} needs statistics of all hidden channels, which cannot be split over "
                    f"{self.mesh_dim.size} devices. Use parallel.dp_shard or parallel.cp."
                )
            case GatedMLP():
                self.check_divisible("hidden channels", module.up_proj.out_features)
                module.tp_region = SequenceParallelRegion(self.mesh_dim)
                self.shard_linears(module)
            case MixtureOfExperts() if not self.expert_parallel:
                self.shard_expert_width(module)

    def shard_attention(self, module: SelfAttention) -> None:
        spec, size = module.spec, self.mesh_dim.size
        self.check_divisible("heads", spec.heads)
        if isinstance(module.q_norm, AllHeadNorm):
            raise UserError(
                f"parallel.tp: {self.name} has a norm over all heads, which cannot be split over {size} devices. "
                "Use parallel.dp_shard or parallel.cp."
            )
        module.tp_region = SequenceParallelRegion(self.mesh_dim)
        if spec.kv_heads % size == 0:
            module.kv_heads = spec.kv_heads // size
        elif size % spec.kv_heads == 0:
            # Fewer KV heads than ranks: replicate k_proj and v_proj, which are small, and use one head per rank.
            head = self.mesh_dim.index * spec.kv_heads // size
            module.kv_head_slice, module.kv_heads = slice(head, head + 1), 1
        else:
            self.check_divisible("KV heads", spec.kv_heads)
        self.shard_linears(module, replicated=() if spec.kv_heads % size == 0 else ("k_proj", "v_proj"))
        if module.sinks is not None:
            sizes = self.mesh_dim.split_sizes(spec.heads)
            shard_parameters(self.model, self.name, {"sinks": 0}, sizes, self.mesh_dim, "tensor")

    def shard_expert_width(self, module: MixtureOfExperts) -> None:
        """Split the hidden channels of all experts. Routed and shared experts are reduced in one sum."""
        self.check_divisible("hidden channels in an expert", module.spec.intermediate_size)
        module.tp_region = SequenceParallelRegion(self.mesh_dim)
        if module.shared is not None:
            module.shared.tp_region = NO_PARALLEL
        replace(self, name=f"{self.name}.experts").shard_linears(module.experts)

    def shard_linears(self, module: nn.Module, replicated: tuple[str, ...] = ()) -> None:
        """Shard all linear layers of a module, except those in `replicated`."""
        children = dict(module.named_children())
        for leaf in COLWISE[type(module)]:
            if leaf in children and leaf not in replicated:
                self.shard_colwise(f"{self.name}.{leaf}", children[leaf])
        self.shard_rowwise(f"{self.name}.{ROWWISE[type(module)]}", children[ROWWISE[type(module)]])

    def shard_colwise(self, name: str, layer: nn.Module) -> None:
        assert isinstance(layer, Linear | GroupedLinear)
        self.check_blocks(name, layer, 1)
        sizes, dims = self.mesh_dim.split_sizes(layer.out_features), GROUPED_COLWISE_DIMS
        layer.out_features = sizes[self.mesh_dim.index]
        if isinstance(layer, Linear):
            layer.colwise_mesh, dims = self.mesh_dim, COLWISE_DIMS
        shard_parameters(self.model, name, dims, sizes, self.mesh_dim, "tensor")

    def shard_rowwise(self, name: str, layer: nn.Module) -> None:
        assert isinstance(layer, Linear | GroupedLinear)
        self.check_blocks(name, layer, self.mesh_dim.size)
        sizes = self.mesh_dim.split_sizes(layer.in_features)
        layer.rowwise_mesh, layer.in_features = self.mesh_dim, sizes[self.mesh_dim.index]
        dims = ROWWISE_DIMS if isinstance(layer, Linear) else GROUPED_ROWWISE_DIMS
        shard_parameters(self.model, name, dims, sizes, self.mesh_dim, "tensor")

    def check_blocks(self, name: str, layer: Linear | GroupedLinear, num_shards: int) -> None:
        """Raise UserError if a quantized weight cannot be split at block boundaries."""
        check_splittable(layer, f"parallel.tp: {name}")
        is_quantized = "quantized_weight" in dict(layer.named_parameters(recurse=False))
        if is_quantized and (size := layer.in_features) % (num_shards * BLOCK):
            reason = f"{size} input channels of {name}, in blocks of {BLOCK}, cannot be split over {num_shards} devices"
            raise UserError(f"parallel.tp: {reason}. Use another value, or quantization=none.")

    def check_divisible(self, unit: str, count: int) -> None:
        if count % self.mesh_dim.size:
            reason = f"{count} {unit} of {self.name} cannot be split over {self.mesh_dim.size} devices"
            raise UserError(f"parallel.tp: {reason}. Use a value that divides {count}.")
