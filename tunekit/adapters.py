"""What is trained: everything, or low-rank updates beside frozen layers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.errors import FieldError, UserError
from tunekit.models.decoder import Decoder
from tunekit.models.init import seeded
from tunekit.models.linear import Embedding, Linear
from tunekit.parallel import put

Layer = Linear | Embedding
Trained = Iterator[tuple[list[nn.Parameter], float]]

WORDS = {
    "attn": r"layers\.\d+\.attn\..+",
    "mlp": r"layers\.\d+\.mlp\..+",
    "all": r"layers\.\d+\.(attn|mlp)\..+",
    "head": "head",
    "embed": "embed",
}


@dataclass(frozen=True)
class Full:
    """Train every weight."""

    start: ClassVar[None] = None  # the checkpoint is all there is to start from

    def apply(self, model: Decoder) -> None:
        """Nothing is added and nothing frozen."""

    def initialize(self, model: Decoder, seed: int) -> None:
        """Nothing was added."""

    def trained(self, model: Decoder) -> Trained:
        """Trained parameters, with the factor on their learning rate. Some families store numbers that nobody trains."""
        yield [p for p in model.parameters() if p.requires_grad], 1.0


@dataclass(frozen=True)
class Frozen(Full):
    """Train nothing: the model is only asked."""

    def apply(self, model: Decoder) -> None:
        model.requires_grad_(False)


@dataclass(frozen=True)
class LoRA:
    """Low-rank updates W + s B A of frozen layers (arXiv:2106.09685), under the names that PEFT gives them."""

    rank: int = 16
    alpha: float = 32.0  # s = alpha / rank
    dropout: float = 0.0  # on the input of the update
    targets: str | tuple[str, ...] = "all"  # attn, mlp, all, head, embed; or regular expressions over layer names
    rslora: bool = False  # s = alpha / sqrt(rank): the update does not fade at high ranks (arXiv:2312.03732)
    init: Literal["zero", "pissa"] = "zero"  # zero: B = 0; pissa: the strongest directions of W (arXiv:2404.02948)
    plus: float = 1.0  # LoRA+: the learning rate of B as a multiple of that of A (arXiv:2402.12354)
    start: str | None = None  # folder of a PEFT adapter to go on from

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FieldError("rank", f"must be 1 or more, not {self.rank}")
        if self.alpha <= 0:
            raise FieldError("alpha", f"must be above 0, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise FieldError("dropout", f"a share from 0 to below 1, not {self.dropout}")
        if self.plus <= 0:
            raise FieldError("plus", f"must be above 0, not {self.plus}")
        if self.start is not None and self.init != "zero":
            raise FieldError("start", f"{self.init} begins with the weights and no adapter: leave one of them out")
        if not self.patterns:
            raise FieldError("targets", "name at least one layer")
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise FieldError("targets", f"{pattern!r} is no regular expression: {error}") from error

    @property
    def patterns(self) -> tuple[str, ...]:
        words = (self.targets,) if isinstance(self.targets, str) else self.targets
        return tuple(WORDS.get(word, word) for word in words)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def layers(self, model: Decoder) -> dict[str, Layer]:
        """The layers to adapt, by name. A pattern matches a whole name or its last part: `q_proj` is every q_proj."""
        names = {n: m for n, m in model.named_modules() if isinstance(m, Linear | Embedding) and ".lora_" not in n}
        found: dict[str, Layer] = {}
        for pattern in self.patterns:
            hits = {n: m for n, m in names.items() if re.fullmatch(pattern, n) or re.fullmatch(pattern, leaf(n))}
            if not hits:
                leaves = ", ".join(dict.fromkeys(leaf(n) for n in names))
                raise UserError(f"adapter.targets: no layer is called {pattern!r}; this model has {leaves}")
            found |= hits
        return found

    def apply(self, model: Decoder) -> None:
        """Freeze the model and hang the updates beside its layers."""
        model.requires_grad_(False)
        for layer in self.layers(model).values():
            self.attach(layer)

    def attach(self, layer: Layer) -> None:
        if isinstance(layer, Embedding):
            layer.lora_embedding_A = nn.Parameter(torch.empty(self.rank, layer.num_embeddings, device="meta"))
            layer.lora_embedding_B = nn.Parameter(torch.empty(layer.embedding_dim, self.rank, device="meta"))
            layer.update = self.embed
            return
        if self.init == "pissa" and self.rank > min(layer.out_features, layer.in_features):
            shape = [layer.out_features, layer.in_features]
            raise UserError(f"adapter.rank: a layer of {shape} has no {self.rank} directions for pissa")
        layer.lora_A = Linear(layer.in_features, self.rank, bias=False, device="meta")
        layer.lora_B = Linear(self.rank, layer.out_features, bias=False, device="meta")
        layer.update = self.product
        if self.init == "pissa":
            for name, part in (("A", layer.lora_A), ("B", layer.lora_B)):
                layer.register_buffer(f"lora_{name}0", torch.empty_like(part.weight, requires_grad=False))

    def init_layer(self, layer: Layer, generator: torch.Generator) -> None:
        if isinstance(layer, Embedding):
            nn.init.zeros_(layer.lora_embedding_A)
            b = torch.randn(layer.lora_embedding_B.shape, generator=generator)
            put(layer.lora_embedding_B, b)
        elif self.init == "pissa":
            a, b = principal(layer.dense().detach().float() / self.scale, self.rank, generator)
            for trained, start, part in ((layer.lora_A, layer.lora_A0, a), (layer.lora_B, layer.lora_B0, b)):
                put(trained.weight, part)
                put(start, part.to(trained.weight.dtype))  # as rounded: the update must be zero in bf16 too
        else:
            bound = layer.in_features**-0.5
            a = torch.empty(self.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
            put(layer.lora_A.weight, a)
            nn.init.zeros_(layer.lora_B.weight)

    def initialize(self, model: Decoder, seed: int) -> None:
        """The first values of what was added: the update is zero."""
        for name, layer in self.layers(model).items():
            self.init_layer(layer, seeded(seed, name))

    def low_rank(self, layer: Linear, x: Tensor) -> Tensor:
        """s B A x, less what it was at the start if that was not zero."""
        x = F.dropout(x, self.dropout, layer.training)
        y = layer.lora_B(layer.lora_A(x))
        if self.init == "pissa":
            y = y - F.linear(F.linear(x, layer.lora_A0.to(x.dtype)), layer.lora_B0.to(x.dtype))
        return y * self.scale

    def product(self, layer: Linear, x: Tensor) -> Tensor:
        return layer.product(x) + self.low_rank(layer, x)

    def embed(self, layer: Embedding, tokens: Tensor) -> Tensor:
        low = F.embedding(tokens, layer.lora_embedding_A.T) @ layer.lora_embedding_B.T
        rows = layer.product(tokens)
        return rows + (low * self.scale).type_as(rows)

    def delta(self, layer: Linear) -> Tensor:
        """The update of the weight, (out, in)."""
        delta = layer.lora_B.weight @ layer.lora_A.weight
        return self.scale * (delta - layer.lora_B0 @ layer.lora_A0 if self.init == "pissa" else delta)

    def trained(self, model: Decoder) -> Trained:
        """A and the rest, then B, which LoRA+ moves faster."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        yield [p for name, p in named if "_B" not in leaf(name.removesuffix(".weight"))], 1.0
        yield [p for name, p in named if "_B" in leaf(name.removesuffix(".weight"))], self.plus


