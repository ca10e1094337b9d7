"""Configs of optimizers and learning rate schedules. container.py implements the optimizers that torch lacks."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tunekit.adapters.module_patterns import check_patterns, values_by_module
from tunekit.devices import device_capabilities
from tunekit.distributed.sharding import shard_slice, to_local
from tunekit.errors import FieldError, check_range
from tunekit.optim.container import BLOCK, AdamW8bit, Muon, OptimizerContainer

MIN_QUANTIZED_SIZE = 4096  # elements; the moments of smaller weights stay in fp32

TrainedGroups = Iterable[tuple[list[nn.Parameter], float]]  # parameters, and their learning rate factor


def param_groups(
    trained: TrainedGroups, lr: float, decay: float, is_selected: Callable[[nn.Parameter], bool] = lambda p: True
) -> list[dict[str, Any]]:
    """Parameter groups of the selected weights. Weight decay is not applied to vectors (norms and biases)."""
    groups = []
    for parameters, factor in trained:
        for vectors in (False, True):
            selected = [p for p in parameters if (p.ndim < 2) == vectors and is_selected(p)]
            if selected:
                groups.append({"params": selected, "lr": lr * factor, "weight_decay": 0.0 if vectors else decay})
    return groups


def split_optimizer(
    trained: TrainedGroups,
    cfg: "AdamWConfig | MuonConfig",
    is_special: Callable[[nn.Parameter], bool],
    make_special: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Optimizer that updates special weights with `make_special(groups)` and the others with AdamW."""
    trained = list(trained)
    special_groups = param_groups(trained, cfg.lr, cfg.weight_decay, is_special)
    adamw_groups = param_groups(trained, cfg.lr, cfg.weight_decay, lambda p: not is_special(p))
    make_adamw = partial(torch.optim.AdamW, betas=cfg.betas, eps=cfg.eps, fused=can_fuse(adamw_groups) or None)
    pairs = (make_special, special_groups), (make_adamw, adamw_groups)
    return OptimizerContainer(*(make(groups) for make, groups in pairs if groups))


def can_fuse(groups: list[dict[str, Any]]) -> bool:
    """Whether torch has a fused AdamW for the devices of all weights in these groups."""
    return all(device_capabilities(p.device).fused_adamw for group in groups for p in group["params"])


def check_betas(name: str, values: tuple[float, float]) -> None:
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise FieldError(name, f"must be two numbers >= 0 and < 1, got {list(values)}")


