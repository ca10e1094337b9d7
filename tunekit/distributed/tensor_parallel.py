"""Layers that several ranks share (arXiv:1909.08053): each has some heads, a part of the width, a part of the ids.

Between layers each has a part of the tokens (arXiv:2205.05198); the loss is made of parts of the logits. What cannot be
divided is made whole by each rank, or refused.
"""

from dataclasses import dataclass

from torch import nn

from tunekit.distributed.collectives import ALONE, MeshDim, ReplicatedRegion, SequenceParallelRegion, VocabShard
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.shard_param import shard_parameters
from tunekit.errors import UserError
from tunekit.kernels.nf4 import BLOCK
from tunekit.models.attention import AllHeadNorm, SelfAttention
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import GatedMLP
from tunekit.models.gated_delta_net import GatedDeltaNet
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.mla import MultiLatentAttention
from tunekit.models.moe import Experts, MixtureOfExperts

# Which layers are divided by what they give, and which by what they read.
ROWS = {
    SelfAttention: ("q_proj", "k_proj", "v_proj"),
    MultiLatentAttention: ("q_proj", "q_b_proj", "kv_b_proj"),
    GatedMLP: ("gate_proj", "up_proj"),
    Experts: ("gate_proj", "up_proj"),
}
COLUMNS = {SelfAttention: "o_proj", MultiLatentAttention: "o_proj", GatedMLP: "down_proj", Experts: "down_proj"}
# And along which dimension then their tensors, in a layer and in a stack of them.
BY_ROWS = {"weight": 0, "packed": 0, "scales": 0, "bias": 0, "lora_B.weight": 0, "lora_B0": 0}
BY_ROWS |= {"lora_magnitude_vector": 0}
BY_COLUMNS = {"weight": 1, "packed": 1, "scales": 1, "lora_A.weight": 1, "lora_A0": 1}
STACKED_ROWS = {"weight": 1, "packed": 1, "scales": 1, "bias": 1, "lora_B": 1}
STACKED_COLUMNS = {"weight": 2, "packed": 2, "scales": 2, "lora_A": 2}
IDS = {"weight": 0, "lora_embedding_A": 1}


def apply_tensor_parallel(model: Decoder, run: DistributedContext) -> None:
    if run.sizes.tp == 1:
        return
    assert run.mesh is not None
    shard_layers(model, MeshDim.along(run.mesh, "tensor"), run.sizes.ep > 1)


def shard_layers(model: Decoder, team: MeshDim, travel: bool) -> None:
    """Leave this rank's part of each layer. With `travel` experts are divided among ranks as they are."""
    model.way = SequenceParallelRegion(team)
    shard_vocabulary(model, team)
    for name, module in [*model.named_modules()][::-1]:  # what is inside of others first
        TensorParallelPlan(model, team, name, travel).divide(module)


def shard_vocabulary(model: Decoder, team: MeshDim) -> None:
    """Embedding and head by ids."""
    share = VocabShard(team, team.even(model.spec.vocab))
    model.embed.share = model.head.share = share
    shard_parameters(model, "embed", IDS, share.sizes, team, "tensor")
    model.embed.num_embeddings = model.head.out_features = share.sizes[team.index]
    model.head.rows = team
    if model.spec.tied:
        model.head.weight, model.splits["head.weight"] = model.embed.weight, model.splits["embed.weight"]
    adapted = {leaf: dim for leaf, dim in BY_ROWS.items() if leaf != "weight" or not model.spec.tied}
    shard_parameters(model, "head", adapted, share.sizes, team, "tensor")


