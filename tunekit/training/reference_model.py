"""The reference model of preference and policy losses: the model before training."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tunekit import build
from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.config.choices import kind_name
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import is_streaming
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.losses.policy_gradient import PolicyGradientLoss
from tunekit.losses.preference_base import PreferenceLoss
from tunekit.losses.preference_objective import PreferenceObjective, ReferenceLogps, RefLogpsFn
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig
from tunekit.training.intervals import StepPlan
from tunekit.training.run_context import RunContext

FILE = "reference.npz"


class ReferenceInputs(NamedTuple):
    """The parts of a run that a reference is made of."""

    run: RunContext
    checkpoint: HFCheckpoint
    model: Decoder
    train_data: DataLoader
    eval_data: DataLoader | None
    objective: PreferenceObjective


class ReferenceModel(NamedTuple):
    """A model that has the reference weights inside of `use`."""

    model: Decoder
    use: Callable[[], AbstractContextManager[None]] = nullcontext


LossChoice = Sequence[PreferenceLoss] | PolicyGradientLoss  # `loss` of a config


def needs_reference(loss: LossChoice) -> bool:
    """Whether a loss compares log-probabilities with those of a reference."""
    return any(term.needs_reference for term in (loss if isinstance(loss, Sequence) else (loss,)))


@dataclass(frozen=True)
class BaseReference(ABC):
    """Source of the reference log-probabilities. By default each step has a forward pass, of no second model."""

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: LossChoice) -> bool:
        """Whether a second model is in memory."""
        return False

    def needs_forward_pass(self, loss: LossChoice) -> bool:
        """Whether each step has a forward pass of the reference."""
        return needs_reference(loss)

    def check_adapter(self, adapter: NoAdapter | LoRAConfig, fix: str) -> None:  # noqa: B027
        """Raise FieldError, which ends with `fix`, if this reference does not work with the adapter."""

    def check(self, cfg: TrainConfig, terms: PreferenceObjective) -> None:
        """Raise FieldError if no preference loss needs a reference, or if this one does not work with the config."""
        if not needs_reference(terms.terms):
            losses = " and ".join(kind_name(type(term)) for term in terms.terms)
            raise FieldError("reference", f"{kind_name(type(self))}: {losses} needs no reference. Remove the key.")
        self.check_adapter(cfg.adapter, "Set reference=copy or reference=precomputed.")

    @abstractmethod
    def open(self, inputs: ReferenceInputs) -> ReferenceLogps:
        """The functions that compute the reference log-probabilities of a preference batch."""


@dataclass(frozen=True)
class ModelReference(BaseReference):
    """Reference with a model, whose log-probabilities are computed in each step."""

    @abstractmethod
    def open_model(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferenceModel:
        """The reference of a model, before its training starts."""

    def open(self, inputs: ReferenceInputs) -> ReferenceLogps:
        if not needs_reference(inputs.objective.terms):
            return ReferenceLogps()
        reference = self.open_model(inputs.run.cfg, inputs.checkpoint, inputs.model, inputs.run.dist)
        compute_logps = inputs.objective.logps_fn(reference.model)

        def compute_reference_logps(batch: Batch) -> Tensor:
            with reference.use():
                return compute_logps(batch)

        return ReferenceLogps(compute_reference_logps, compute_reference_logps)


@dataclass(frozen=True)
class DisableAdapterReference(ModelReference):
    """The same model with its adapter disabled: no memory, and one more forward pass."""

    kind: ClassVar[str] = "disable_adapter"

    def check_adapter(self, adapter: NoAdapter | LoRAConfig, fix: str) -> None:
        if (reason := disable_adapter_problem(adapter)) is not None:
            raise FieldError("reference", f"{reason}. {fix}")

    def open_model(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferenceModel:
        assert isinstance(cfg.adapter, LoRAConfig)
        return ReferenceModel(model, partial(cfg.adapter.disabled, model))


@dataclass(frozen=True)
class CopiedReference(ModelReference):
    """A second, frozen model, quantized and sharded like the first one; the only choice if all weights are trained."""

    kind: ClassVar[str] = "copy"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: LossChoice) -> bool:
        return needs_reference(loss)

    def open_model(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferenceModel:
        adapter = FrozenModel() if isinstance(cfg.adapter, NoAdapter) else cfg.adapter
        options = cfg.quantization, adapter, cfg.precision, MemoryConfig()
        copy = build.build_model(checkpoint, *options, dist, cfg.init == "random")
        return ReferenceModel(copy.requires_grad_(False).eval())


@dataclass(frozen=True)
class PrecomputedReference(BaseReference):
    """Log-probabilities that are computed once, before the first step, and stored in the run directory."""

    kind: ClassVar[str] = "precomputed"

    def needs_forward_pass(self, loss: LossChoice) -> bool:
        return False

    def check(self, cfg: TrainConfig, terms: PreferenceObjective) -> None:
        super().check(cfg, terms)
        if is_streaming(cfg.data):
            raise FieldError("reference", "precomputed: not available for streamed rows. Use disable_adapter or copy.")
        if any(term.needs_mismatched for term in terms.terms):
            raise FieldError(
                "reference",
                "precomputed: kto needs other mismatched answers in each step. Use disable_adapter or copy.",
            )

    def open(self, inputs: ReferenceInputs) -> ReferenceLogps:
        run, train_data, eval_data = inputs.run, inputs.train_data, inputs.eval_data
        # No training state is restored yet: the model is the one that training starts from.
        tables = [load_logps(inputs, train_data, run.dir, num_precompute_epochs(run.cfg, train_data))]
        tables += [load_logps(inputs, eval_data, run.dir / "eval", 1)] if eval_data else []
        return ReferenceLogps(*(partial(look_up_logps, table) for table in tables))


def num_precompute_epochs(cfg: TrainConfig, data: DataLoader) -> int:
    """Number of epochs that the run may read, including the data that rollbacks skip."""
    plan = StepPlan(cfg.max_steps or data.num_steps(cfg.epochs), data)
    max_rollbacks = cfg.step_guard.max_interventions if cfg.step_guard.may_roll_back else 0
    max_skipped = max_rollbacks * plan.max_gap(cfg.save_every)
    return next(n for n in count(1) if data.num_steps(n) >= plan.num_steps + max_skipped)


@dataclass(frozen=True)
class AutoReference(ModelReference):
    """`disable_adapter` where the model without its adapter is the one before training, else `copy`."""

    kind: ClassVar[str] = "auto"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: LossChoice) -> bool:
        return needs_reference(loss) and disable_adapter_problem(adapter) is not None

    def check(self, cfg: TrainConfig, terms: PreferenceObjective) -> None:
        """No requirements."""

    def open_model(
        self, cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext
    ) -> ReferenceModel:
        can_disable = disable_adapter_problem(cfg.adapter) is None
        reference = DisableAdapterReference() if can_disable else CopiedReference()
        return reference.open_model(cfg, checkpoint, model, dist)


PolicyReference = AutoReference | DisableAdapterReference | CopiedReference
Reference = PolicyReference | PrecomputedReference


def disable_adapter_problem(adapter: NoAdapter | LoRAConfig) -> str | None:
    """Why the model without its adapter is not the model before training; None if it is."""
    if not isinstance(adapter, LoRAConfig):
        return "disable_adapter: needs an adapter, and all weights are trained"
    if adapter.adapter_path is not None:
        return "disable_adapter: training starts from an adapter (adapter.adapter_path)"
    if adapter.modules_to_save or adapter.bias != "none":
        return "disable_adapter: adapter.modules_to_save and adapter.bias train weights outside the adapter"
    return None


def look_up_logps(logps: Tensor, batch: Batch) -> Tensor:
    """The log-probabilities (D,) of the documents of a batch, from those of all documents."""
    return logps[batch.documents.indices]


def load_logps(inputs: ReferenceInputs, data: DataLoader, directory: Path, epochs: int) -> Tensor:
    """Reference log-probabilities of all documents, (documents,) fp32 on the device; NaN for those that are not read.

    Reads them from `directory`, or computes and writes them. With --overwrite they are always computed.
    """
    file, run, dist = directory / FILE, inputs.run, inputs.run.dist
    key = reference_fingerprint(run.cfg, inputs.checkpoint, inputs.objective, data)
    # The epochs of a mixture may each contain some of the documents only: an incomplete table is valid for that many
    # epochs of the same mixture.
    members = [(member.weight, member.repeat, member.max_samples_per_epoch) for member in data.mixture.datasets]
    incomplete_key = f"{key} {members} {data.mixture.temperature} {data.mixture.shuffle}"
    logps = None
    if not run.overwrite:
        logps = dist.run_on_main(partial(read_cached_logps, file, key, incomplete_key, epochs))
    if logps is None:
        logps = compute_reference_logps(inputs.objective.logps_fn(inputs.model), data, epochs, dist)
        new_key = incomplete_key if np.isnan(logps).any() else key
        dist.run_on_main(partial(write_cached_logps, file, new_key, epochs, logps))
    return torch.from_numpy(logps).to(dist.device)


def reference_fingerprint(
    cfg: TrainConfig, checkpoint: HFCheckpoint, objective: PreferenceObjective, data: DataLoader
) -> str:
    """Hash of everything that the reference log-probabilities depend on."""
    adapter_path = cfg.adapter.adapter_path
    directories = [checkpoint.path, *([Path(adapter_path)] if adapter_path is not None else [])]
    paths = [path for directory in directories for path in sorted(directory.iterdir())]
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    choices = [asdict(choice) for choice in (cfg.adapter, cfg.quantization, cfg.precision)]
    content = [data.fingerprint, str(checkpoint.path), files, choices, objective.ld_alpha, cfg.init, cfg.seed]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def compute_reference_logps(
    compute_logps: RefLogpsFn, data: DataLoader, epochs: int, dist: DistributedContext
) -> np.ndarray:
    """Log-probabilities of all documents of the given epochs, (documents,) fp32; NaN for those that do not occur."""
    logps = np.full(sum(len(documents) for documents in data.datasets), np.nan, np.float32)
    for epoch in range(epochs):
        steps = range(data.num_steps(epoch), data.num_steps(epoch + 1))
        for step in tqdm(steps, "reference log-probabilities", disable=not dist.is_main_process or None, leave=False):
            dist.heartbeat.record(0, "prepare")
            for batch in data[step]:
                logps[batch.documents.indices.numpy()] = compute_logps(batch.to(dist.device)).float().cpu().numpy()
        for rank_logps in dist.all_gather_objects(logps):
            logps = np.where(np.isnan(logps), rank_logps, logps)
        if not np.isnan(logps).any():
            break
    return logps


def read_cached_logps(file: Path, key: str, incomplete_key: str, epochs: int) -> np.ndarray | None:
    """The table in a file, if it has all documents, or those of at least `epochs` epochs."""
    try:
        with np.load(file) as cache:
            is_valid = cache["key"] == key or (cache["key"] == incomplete_key and cache["epochs"] >= epochs)
            return cache["logps"] if is_valid else None
    except (OSError, ValueError, KeyError):
        return None


def write_cached_logps(file: Path, key: str, epochs: int, logps: np.ndarray) -> None:
    """Write the file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f".{file.name}")
    try:
        with partial_file.open("wb") as stream:
            np.savez(stream, key=np.array(key), epochs=np.array(epochs), logps=logps)
        partial_file.replace(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
