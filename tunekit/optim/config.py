"""Choices of an optimizer and of the schedule of its learning rate; optimizers.py has those that torch lacks."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tunekit.devices import capabilities
from tunekit.distributed.sharding import shard_slice, to_local
from tunekit.errors import FieldError
from tunekit.optim.container import AdamW8bit, Muon, OptimizerContainer

FEW = 4096  # numbers of a weight whose moments are not worth packing

Trained = Iterable[tuple[list[nn.Parameter], float]]  # parameters, and the factor on their learning rate


def param_groups(
    trained: Trained, lr: float, decay: float, of: Callable[[nn.Parameter], bool] = lambda p: True
) -> list[dict[str, Any]]:
    """Parameter groups of the weights that are `of` it. Vectors are never decayed: zero means nothing to them."""
    found = []
    for parameters, factor in trained:
        for vectors in (False, True):
            chosen = [p for p in parameters if (p.ndim < 2) == vectors and of(p)]
            if chosen:
                found.append({"params": chosen, "lr": lr * factor, "weight_decay": 0.0 if vectors else decay})
    return found


def split_optimizer(
    trained: Trained,
    choice: "AdamWConfig | MuonConfig",
    special: Callable[[nn.Parameter], bool],
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """What `make` makes for special weights, and AdamW for the others, as one."""
    trained = list(trained)
    ours = param_groups(trained, choice.lr, choice.weight_decay, special)
    rest = param_groups(trained, choice.lr, choice.weight_decay, lambda p: not special(p))
    betas = (choice.betas[0], choice.betas[1])
    plain = partial(torch.optim.AdamW, betas=betas, eps=choice.eps, fused=can_fuse(rest) or None)
    return OptimizerContainer(*(build(found) for build, found in ((make, ours), (plain, rest)) if found))


def can_fuse(chosen: list[dict[str, Any]]) -> bool:
    """Whether torch has a fused AdamW for the devices of all weights in these groups."""
    return all(capabilities(p.device).fused_adamw for group in chosen for p in group["params"])


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise FieldError(name, f"must be above 0, not {value}")


def check_betas(name: str, values: tuple[float, ...]) -> None:
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise FieldError(name, f"two numbers from 0 to below 1, not {list(values)}")


@dataclass(frozen=True)
class AdamWConfig:
    """Adam with decoupled weight decay (arXiv:1711.05101), in one fused step."""

    kind: ClassVar[str] = "adamw"
    lr: float = 2e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # Decoupled weight decay; not applied to norms and biases

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_betas("betas", self.betas)

    def build(self, trained: Trained, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        """`inner`: the weights of the blocks, between the embedding and the head, for those who treat them apart."""
        betas = (self.betas[0], self.betas[1])
        chosen = param_groups(trained, self.lr, self.weight_decay)
        return torch.optim.AdamW(chosen, betas=betas, eps=self.eps, fused=can_fuse(chosen) or None)


@dataclass(frozen=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with two bytes of state a weight in place of eight (arXiv:2110.02861); small weights keep the eight."""

    kind: ClassVar[str] = "adamw8bit"

    def build(self, trained: Trained, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        shared = {"betas": (self.betas[0], self.betas[1]), "eps": self.eps}
        return split_optimizer(trained, self, is_worth_quantizing, lambda gs: AdamW8bit(gs, shared))


def is_worth_quantizing(weight: nn.Parameter) -> bool:
    """Whether it has rows and is large: the whole of it, wherever its parts are."""
    return weight.ndim > 1 and math.prod(shard_slice(weight).shape) >= FEW and to_local(weight).is_contiguous()


@dataclass(frozen=True)
class MuonConfig:
    """Steps of matrices go equally far in all directions (arXiv:2502.16982), at half the state of AdamW.

    Embeddings, the head and vectors are left to AdamW. Learning rates are those of AdamW.
    """

    kind: ClassVar[str] = "muon"
    lr: float = 2e-4
    momentum: float = 0.95
    weight_decay: float = 0.0  # Decoupled weight decay; not applied to norms and biases
    betas: tuple[float, ...] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8  # of AdamW

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_betas("betas", self.betas)
        if not 0 <= self.momentum < 1:
            raise FieldError("momentum", f"from 0 to below 1, not {self.momentum}")

    def build(self, trained: Trained, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        """Only matrices among the `inner` weights; a stack of them, as of experts, is many. Filters are no matrices."""
        matrices = {p for p in inner if p.ndim > 1 and min(shard_slice(p).shape[-2:]) > 1}
        return split_optimizer(trained, self, matrices.__contains__, lambda gs: Muon(gs, {"momentum": self.momentum}))


@dataclass(frozen=True)
class SGDConfig:
    """Stochastic gradient descent; without momentum it keeps no state."""

    kind: ClassVar[str] = "sgd"
    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0  # Decoupled weight decay; not applied to norms and biases

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)

    def build(self, trained: Trained, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        return torch.optim.SGD(param_groups(trained, self.lr, self.weight_decay), momentum=self.momentum)


@dataclass(frozen=True)
class LRSchedulerConfig:
    """A rise over `warmup`, then what `shape` says."""

    warmup_steps: float = 0.0  # Warmup steps; a value below 1 is a fraction of all steps

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise FieldError("warmup_steps", f"must not be below 0, not {self.warmup_steps}")

    def build(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        return LambdaLR(optimizer, self.factors(steps))

    def factors(self, steps: int) -> Callable[[int], float]:
        """Step (from 0) to the factor on the learning rate."""
        warmup = resolve_steps(self.warmup_steps, steps)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return self.shape((step - warmup) / max(1, steps - warmup))

        return factor

    def shape(self, done: float) -> float:
        """The factor when a share `done` of the steps behind the warm-up is over."""
        raise NotImplementedError


def resolve_steps(steps: float, total: int) -> int:
    """A number of steps that may be given as a share of all."""
    return round(steps * total) if steps < 1 else round(steps)


@dataclass(frozen=True)
class ConstantLRConfig(LRSchedulerConfig):
    """The full learning rate to the end."""

    kind: ClassVar[str] = "constant"

    def shape(self, done: float) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearLRConfig(LRSchedulerConfig):
    """Down to `floor` in a straight line."""

    kind: ClassVar[str] = "linear"
    min_lr_ratio: float = 0.0  # Final learning rate as a fraction of the peak

    def shape(self, done: float) -> float:
        return 1 - (1 - self.min_lr_ratio) * min(done, 1.0)


@dataclass(frozen=True)
class CosineLRConfig(LRSchedulerConfig):
    """Down to `floor` along half a cosine."""

    kind: ClassVar[str] = "cosine"
    min_lr_ratio: float = 0.0  # Final learning rate as a fraction of the peak

    def shape(self, done: float) -> float:
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True)
class WSDConfig(LRSchedulerConfig):
    """Warm-up, stable, decay: full until the last `decay`, then down to `floor` in a straight line."""

    kind: ClassVar[str] = "wsd"
    decay_ratio: float = 0.2  # Fraction of the steps after warmup that decay
    min_lr_ratio: float = 0.0  # Final learning rate as a fraction of the peak

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay_ratio <= 1:
            raise FieldError("decay_ratio", f"a share above 0 and up to 1, not {self.decay_ratio}")

    def shape(self, done: float) -> float:
        left = min(1.0, (1 - min(done, 1.0)) / self.decay_ratio)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left
