"""What is trained: everything, or low-rank updates beside frozen layers."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.devices import fork_rng
from tunekit.distributed.collectives import gather_columns
from tunekit.distributed.sharding import copy_to_shard, shard_slice, unsharded
from tunekit.errors import FieldError, UserError
from tunekit.kernels.grouped_mm import grouped_mm
from tunekit.kernels.lora import CACHED, LoRAWeights, lora_linear, lora_row_norms
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Embedding, GroupedLinear, Linear
from tunekit.models.weight_init import named_generator
from tunekit.models.weight_map import Shape

Layer = Linear | GroupedLinear | Embedding
ParamGroups = Iterator[tuple[list[nn.Parameter], float]]
Number = TypeVar("Number", int, float)

TIED_MODULES = {"embed", "head"}  # one tensor in many models

INITIAL_BUFFERS = {"lora_A0": "lora_A.weight", "lora_B0": "lora_B.weight"}  # what was there first, by name

MODULE_GROUPS = {  # what they mean, as patterns over whole names
    "attn": r"layers\.\d+\.attn\..+",
    "mlp": r"layers\.\d+\.mlp\.(?!(.+\.)?experts\.).+",
    "all-linear": r"layers\.\d+\.(attn|mlp)\.(?!(.+\.)?experts\.).+",
    "experts": r"layers\.\d+\.mlp\.(.+\.)?experts\..+",
    "lm_head": "head",
    "embed_tokens": "embed",
    "norm": "norm",
    "norms": r"(.+\.)?\w*norm",
}


@dataclass(frozen=True)
class NoAdapter:
    """Train every weight."""

    kind: ClassVar[str] = "none"
    adapter_path: ClassVar[None] = None  # the checkpoint is all there is to start from

    def apply(self, model: Decoder) -> None:
        """Nothing is added and nothing frozen."""

    def init_weights(self, model: Decoder, seed: int) -> None:
        """Nothing was added."""

    def param_groups(self, model: Decoder) -> ParamGroups:
        """Trained parameters, with the factor on their learning rate; some numbers of some families are only stored."""
        yield [p for p in model.parameters() if p.requires_grad], 1.0


@dataclass(frozen=True)
class FrozenModel(NoAdapter):
    """Train nothing: the model is only asked."""

    def apply(self, model: Decoder) -> None:
        model.requires_grad_(False)


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank updates W + s B A of frozen layers (arXiv:2106.09685), under the names that PEFT gives them."""

    kind: ClassVar[str] = "lora"
    rank: int = 16  # Rank; scale = alpha / rank; dropout on the adapter input; which biases to train
    alpha: float = 32.0  # s = alpha / rank
    dropout: float = 0.0  # on the input of the update
    target_modules: str | tuple[str, ...] = "all-linear"  # Module groups, names or regular expressions
    use_rslora: bool = False  # scale = alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)
    # `default`: Kaiming A, zero B. `pissa`: principal singular vectors (arXiv:2404.02948)
    init: Literal["default", "pissa"] = (
        "default"  # zero: B = 0; pissa: the strongest directions of W (arXiv:2404.02948)
    )
    loraplus_lr_ratio: float = 1.0  # LoRA+: learning rate of B relative to A (arXiv:2402.12354)
    adapter_path: str | None = None  # folder of a PEFT adapter to go on from
    # Ranks and alphas by module pattern; the first match wins
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(
        default_factory=dict
    )  # and their alphas; the first pattern that fits counts
    # Modules that are trained in full and saved with the adapter
    modules_to_save: str | tuple[str, ...] = ()
    bias: Literal["none", "lora_only", "all"] = "none"  # biases that are trained: of adapted layers, or all
    untie_embeddings: bool = False  # Give lm_head its own weights if it shares the embedding's

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FieldError("rank", f"must be 1 or more, not {self.rank}")
        if self.alpha <= 0:
            raise FieldError("alpha", f"must be above 0, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise FieldError("dropout", f"a share from 0 to below 1, not {self.dropout}")
        if self.loraplus_lr_ratio <= 0:
            raise FieldError("loraplus_lr_ratio", f"must be above 0, not {self.loraplus_lr_ratio}")
        if self.adapter_path is not None and self.init != "default":
            raise FieldError(
                "adapter_path", f"{self.init} begins with the weights and no adapter: leave one of them out"
            )
        if not self.target_modules:
            raise FieldError("target_modules", "name at least one layer")
        self.check_patterns()

    def check_patterns(self) -> None:
        """Every pattern compiles, and what stands behind it makes sense."""
        for pattern, rank in self.rank_pattern.items():
            if rank < 1:
                raise FieldError("rank_pattern", f"{pattern}: must be 1 or more, not {rank}")
        for pattern, alpha in self.alpha_pattern.items():
            if alpha <= 0:
                raise FieldError("alpha_pattern", f"{pattern}: must be above 0, not {alpha}")
        fields = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        fields |= {"target_modules": as_tuple(self.target_modules), "modules_to_save": as_tuple(self.modules_to_save)}
        for key, pattern in ((key, pattern) for key, patterns in fields.items() for pattern in patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                raise FieldError(key, f"{pattern!r} is no regular expression: {error}") from error

    def target_layers(self, model: Decoder) -> dict[str, Layer]:
        """The layers to adapt, by name."""
        names = {n: m for n, m in model.named_modules() if isinstance(m, Layer) and ".lora_" not in n}
        return {
            name: names[name]
            for pattern in as_tuple(self.target_modules)
            for name in match_modules("target_modules", pattern, names)
        }

    def ranks_and_alphas(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Rank and alpha of adapted layers, by name."""
        names = list(names)
        ranks, alphas = (
            values_by_module("rank_pattern", self.rank_pattern, names),
            values_by_module("alpha_pattern", self.alpha_pattern, names),
        )
        return {name: (ranks.get(name, self.rank), alphas.get(name, self.alpha)) for name in names}

    def scale(self, rank: int, alpha: float) -> float:
        """The factor on an update of this rank."""
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def apply(self, model: Decoder) -> None:
        """Freeze the model and hang the updates beside its layers."""
        trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
        model.requires_grad_(False)
        if self.untie_embeddings:
            model.spec = replace(model.spec, tie_word_embeddings=False)
            model.head.weight = nn.Parameter(torch.empty_like(model.head.weight), requires_grad=False)
            trainable.add(model.head.weight)
        layers = self.target_layers(model)
        sizes = self.ranks_and_alphas(layers)
        for parameter in self.modules_to_save_params(model, layers).values():
            parameter.requires_grad_(parameter in trainable)
        for name, layer in layers.items():
            self.wrap_layer(layer, *sizes[name])

    def modules_to_save_params(self, model: Decoder, layers: Iterable[str]) -> dict[str, nn.Parameter]:
        """The parameters of the model itself that are saved with the updates of `layers`, most of them trained."""
        adapted = {*layers}
        own = {n: m for n, m in model.named_modules() if ".lora_" not in n and [*m.parameters(recurse=False)]}
        whole = dict.fromkeys(
            name
            for pattern in as_tuple(self.modules_to_save)
            for name in match_modules("modules_to_save", pattern, own)
        )
        whole |= {} if model.spec.score is None else {"head": None}  # one that scores is new, or begins as it was
        shared = TIED_MODULES if model.spec.tie_word_embeddings and not TIED_MODULES.isdisjoint(adapted) else set()
        if both := [n for n in whole if n in adapted | shared or any(layer.startswith(f"{n}.") for layer in adapted)]:
            raise UserError(
                f"adapter.modules_to_save: {both[0]} is adapted too; remove it from modules_to_save or target_modules"
            )
        if packed := [n for n in whole if not all(p.is_floating_point() for p in own[n].parameters(recurse=False))]:
            raise UserError(
                f"adapter.modules_to_save: {packed[0]} is kept in few bits, which no step can change; leave it out"
            )
        names = [f"{name}.{key}" for name in whole for key, _ in own[name].named_parameters(recurse=False)]
        biased = {"none": set(), "lora_only": adapted, "all": set(own)}[self.bias]
        names += [f"{n}.bias" for n, m in own.items() if n in biased and isinstance(m, Linear) and m.bias is not None]
        return {name: model.get_parameter(name) for name in names}

    def wrap_layer(self, layer: Layer, rank: int, alpha: float) -> None:
        """Hang an update beside a layer."""
        layer.lora_scale = self.scale(rank, alpha)
        if isinstance(layer, Embedding):
            layer.lora_embedding_A = empty_param(rank, layer.num_embeddings)
            layer.lora_embedding_B = empty_param(layer.embedding_dim, rank)
            layer.update = self.forward_embedding
        elif isinstance(layer, GroupedLinear):
            if self.init == "pissa":
                raise UserError(
                    "adapter.init: pissa begins with no experts; remove them from target_modules, or set "
                    "adapter.init=default"
                )
            layer.lora_A = empty_param(layer.experts, rank, layer.in_features)
            layer.lora_B = empty_param(layer.experts, layer.out_features, rank)
            layer.update = self.forward_experts
        else:
            self.wrap_linear(layer, rank)

    def wrap_linear(self, layer: Linear, rank: int) -> None:
        if self.init == "pissa" and rank > min(layer.out_features, layer.in_features):
            shape = [layer.out_features, layer.in_features]
            raise UserError(f"adapter.rank: a layer of {shape} has no {rank} directions for pissa")
        layer.lora_A = Linear(layer.in_features, rank, bias=False, device="meta")
        layer.lora_B = Linear(rank, layer.out_features, bias=False, device="meta")
        layer.update = self.forward_linear
        if self.init == "pissa":
            for name, part in (("A", layer.lora_A), ("B", layer.lora_B)):
                layer.register_buffer(f"lora_{name}0", torch.empty_like(part.weight, requires_grad=False))

    @property
    def needs_base_weights(self) -> bool:
        """Whether the first values are made of the weights beside which they stand."""
        return self.init == "pissa"

    def initial_values(
        self, layer: Layer, shapes: Mapping[str, Shape], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """First values of what was added to a layer, by name, but for what is zero. `shapes` are those of the whole."""
        if isinstance(layer, Embedding):
            return {"lora_embedding_B": torch.randn(shapes["lora_embedding_B"], generator=generator)}
        if isinstance(layer, Linear) and self.init == "pissa":
            a, b = pissa_factors(full_weight(layer, shapes) / layer.lora_scale, layer.lora_A.out_features, generator)
            return {"lora_A.weight": a, "lora_A0": a, "lora_B.weight": b, "lora_B0": b}
        name = "lora_A.weight" if isinstance(layer, Linear) else "lora_A"
        bound = shapes[name][-1] ** -0.5
        return {name: torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)}

    def init_weights(self, model: Decoder, seed: int) -> None:
        """The first values of what was added: the update is zero. Drawn whole, whatever part of it is here."""
        for unit, layers in group_by_fsdp_unit(model, self.target_layers(model)).items():
            shapes = {
                name: {key: shard_slice(t).shape for key, t in adapter_tensors(layer).items()}
                for name, layer in layers.items()
            }
            with unsharded(unit) if self.needs_base_weights else nullcontext():
                firsts = {
                    n: self.initial_values(layer, shapes[n], named_generator(seed, n)) for n, layer in layers.items()
                }
            for name, layer in layers.items():
                for key, tensor in (kept := adapter_tensors(layer)).items():
                    if (made := firsts[name].get(key)) is None:
                        nn.init.zeros_(tensor)
                    else:  # what an update began with is rounded as itself: it must be zero in bf16 too
                        copy_to_shard(tensor, made.to(kept[INITIAL_BUFFERS.get(key, key)].dtype))

    def lora_weights(self, layer: Linear) -> LoRAWeights:
        """The update of a layer, as kernels want it."""
        start = (layer.lora_A0, layer.lora_B0) if self.init == "pissa" else ()
        return LoRAWeights(layer, layer.lora_scale, layer.lora_A.weight, layer.lora_B.weight, *start)

    def forward_linear(self, layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        """What layers with updates make of the `x` that all of them read."""
        dropout = self.dropout if layers[0].training else 0.0
        return lora_linear(x, [self.lora_weights(layer) for layer in layers], dropout)

    def forward_experts(self, layers: Sequence[GroupedLinear], x: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        """Rows sorted by expert, each with the updates of its own. All A of layers that read them are one product."""
        dropout = self.dropout if layers[0].training else 0.0
        if dropout and len(layers) > 1:  # each draws a mask of its own
            return tuple(y for layer in layers for y in self.forward_experts((layer,), x, sizes))
        a = torch.cat([layer.lora_A for layer in layers], dim=1)
        low = grouped_mm(F.dropout(x, dropout), a.to(x.dtype), sizes)
        lows = low.split([layer.lora_A.shape[1] for layer in layers], dim=-1)
        return tuple(
            self.add_expert_update(layer, x, low.contiguous(), sizes) for layer, low in zip(layers, lows, strict=True)
        )

    def add_expert_update(self, layer: GroupedLinear, x: Tensor, low: Tensor, sizes: Tensor) -> Tensor:
        """What a layer makes of `x`, with its update of `low` (N, rank)."""
        up = (layer.lora_B * layer.lora_scale).to(x.dtype)  # in the dtype of the rows, as the fast product wants it
        return layer.matmul(x, sizes).add_(grouped_mm(low, up, sizes))

    def forward_embedding(self, layer: Embedding, tokens: Tensor) -> Tensor:
        low = layer.lookup(tokens, layer.lora_embedding_A.T) @ layer.lora_embedding_B.T
        rows = layer.embed(tokens)
        return rows + (low * layer.lora_scale).type_as(rows)

    def delta(self, layer: Linear) -> Tensor:
        """The update of the weight, (out, in)."""
        delta = layer.lora_B.weight @ layer.lora_A.weight
        return layer.lora_scale * (delta - layer.lora_B0 @ layer.lora_A0 if self.init == "pissa" else delta)

    @contextmanager
    def disabled(self, model: Decoder) -> Iterator[None]:
        """For a while the model is the one that training began with, but for what is trained whole."""
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
        """A and the rest, then B, which LoRA+ moves faster."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        yield [p for name, p in named if "_B" not in last_component(name.removesuffix(".weight"))], 1.0
        yield [p for name, p in named if "_B" in last_component(name.removesuffix(".weight"))], self.loraplus_lr_ratio


@dataclass(frozen=True)
class DoRAConfig(LoRAConfig):
    """Low-rank direction, and the magnitude of each output trained apart (arXiv:2402.09353)."""

    kind: ClassVar[str] = "dora"

    def wrap_layer(self, layer: Layer, rank: int, alpha: float) -> None:
        if not isinstance(layer, Linear):
            kind = "embed" if isinstance(layer, Embedding) else "experts"
            raise UserError(f"adapter.target_modules: dora does not adapt {kind}; leave that out, or use lora")
        super().wrap_layer(layer, rank, alpha)
        layer.lora_magnitude_vector = nn.Parameter(torch.empty(layer.out_features, device="meta"))

    @property
    def needs_base_weights(self) -> bool:
        return True

    def initial_values(
        self, layer: Layer, shapes: Mapping[str, Shape], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The magnitudes are those of the weight: the update is zero as yet."""
        assert isinstance(layer, Linear)
        return super().initial_values(layer, shapes, generator) | {"lora_magnitude_vector": row_norms(layer, shapes)}

    def forward_linear(self, layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(layers, super().forward_linear(layers, x), strict=True)
        return tuple(self.apply_magnitude(layer, y) for layer, y in pairs)

    def apply_magnitude(self, layer: Linear, y: Tensor) -> Tensor:
        """Outputs `y`, with the rows of the weight brought to their magnitudes."""
        norm = self.row_norms(layer)  # a constant of the gradient, as in the paper's section 4.3
        factor = (layer.lora_magnitude_vector / norm).to(y.dtype)
        if layer.effective_bias is None:
            return y * factor
        bias = layer.effective_bias.to(y.dtype)
        return torch.addcmul(bias, y - bias, factor)

    def row_norms(self, layer: Linear) -> Tensor:
        """Norms (out,) of the rows of the weight with its update."""
        return combine_column_shards(layer, lora_row_norms(self.lora_weights(layer)))


def group_by_fsdp_unit(model: Decoder, layers: Mapping[str, Layer]) -> dict[nn.Module, dict[str, Layer]]:
    """Layers by the part of the model whose weights are gathered together: a block, or all that is outside of them."""
    found: dict[nn.Module, dict[str, Layer]] = {}
    for name, layer in layers.items():
        words = name.split(".")
        unit = model.get_submodule(".".join(words[:2])) if words[0] == "layers" else model
        found.setdefault(unit, {})[name] = layer
    return found


def adapter_tensors(layer: Layer) -> dict[str, Tensor]:
    """What an adapter has hung on a layer, by name."""
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: tensor for name, tensor in named.items() if name.startswith("lora_")}


@torch.no_grad()
def row_norms(layer: Linear, shapes: Mapping[str, Shape]) -> Tensor:
    """Norms (out,) of the rows of a weight, in fp32, of which no more than some are there at a time."""
    found = torch.cat([rows.norm(dim=1) for rows in layer.iter_fp32_rows(max(1, CACHED // layer.in_features))])
    return gather_row_shards(layer, combine_column_shards(layer, found), shapes)


def combine_column_shards(layer: Linear, found: Tensor) -> Tensor:
    """Norms of rows, from those of what this rank has of them."""
    return found if layer.rowwise_mesh is None else layer.rowwise_mesh.all_reduce_sum(found.square()).sqrt()


def gather_row_shards(layer: Linear, found: Tensor, shapes: Mapping[str, Shape]) -> Tensor:
    """(..., out), from what each rank has of it."""
    team = layer.colwise_mesh
    return found if team is None else gather_columns(found, team.split_sizes(shapes["lora_B.weight"][0]), team)


@torch.no_grad()
def full_weight(layer: Linear, shapes: Mapping[str, Shape]) -> Tensor:
    """The whole weight (out, in) in fp32, whatever part of it is here."""
    found, team = gather_row_shards(layer, layer.dequantize().float().T, shapes).T, layer.rowwise_mesh
    return found if team is None else gather_columns(found, team.split_sizes(shapes["lora_A.weight"][1]), team)


def empty_param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def lora_factors(layer: Linear | GroupedLinear) -> tuple[Tensor, Tensor]:
    """A (..., rank, in) and B (..., out, rank) of an adapted layer."""
    if isinstance(layer, Linear):
        return layer.lora_A.weight, layer.lora_B.weight
    return layer.lora_A, layer.lora_B


def last_component(name: str) -> str:
    return name.rpartition(".")[2]


def as_tuple(words: str | tuple[str, ...]) -> tuple[str, ...]:
    """One word stands for a list of it."""
    return (words,) if isinstance(words, str) else words


def match_modules(key: str, word: str, names: Iterable[str]) -> list[str]:
    """The names that a word fits, or a pattern, whole or in their last part: `q_proj` is every q_proj."""
    pattern, whole = MODULE_GROUPS.get(word, word), word in MODULE_GROUPS
    hits = [n for n in names if re.fullmatch(pattern, n) or (not whole and re.fullmatch(pattern, last_component(n)))]
    if not hits:
        leaves = ", ".join(dict.fromkeys(last_component(name) for name in names))
        kind = {"target_modules": "layer", "modules_to_save": "module"}.get(key, "adapted layer")
        raise UserError(f"adapter.{key}: no {kind} is called {word!r}; this model has {leaves}")
    return hits


def values_by_module(key: str, values: Mapping[str, Number], names: Iterable[str]) -> dict[str, Number]:
    """Values by pattern become values by name; the first pattern that fits counts."""
    found: dict[str, Number] = {}
    for pattern, value in values.items():
        found = dict.fromkeys(match_modules(key, pattern, names), value) | found
    return found


def pissa_factors(weight: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A (rank, in) and B (out, rank), whose product is the best approximation of `weight` at this rank."""
    with fork_rng(weight.device):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        # With some directions more than asked, and power iterations, the randomized decomposition is exact to rounding
        # where singular values fall, as those of trained weights do; of noise it misses the best by less than 1e-4.
        u, s, v = torch.svd_lowrank(weight, q=min(rank + 16, *weight.shape), niter=8)
    root = s[:rank].sqrt()
    return (v[:, :rank] * root).T.contiguous(), (u[:, :rank] * root).contiguous()