@dataclass(frozen=True)
class TensorParallelPlan:
    """Divides the layers of one module."""

    model: Decoder
    team: MeshDim
    name: str
    travel: bool  # whether experts are divided among ranks as they are

    def divide(self, module: nn.Module) -> None:
        match module:
            case SelfAttention():
                self.attention(module)
            case MultiLatentAttention():
                self.count("heads", module.spec.heads)
                module.heads = module.spec.heads // self.team.size
                module.way = SequenceParallelRegion(self.team)
                self.layers(module)
            case GatedDeltaNet():
                module.way = ReplicatedRegion(self.team)
            case GatedMLP():
                self.count("hidden channels", module.gate_proj.out_features)
                module.way = SequenceParallelRegion(self.team)
                self.layers(module)
            case MixtureOfExperts() if not self.travel:
                self.experts(module)

    def attention(self, module: SelfAttention) -> None:
        spec, size = module.spec, self.team.size
        self.count("heads", spec.heads)
        if isinstance(module.q_norm, AllHeadNorm):
            raise UserError(
                f"parallel.tp: {self.name} norms all heads together, and {size} devices would share them: "
                "use parallel.dp_shard or parallel.cp"
            )
        module.way = SequenceParallelRegion(self.team)
        if spec.kv_heads % size == 0:
            module.kv_heads = spec.kv_heads // size
        elif size % spec.kv_heads == 0:
            # Each head of keys serves several ranks, which all make it: they are small where they are so few.
            head = self.team.index * spec.kv_heads // size
            module.taken, module.kv_heads = slice(head, head + 1), 1
        else:
            self.count("heads of keys", spec.kv_heads)
        self.layers(module, whole=() if spec.kv_heads % size == 0 else ("k_proj", "v_proj"))
        if module.sinks is not None:
            shard_parameters(self.model, self.name, {"sinks": 0}, self.team.even(spec.heads), self.team, "tensor")

    def experts(self, module: MixtureOfExperts) -> None:
        """The width of each expert. All of them, and the one that all tokens go through, make one sum."""
        self.count("hidden channels in an expert", module.spec.hidden)
        module.way = SequenceParallelRegion(self.team)
        if module.shared is not None:
            module.shared.way = ALONE
        TensorParallelPlan(self.model, self.team, f"{self.name}.experts", self.travel).layers(module.experts)

    def layers(self, module: nn.Module, whole: tuple[str, ...] = ()) -> None:
        """All of a module, but for those that each rank has whole."""
        named = dict(module.named_children())
        for leaf in ROWS[type(module)]:
            if leaf in named and leaf not in whole:
                self.rows(f"{self.name}.{leaf}", named[leaf])
        self.columns(f"{self.name}.{COLUMNS[type(module)]}", named[COLUMNS[type(module)]])

    def rows(self, name: str, layer: nn.Module) -> None:
        assert isinstance(layer, Linear | GroupedLinear)
        self.blocks(name, layer, 1)
        sizes, dims = self.team.even(layer.out_features), STACKED_ROWS
        layer.out_features = sizes[self.team.index]
        if isinstance(layer, Linear):
            layer.rows, dims = self.team, BY_ROWS
        shard_parameters(self.model, name, dims, sizes, self.team, "tensor")

    def columns(self, name: str, layer: nn.Module) -> None:
        assert isinstance(layer, Linear | GroupedLinear)
        self.blocks(name, layer, self.team.size)
        sizes = self.team.even(layer.in_features)
        layer.columns, layer.in_features = self.team, sizes[self.team.index]
        dims = BY_COLUMNS if isinstance(layer, Linear) else STACKED_COLUMNS
        shard_parameters(self.model, name, dims, sizes, self.team, "tensor")

    def blocks(self, name: str, layer: Linear | GroupedLinear, parts: int) -> None:
        """What is packed is cut where a block ends, and has no numbers that are of the whole."""
        packed = dict(layer.named_parameters(recurse=False))
        if "outer" in packed:
            raise UserError(
                f"parallel.tp: {name} has scales that were packed together, over all that devices would share: "
                "set quantization.double_quant to false"
            )
        if "packed" in packed and (size := layer.in_features) % (parts * BLOCK):
            told = f"{name} reads {size} channels in blocks of {BLOCK}, which {parts} devices cannot share alike"
            raise UserError(f"parallel.tp: {told}: choose another number, or plain weights")

    def count(self, what: str, count: int) -> None:
        if count % self.team.size:
            told = f"{self.name} has {count} {what}, which {self.team.size} devices cannot share alike"
            raise UserError(f"parallel.tp: {told}: choose a number that divides {count}")
