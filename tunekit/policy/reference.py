"""The reference model of policy gradients: the model before training."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from torch import Tensor

from tunekit import build
from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.losses.policy_gradient import PolicyGradientLoss
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.policy.objective import PolicyObjective
from tunekit.policy.samples import PolicySamples
from tunekit.training.config import TrainConfig
from tunekit.training.reference_model import disable_adapter_problem


class ReferencePolicy(NamedTuple):
    """A model that has the reference weights inside of `use`."""

    model: Decoder
    use: Callable[[], AbstractContextManager[None]] = nullcontext

    def token_logps(self, objective: PolicyObjective, samples: PolicySamples, dist: DistributedContext) -> Tensor:
        """Log-probabilities (N, T) of samples under the reference."""
        with self.use():
            return objective.score(self.model, samples, dist)[0]


@dataclass(frozen=True)
class BasePolicyReference(ABC):
    """Source of the reference log-probabilities, for losses with a KL divergence."""

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: PolicyGradientLoss) -> bool:
        """Whether a second model is in memory."""
        return False

    def needs_forward_pass(self, loss: PolicyGradientLoss) -> bool:
        """Whether there is a forward pass of the reference."""
        return loss.needs_reference

    def check(self, adapter: NoAdapter | LoRAConfig, loss: PolicyGradientLoss) -> None:
        """Raise FieldError if the loss needs no reference, or if this one does not work with the adapter."""
        if not loss.needs_reference:
            key = f"loss.{loss.kl_key}"
            raise FieldError("reference", f"{key}=0 needs no reference. Remove the key, or set {key}.")

    @abstractmethod
    def open(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferencePolicy:
        """The reference of a model, before its training starts."""


@dataclass(frozen=True)
class DisableAdapterPolicy(BasePolicyReference):
    """The same model with its adapter disabled: no memory."""

    kind: ClassVar[str] = "disable_adapter"

    def check(self, adapter: NoAdapter | LoRAConfig, loss: PolicyGradientLoss) -> None:
        super().check(adapter, loss)
        if (reason := disable_adapter_problem(adapter)) is not None:
            raise FieldError("reference", f"{reason}. Set reference=copy.")

    def open(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferencePolicy:
        assert isinstance(cfg.adapter, LoRAConfig)
        return ReferencePolicy(model, partial(cfg.adapter.disabled, model))


@dataclass(frozen=True)
class CopiedPolicy(BasePolicyReference):
    """A second, frozen model, quantized and sharded like the first one; the only choice if all weights are trained."""

    kind: ClassVar[str] = "copy"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: PolicyGradientLoss) -> bool:
        return loss.needs_reference

    def open(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferencePolicy:
        adapter = FrozenModel() if isinstance(cfg.adapter, NoAdapter) else cfg.adapter
        options = cfg.quantization, adapter, cfg.precision, MemoryConfig()
        copy = build.build_model(checkpoint, *options, dist, cfg.init == "random")
        return ReferencePolicy(copy.requires_grad_(False).eval())


@dataclass(frozen=True)
class AutoPolicyReference(BasePolicyReference):
    """`disable_adapter` where the model without its adapter is the one before training, else `copy`."""

    kind: ClassVar[str] = "auto"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: PolicyGradientLoss) -> bool:
        return loss.needs_reference and disable_adapter_problem(adapter) is not None

    def check(self, adapter: NoAdapter | LoRAConfig, loss: PolicyGradientLoss) -> None:
        """No requirements."""

    def open(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferencePolicy:
        can_disable = disable_adapter_problem(cfg.adapter) is None
        return (DisableAdapterPolicy() if can_disable else CopiedPolicy()).open(cfg, checkpoint, model, dist)


PolicyReference = AutoPolicyReference | DisableAdapterPolicy | CopiedPolicy


def open_reference(
    reference: PolicyReference,
    loss: PolicyGradientLoss,
    cfg: TrainConfig,
    checkpoint: HFCheckpoint,
    model: Decoder,
    dist: DistributedContext,
) -> ReferencePolicy | None:
    """The reference of a model, before its training starts; None if the loss needs none."""
    return reference.open(cfg, checkpoint, model, dist) if loss.needs_reference else None