@dataclass(frozen=True)
class OptimizerConfig:
    """Learning rates of all weights, and of those of some modules."""

    keeps_shared_keys: ClassVar[bool] = True  # another optimizer keeps the learning rate
    lr: float = 2e-4
    # Learning rates of modules, by module pattern; the first match wins. With LoRA, of the adapters of these modules
    lr_pattern: dict[str, float] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        check_range(self, "lr", gt=0)
        check_patterns("lr_pattern", self.lr_pattern)
        for pattern, lr in self.lr_pattern.items():
            if not 0 < lr < math.inf:
                raise FieldError(
                    "lr_pattern", f"{pattern}: must be > 0 and finite, got {lr}. To freeze: adapter.frozen_modules"
                )

    def state_bytes(self, weight: nn.Parameter, is_inner: bool) -> int:
        """Bytes of the optimizer state of a weight. `is_inner`: it belongs to a decoder layer."""
        return 2 * weight.nbytes

    def apply_lr_pattern(self, trained: TrainedGroups, model: nn.Module) -> Iterator[tuple[list[nn.Parameter], float]]:
        """Split groups by the learning rates of their modules. Weights without one are first."""
        modules: dict[nn.Parameter, list[str]] = {}  # of each trained weight; a tied weight has two
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                owner = name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]
                modules.setdefault(parameter, []).append(owner)
        names = dict.fromkeys(name for owners in modules.values() for name in owners)
        rates = values_by_module("optimizer.lr_pattern", self.lr_pattern, names)
        for parameters, factor in trained:
            groups: dict[float, list[nn.Parameter]] = {self.lr: []}
            for parameter in parameters:
                rate = next((rates[name] for name in modules[parameter] if name in rates), self.lr)
                groups.setdefault(rate, []).append(parameter)
            yield from ((group, factor * rate / self.lr) for rate, group in groups.items())


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay (arXiv:1711.05101). Fused if torch supports it on the device."""

    kind: ClassVar[str] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # Decoupled weight decay; not applied to norms and biases

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas("betas", self.betas)
        check_range(self, "eps", gt=0)
        check_range(self, "weight_decay", ge=0)

    def build(self, trained: TrainedGroups, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        """Build the optimizer. `inner` are the weights of the decoder layers, which Muon treats differently."""
        groups = param_groups(trained, self.lr, self.weight_decay)
        return torch.optim.AdamW(groups, betas=self.betas, eps=self.eps, fused=can_fuse(groups) or None)


@dataclass(frozen=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with 2 instead of 8 bytes of state per weight (arXiv:2110.02861); small weights keep fp32 state."""

    kind: ClassVar[str] = "adamw8bit"

    def build(self, trained: TrainedGroups, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        defaults = {"betas": self.betas, "eps": self.eps}
        return split_optimizer(trained, self, is_worth_quantizing, lambda groups: AdamW8bit(groups, defaults))

    def state_bytes(self, weight: nn.Parameter, is_inner: bool) -> int:
        if not is_worth_quantizing(weight):
            return super().state_bytes(weight, is_inner)
        return 2 * weight.numel() + 8 * math.prod(weight.shape[:-1]) * math.ceil(weight.shape[-1] / BLOCK)


def is_worth_quantizing(weight: nn.Parameter) -> bool:
    """Whether the full, unsharded weight is a large matrix."""
    return (
        weight.ndim > 1
        and math.prod(shard_slice(weight).shape) >= MIN_QUANTIZED_SIZE
        and to_local(weight).is_contiguous()
    )


@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon (arXiv:2502.16982): orthogonalized momentum for matrices, with half the state of AdamW.

    Embeddings, lm_head and vectors use AdamW. Updates are scaled so that learning rates of AdamW apply.
    """

    kind: ClassVar[str] = "muon"
    momentum: float = 0.95  # Momentum of the gradients of matrices
    weight_decay: float = 0.0  # Decoupled weight decay; not applied to norms and biases
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW betas for the other weights
    eps: float = 1e-8  # AdamW epsilon for the other weights

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas("betas", self.betas)
        check_range(self, "eps", gt=0)
        check_range(self, "weight_decay", ge=0)
        check_range(self, "momentum", ge=0, lt=1)

    def build(self, trained: TrainedGroups, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        """Use Muon for the matrices among the `inner` weights, including stacked experts, but not for conv filters."""
        matrices = {parameter for parameter in inner if is_matrix(parameter)}
        defaults = {"momentum": self.momentum}
        return split_optimizer(trained, self, matrices.__contains__, lambda groups: Muon(groups, defaults))

    def state_bytes(self, weight: nn.Parameter, is_inner: bool) -> int:
        return weight.nbytes if is_inner and is_matrix(weight) else super().state_bytes(weight, is_inner)


def is_matrix(weight: nn.Parameter) -> bool:
    """Whether a weight is a matrix or a stack of matrices with more than one row and column."""
    return weight.ndim > 1 and min(shard_slice(weight).shape[-2:]) > 1


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent; has no optimizer state unless momentum is used."""

    kind: ClassVar[str] = "sgd"
    lr: float = 1e-2
    momentum: float = 0.0  # Momentum of the gradients
    weight_decay: float = 0.0  # Decoupled weight decay; not applied to norms and biases

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "momentum", "weight_decay", ge=0)

    def build(self, trained: TrainedGroups, inner: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
        return torch.optim.SGD(param_groups(trained, self.lr, self.weight_decay), momentum=self.momentum)

    def state_bytes(self, weight: nn.Parameter, is_inner: bool) -> int:
        return weight.nbytes if self.momentum else 0


@dataclass(frozen=True)
class LRSchedulerConfig:
    """Base class of schedules: linear warmup, then `decay_factor`."""

    keeps_shared_keys: ClassVar[bool] = True  # another schedule keeps the warmup
    warmup_steps: float = 0.0  # Warmup steps; a value below 1 is a fraction of all steps, rounded up

    def __post_init__(self) -> None:
        check_range(self, "warmup_steps", ge=0)

    def build(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        return LambdaLR(optimizer, self.factors(steps))

    def factors(self, steps: int) -> Callable[[int], float]:
        """Function from the step, starting at 0, to the factor on the learning rate."""
        warmup = resolve_steps(self.warmup_steps, steps)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return self.decay_factor((step - warmup) / max(1, steps - warmup))

        return factor

    def decay_factor(self, done: float) -> float:
        """Factor on the learning rate after a fraction `done` of the steps after warmup."""
        raise NotImplementedError


def resolve_steps(steps: float, total: int) -> int:
    """Number of steps; a value below 1 is a fraction of all steps, rounded up as in transformers."""
    return math.ceil(steps * total) if steps < 1 else int(steps)


@dataclass(frozen=True)
class ConstantLRConfig(LRSchedulerConfig):
    """Constant learning rate after warmup."""

    kind: ClassVar[str] = "constant"

    def decay_factor(self, done: float) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearLRConfig(LRSchedulerConfig):
    """Linear decay to `min_lr_ratio` of the peak."""

    kind: ClassVar[str] = "linear"
    min_lr_ratio: float = 0.0  # Final learning rate as a fraction of the peak

    def decay_factor(self, done: float) -> float:
        return 1 - (1 - self.min_lr_ratio) * min(done, 1.0)


@dataclass(frozen=True)
class CosineLRConfig(LRSchedulerConfig):
    """Cosine decay to `min_lr_ratio` of the peak."""

    kind: ClassVar[str] = "cosine"
    min_lr_ratio: float = 0.0  # Final learning rate as a fraction of the peak

    def decay_factor(self, done: float) -> float:
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True)
class WSDConfig(LRSchedulerConfig):
    """Warmup-stable-decay: constant, then linear decay to `min_lr_ratio` over the last `decay_ratio` of the steps."""

    kind: ClassVar[str] = "wsd"
    decay_ratio: float = 0.2  # Fraction of the steps after warmup that decay
    min_lr_ratio: float = 0.0  # Final learning rate as a fraction of the peak

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay_ratio <= 1:
            raise FieldError("decay_ratio", f"must be > 0 and <= 1, got {self.decay_ratio}")

    def decay_factor(self, done: float) -> float:
        remaining = min(1.0, (1 - min(done, 1.0)) / self.decay_ratio)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining
