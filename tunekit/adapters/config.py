"""Trained parameters: all weights, or LoRA and DoRA adapters of frozen layers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.adapters.module_patterns import (
    check_patterns,
    display_name,
    last_component,
    match_modules,
    module_params,
    values_by_module,
)
from tunekit.adapters.token_rows import add_token_rows, check_token_ids
from tunekit.devices import fork_rng
from tunekit.distributed.sharding import copy_to_shard, shard_slice, unsharded
from tunekit.errors import FieldError, UserError, check_range
from tunekit.kernels.grouped_mm import grouped_mm
from tunekit.kernels.lora import CPU_CHUNK_SIZE, LoRAWeights, lora_linear, lora_row_norms
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Embedding, GroupedLinear, Linear, LinearBase
from tunekit.models.weight_init import named_generator
from tunekit.models.weight_map import Shape, as_tuple

Layer = Linear | GroupedLinear | Embedding
ParamGroups = Iterator[tuple[list[nn.Parameter], float]]
TIED_MODULES = {"embed", "head"}  # share one weight in models with tied embeddings
B_FACTORS = ("lora_B", "lora_embedding_B")
INITIAL_BUFFERS = {"lora_A0": "lora_A.weight", "lora_B0": "lora_B.weight"}  # buffer of initial values -> parameter


@dataclass(frozen=True)
class NoAdapter:
    """Train the weights of the model: all of them, or those of some modules."""

    kind: ClassVar[str] = "none"
    adapter_path: ClassVar[None] = None  # training starts from the checkpoint
    # Module groups, names or regular expressions; all other weights are frozen. Empty: train all weights
    trainable_modules: str | tuple[str, ...] = ()
    frozen_modules: str | tuple[str, ...] = ()  # Modules that are not trained, even if `trainable_modules` has them

    def __post_init__(self) -> None:
        for key in ("trainable_modules", "frozen_modules"):
            check_patterns(key, as_tuple(getattr(self, key)))

    def apply(self, model: Decoder) -> None:
        """Freeze the weights that are not trained. A score head is trained unless `frozen_modules` contains it."""
        if self.trainable_modules:
            trained = module_params(model, "adapter.trainable_modules", self.trainable_modules)
            trained |= set() if model.spec.score is None else set(model.head.parameters())
            for parameter in [p for p in model.parameters() if p not in trained]:
                parameter.requires_grad_(False)
        for parameter in module_params(model, "adapter.frozen_modules", self.frozen_modules):
            parameter.requires_grad_(False)
        if self.frozen_modules and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("adapter.frozen_modules: no weights are left to train. Remove some modules.")
        if model.trained_ids and not model.embed.weight.requires_grad:
            key = "trainable_modules" if self.trainable_modules else "frozen_modules"
            raise UserError(f"adapter.{key}: the embeddings of new tokens would not be trained. Train embed_tokens.")

    def init_weights(self, model: Decoder, seed: int) -> None:
        """Do nothing: no parameters were added."""

    def param_groups(self, model: Decoder) -> ParamGroups:
        """Yield the parameters that require a gradient, and their learning rate factor."""
        yield [p for p in model.parameters() if p.requires_grad], 1.0


@dataclass(frozen=True)
class FrozenModel(NoAdapter):
    """Freeze all weights, for reference and teacher models."""

    def apply(self, model: Decoder) -> None:
        model.requires_grad_(False)


@dataclass(frozen=True)
class LoRAConfig:
    """LoRA (arXiv:2106.09685): W + scale B A with frozen W. Parameters have the names of PEFT."""

    kind: ClassVar[str] = "lora"
    keeps_shared_keys: ClassVar[bool] = True  # DoRA keeps the keys of LoRA, and the reverse
    rank: int = 16  # Rank of the update B A
    alpha: float = 32.0  # scale = alpha / rank
    dropout: float = 0.0  # Dropout probability on the adapter input
    target_modules: str | tuple[str, ...] = "all-linear"  # Module groups, names or regular expressions
    use_rslora: bool = False  # scale = alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)
    # `default`: Kaiming A, zero B. `pissa`: principal singular vectors (arXiv:2404.02948)
    init: Literal["default", "pissa"] = "default"
    loraplus_lr_ratio: float = 1.0  # LoRA+: learning rate of B relative to A (arXiv:2402.12354)
    adapter_path: str | None = None  # PEFT adapter directory to start from
    rank_pattern: dict[str, int] = field(default_factory=dict)  # Ranks by module pattern; the first match wins
    alpha_pattern: dict[str, float] = field(default_factory=dict)  # Alphas by module pattern; the first match wins
    modules_to_save: str | tuple[str, ...] = ()  # Modules that are trained in full and saved with the adapter
    bias: Literal["none", "lora_only", "all"] = "none"  # Biases to train: none, those of adapted layers, or all
    untie_embeddings: bool = False  # Give lm_head its own weights if it shares the embedding's
    # Ids of tokens whose embeddings are trained too, and saved on their own; those of new tokens always are
    trainable_token_indices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range(self, "rank", ge=1)
        check_range(self, "alpha", "loraplus_lr_ratio", gt=0)
        check_range(self, "dropout", ge=0, lt=1)
        if self.adapter_path is not None and self.init != "default":
            raise FieldError("adapter_path", f"not compatible with adapter.init={self.init}. Remove one of the two.")
        if not self.target_modules:
            raise FieldError("target_modules", "must name at least one module")
        check_token_ids(self.trainable_token_indices)
        self.check_patterns()

    def check_patterns(self) -> None:
        """Raise FieldError for an invalid regular expression, rank or alpha."""
        for pattern, rank in self.rank_pattern.items():
            if rank < 1:
                raise FieldError("rank_pattern", f"{pattern}: must be >= 1, got {rank}")
        for pattern, alpha in self.alpha_pattern.items():
            if alpha <= 0:
                raise FieldError("alpha_pattern", f"{pattern}: must be > 0, got {alpha}")
        fields = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        fields |= {"target_modules": as_tuple(self.target_modules), "modules_to_save": as_tuple(self.modules_to_save)}
        for key, patterns in fields.items():
            check_patterns(key, patterns)

    def target_layers(self, model: Decoder) -> dict[str, Layer]:
        """Layers that match `target_modules`, by name."""
        layers = {n: m for n, m in model.named_modules() if isinstance(m, Layer) and ".lora_" not in n}
        names = {n: m for n, m in layers.items() if not isinstance(m, LinearBase) or m.is_adaptable}
        return {
            name: names[name]
            for pattern in as_tuple(self.target_modules)
            for name in match_modules("adapter.target_modules", pattern, names)
        }

    def ranks_and_alphas(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Rank and alpha by layer name."""
        names = list(names)
        ranks, alphas = (
            values_by_module("adapter.rank_pattern", self.rank_pattern, names),
            values_by_module("adapter.alpha_pattern", self.alpha_pattern, names),
        )
        return {name: (ranks.get(name, self.rank), alphas.get(name, self.alpha)) for name in names}

    def scale(self, rank: int, alpha: float) -> float:
        """Factor on the update B A."""
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def apply(self, model: Decoder) -> None:
        """Freeze the model and add adapters to its target layers."""
        trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
        model.requires_grad_(False)
        if self.untie_embeddings:
            model.spec = replace(model.spec, tie_word_embeddings=False)
            model.head.weight = nn.Parameter(torch.empty_like(model.head.weight), requires_grad=False)
            trainable.add(model.head.weight)
        layers = self.target_layers(model)
        sizes = self.ranks_and_alphas(layers)
        saved = self.modules_to_save_params(model, layers)
        for parameter in saved.values():
            parameter.requires_grad_(parameter in trainable)
        for name, layer in layers.items():
            self.wrap_layer(layer, *sizes[name])
        add_token_rows(model, sorted({*self.trainable_token_indices, *model.trained_ids}), {*layers}, {*saved})

    def modules_to_save_params(self, model: Decoder, layers: Iterable[str]) -> dict[str, nn.Parameter]:
        """Parameters of the base model that are saved with the adapters of `layers`, by name."""
        adapted = {*layers}
        modules = {n: m for n, m in model.named_modules() if ".lora_" not in n and [*m.parameters(recurse=False)]}
        saved = dict.fromkeys(
            name
            for pattern in as_tuple(self.modules_to_save)
            for name in match_modules("adapter.modules_to_save", pattern, modules)
        )
        saved |= {} if model.spec.score is None else {"head": None}  # a score head is always trained
        tied = TIED_MODULES if model.spec.tie_word_embeddings and not TIED_MODULES.isdisjoint(adapted) else set()
        if both := [n for n in saved if n in adapted | tied or any(layer.startswith(f"{n}.") for layer in adapted)]:
            raise UserError(
                f"adapter.modules_to_save: {display_name(both[0])} also has an adapter. "
                "Remove it from modules_to_save or from target_modules."
            )
        quantized = [n for n in saved if not all(p.is_floating_point() for p in modules[n].parameters(recurse=False))]
        if quantized:
            raise UserError(
                f"adapter.modules_to_save: {display_name(quantized[0])} is quantized and cannot be trained. "
                "Remove it from modules_to_save."
            )
        names = [f"{name}.{key}" for name in saved for key, _ in modules[name].named_parameters(recurse=False)]
        biased = {"none": set(), "lora_only": adapted, "all": set(modules)}[self.bias]
        linears = {n: m for n, m in modules.items() if isinstance(m, Linear)}
        names += [f"{n}.bias" for n, m in linears.items() if n in biased and m.bias is not None]
        return {name: model.get_parameter(name) for name in names}

    def wrap_layer(self, layer: Layer, rank: int, alpha: float) -> None:
        """Add the adapter parameters to a layer, on the meta device."""
        layer.lora_scale = self.scale(rank, alpha)
        if isinstance(layer, Embedding):
            layer.lora_embedding_A = empty_param(rank, layer.num_embeddings)
            layer.lora_embedding_B = empty_param(layer.embedding_dim, rank)
            layer.update = self.forward_embedding
        elif isinstance(layer, GroupedLinear):
            if self.init == "pissa":
                raise UserError(
                    "adapter.init: pissa does not support experts. Remove them from target_modules, or set "
                    "adapter.init=default."
                )
            layer.lora_A = empty_param(layer.experts, rank, layer.in_features)
            layer.lora_B = empty_param(layer.experts, layer.out_features, rank)
            layer.update = self.forward_experts
        else:
            self.add_to_linear(layer, rank)

    def add_to_linear(self, layer: Linear, rank: int) -> None:
        if self.init == "pissa" and rank > min(layer.out_features, layer.in_features):
            shape = [layer.out_features, layer.in_features]
            raise UserError(f"adapter.rank: must be <= {min(shape)} for pissa in a layer of shape {shape}, got {rank}")
        layer.lora_A = Linear(layer.in_features, rank, bias=False, device="meta")
        layer.lora_B = Linear(rank, layer.out_features, bias=False, device="meta")
        layer.update = self.forward_linear
        if self.init == "pissa":
            for name, factor in (("A", layer.lora_A), ("B", layer.lora_B)):
                layer.register_buffer(f"lora_{name}0", torch.empty_like(factor.weight, requires_grad=False))

    @property
    def needs_base_weights(self) -> bool:
        """Whether initial values depend on the base weights."""
        return self.init == "pissa"

    def initial_values(
        self, layer: Layer, shapes: Mapping[str, Shape], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Initial values of the adapter tensors that are not zero, by name. `shapes` are those of the full tensors."""
        if isinstance(layer, Embedding):
            return {"lora_embedding_B": torch.randn(shapes["lora_embedding_B"], generator=generator)}
        if isinstance(layer, Linear) and self.init == "pissa":
            a, b = pissa_factors(full_weight(layer, shapes) / layer.lora_scale, layer.lora_A.out_features, generator)
            return {"lora_A.weight": a, "lora_A0": a, "lora_B.weight": b, "lora_B0": b}
        name = "lora_A.weight" if isinstance(layer, Linear) else "lora_A"
        bound = shapes[name][-1] ** -0.5
        return {name: torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)}

    def init_weights(self, model: Decoder, seed: int) -> None:
        """Initialize the adapters; their update is zero. Full tensors are drawn, of which each rank keeps its shard."""
        for unit, layers in group_by_fsdp_unit(model, self.target_layers(model)).items():
            shapes = {
                name: {key: shard_slice(t).shape for key, t in adapter_tensors(layer).items()}
                for name, layer in layers.items()
            }
            with unsharded(unit) if self.needs_base_weights else nullcontext():
                values = {
                    name: self.initial_values(layer, shapes[name], named_generator(seed, name))
                    for name, layer in layers.items()
                }
            for name, layer in layers.items():
                for key, tensor in (tensors := adapter_tensors(layer)).items():
                    if (value := values[name].get(key)) is None:
                        nn.init.zeros_(tensor)
                    else:  # buffers are rounded like their parameters, so that the update is zero in bf16 too
                        copy_to_shard(tensor, value.to(tensors[INITIAL_BUFFERS.get(key, key)].dtype))

    def lora_weights(self, layer: Linear) -> LoRAWeights:
        """Base layer and adapter weights of a layer, as the kernels take them."""
        initial = (layer.lora_A0, layer.lora_B0) if self.init == "pissa" else ()
        return LoRAWeights(layer, layer.lora_scale, layer.lora_A.weight, layer.lora_B.weight, *initial)

    def forward_linear(self, layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        """Outputs of adapted layers that share the input `x`."""
        dropout = self.dropout if layers[0].training else 0.0
        return lora_linear(x, [self.lora_weights(layer) for layer in layers], dropout)

    def forward_experts(self, layers: Sequence[GroupedLinear], x: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Outputs of adapted expert layers for rows sorted by expert. Multiplies by the A of all layers at once."""
        dropout = self.dropout if layers[0].training else 0.0
        if dropout and len(layers) > 1:  # each layer has its own dropout mask
            return tuple(y for layer in layers for y in self.forward_experts((layer,), x, sizes))
        a = torch.cat([layer.lora_A for layer in layers], dim=1)
        low = grouped_mm(F.dropout(x, dropout), a.to(x.dtype), sizes)
        lows = low.split([layer.lora_A.shape[1] for layer in layers], dim=-1)
        return tuple(
            self.add_expert_update(layer, x, low.contiguous(), sizes) for layer, low in zip(layers, lows, strict=True)
        )

    def add_expert_update(self, layer: GroupedLinear, x: Tensor, low: Tensor, sizes: Tensor) -> Tensor:
        """Output of a layer for `x`, plus the scaled product of `low` (N, rank) and B."""
        up = (layer.lora_B * layer.lora_scale).to(x.dtype)  # the fast grouped matmul needs the dtype of the rows
        return layer.matmul(x, sizes).add_(grouped_mm(low, up, sizes))

    def forward_embedding(self, layer: Embedding, tokens: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Embeddings of tokens (...) with their update: (..., dim)."""
        low = layer.lookup(tokens, layer.lora_embedding_A.T) @ layer.lora_embedding_B.T
        rows = layer.embed(tokens, dtype)
        return rows + (low * layer.lora_scale).type_as(rows)

    def delta(self, layer: Linear) -> Tensor:
        """Update of the weight, (out, in)."""
        delta = layer.lora_B.weight @ layer.lora_A.weight
        return layer.lora_scale * (delta - layer.lora_B0 @ layer.lora_A0 if self.init == "pissa" else delta)

    @contextmanager
    def disabled(self, model: Decoder) -> Iterator[None]:
        """Disable all adapters inside the context. `modules_to_save` keep their trained weights."""
        layers: list[Any] = [m for m in model.modules() if isinstance(m, Layer) and m.update is not None]
        updates = [layer.update for layer in layers]
        try:
            for layer in layers:
                layer.update = None
            yield
        finally:
            for layer, update in zip(layers, updates, strict=True):
                layer.update = update

    def param_groups(self, model: Decoder) -> ParamGroups:
        """Yield B with the learning rate factor of LoRA+ after all other trained parameters."""
        trained = [
            (last_component(n.removesuffix(".weight")), p) for n, p in model.named_parameters() if p.requires_grad
        ]
        yield [p for name, p in trained if name not in B_FACTORS], 1.0
        yield [p for name, p in trained if name in B_FACTORS], self.loraplus_lr_ratio


@dataclass(frozen=True)
class DoRAConfig(LoRAConfig):
    """DoRA (arXiv:2402.09353): LoRA on the direction of the weight, and a trained magnitude per output."""

    kind: ClassVar[str] = "dora"

    def wrap_layer(self, layer: Layer, rank: int, alpha: float) -> None:
        if not isinstance(layer, Linear):
            kind = "embed" if isinstance(layer, Embedding) else "experts"
            raise UserError(
                f"adapter.target_modules: dora does not support {kind}. Remove it from target_modules, or set "
                "adapter=lora."
            )
        super().wrap_layer(layer, rank, alpha)
        layer.lora_magnitude_vector = nn.Parameter(torch.empty(layer.out_features, device="meta"))

    @property
    def needs_base_weights(self) -> bool:
        return True

    def initial_values(
        self, layer: Layer, shapes: Mapping[str, Shape], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Initial values of LoRA, and magnitudes equal to the row norms of the weight."""
        assert isinstance(layer, Linear)
        return super().initial_values(layer, shapes, generator) | {"lora_magnitude_vector": row_norms(layer, shapes)}

    def forward_linear(self, layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(layers, super().forward_linear(layers, x), strict=True)
        return tuple(self.apply_magnitude(layer, y) for layer, y in pairs)

    def apply_magnitude(self, layer: Linear, y: Tensor) -> Tensor:
        """Scale outputs `y` (..., out) by magnitude / norm of the rows of the weight; the bias is not scaled."""
        norm = self.row_norms(layer)  # has no gradient, as in section 4.3 of the paper
        factor = (layer.lora_magnitude_vector / norm).to(y.dtype)
        if layer.effective_bias is None:
            return y * factor
        bias = layer.effective_bias.to(y.dtype)
        return torch.addcmul(bias, y - bias, factor)

    def row_norms(self, layer: Linear) -> Tensor:
        """Norms (out,) of the rows of the updated weight."""
        return combine_column_shards(layer, lora_row_norms(self.lora_weights(layer)))


def group_by_fsdp_unit(model: Decoder, layers: Mapping[str, Layer]) -> dict[nn.Module, dict[str, Layer]]:
    """Group layers by FSDP unit: a decoder layer, or the root for everything else."""
    units: dict[nn.Module, dict[str, Layer]] = {}
    for name, layer in layers.items():
        components = name.split(".")
        unit = model.get_submodule(".".join(components[:2])) if components[0] == "layers" else model
        units.setdefault(unit, {})[name] = layer
    return units


def adapter_tensors(layer: Layer) -> dict[str, Tensor]:
    """Parameters and buffers that an adapter has added to a layer, by name."""
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name.startswith("lora_")}


@torch.no_grad()
def row_norms(layer: Linear, shapes: Mapping[str, Shape]) -> Tensor:
    """Row norms (out,) of the full weight in fp32, computed for chunks of rows."""
    chunk_rows = max(1, CPU_CHUNK_SIZE // layer.in_features)
    norms = torch.cat([rows.norm(dim=1) for rows in layer.iter_fp32_rows(chunk_rows)])
    return gather_row_shards(layer, combine_column_shards(layer, norms), shapes)


def combine_column_shards(layer: Linear, norms: Tensor) -> Tensor:
    """Norms (out,) of rows whose columns are sharded, from the norms of the local columns."""
    mesh = layer.rowwise_mesh
    return norms if mesh is None else mesh.all_reduce_sum(norms.square()).sqrt()


def gather_row_shards(layer: Linear, local: Tensor, shapes: Mapping[str, Shape]) -> Tensor:
    """Gather (..., out) from the local shard (..., out / size)."""
    mesh = layer.colwise_mesh
    return local if mesh is None else mesh.gather_columns(local, shapes["lora_B.weight"][0])


@torch.no_grad()
def full_weight(layer: Linear, shapes: Mapping[str, Shape]) -> Tensor:
    """Full, unsharded weight (out, in) in fp32."""
    weight, mesh = gather_row_shards(layer, layer.dequantize().float().T, shapes).T, layer.rowwise_mesh
    return weight if mesh is None else mesh.gather_columns(weight, shapes["lora_A.weight"][1])


def empty_param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def lora_factors(layer: Linear | GroupedLinear) -> tuple[Tensor, Tensor]:
    """A (..., rank, in) and B (..., out, rank) of an adapted layer."""
    if isinstance(layer, Linear):
        return layer.lora_A.weight, layer.lora_B.weight
    return layer.lora_A, layer.lora_B


def pissa_factors(weight: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors A (rank, in) and B (out, rank) of the best rank-`rank` approximation B A of `weight` (PiSSA)."""
    with fork_rng(weight.device):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        # With 16 extra directions and power iterations the randomized SVD is exact to rounding if the singular values
        # decay, as those of trained weights do. For noise, its error exceeds the optimum by less than 1e-4.
        u, s, v = torch.svd_lowrank(weight, q=min(rank + 16, *weight.shape), niter=8)
    root = s[:rank].sqrt()
    return (v[:, :rank] * root).T.contiguous(), (u[:, :rank] * root).contiguous()