@dataclass(frozen=True)
class DoRA(LoRA):
    """Low-rank direction, and the magnitude of each output trained apart (arXiv:2402.09353)."""

    def attach(self, layer: Layer) -> None:
        if isinstance(layer, Embedding):
            raise UserError("adapter.targets: dora adapts no embedding; leave 'embed' out, or use lora")
        super().attach(layer)
        layer.lora_magnitude_vector = nn.Parameter(torch.empty(layer.out_features, device="meta"))

    def init_layer(self, layer: Layer, generator: torch.Generator) -> None:
        super().init_layer(layer, generator)
        assert isinstance(layer, Linear)
        put(layer.lora_magnitude_vector, layer.dense().detach().float().norm(dim=1))

    def product(self, layer: Linear, x: Tensor) -> Tensor:
        with torch.no_grad():  # the norm is a constant of the gradient, as in the paper's section 4.3
            norm = (layer.dense().float() + self.delta(layer)).norm(dim=1)
        bias = 0.0 if layer.bias is None else layer.bias.to(x.dtype)
        y = super().product(layer, x) - bias
        return y * (layer.lora_magnitude_vector / norm).to(x.dtype) + bias


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def principal(weight: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A (rank, in) and B (out, rank), whose product is the best approximation of `weight` at this rank."""
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        # With some directions more than asked, and power iterations, the randomized decomposition is exact to rounding
        # where singular values fall, as those of trained weights do; of noise it misses the best by less than 1e-4.
        u, s, v = torch.svd_lowrank(weight, q=min(rank + 16, *weight.shape), niter=8)
    root = s[:rank].sqrt()
    return (v[:, :rank] * root).T.contiguous(), (u[:, :rank] * root).contiguous()
