"""The model that preference is measured against: the one that training began with."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tunekit import build
from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.config.choices import kind_name
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import is_streaming
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.losses.preference_base import PreferenceLoss
from tunekit.losses.preference_objective import RefLogpsFn, PreferenceObjective, ReferenceLogps
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.training.config import Job, Stateful, TrainConfig

FILE = "reference.npz"


@dataclass(frozen=True)
class DisableAdapterReference:
    """The same model with its updates off: no memory, and one more pass forward."""

    kind: ClassVar[str] = "disable_adapter"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: Sequence[PreferenceLoss]) -> bool:
        """Whether a second model is in memory."""
        return False

    def asks(self, loss: Sequence[PreferenceLoss]) -> bool:
        """Whether each step has a pass for it."""
        return True

    def check(self, cfg: TrainConfig, terms: PreferenceObjective) -> None:
        check_reference_is_used("disable_adapter", terms)
        if (reason := disable_adapter_problem(cfg.adapter)) is not None:
            raise FieldError("reference", f"{reason}: `copy` or `precomputed` keeps what training began with")

    def open(self, job: Job, terms: PreferenceObjective) -> ReferenceLogps:
        judge = terms.logps_fn(job.model)

        def asked(batch: Batch) -> Tensor:
            with job.cfg.adapter.disabled(job.model):
                return judge(batch)

        return ReferenceLogps(asked, asked)


@dataclass(frozen=True)
class CopiedReference:
    """A second model, frozen, stored and shared as the first one: what there is where all weights are trained."""

    kind: ClassVar[str] = "copy"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: Sequence[PreferenceLoss]) -> bool:
        return True

    def asks(self, loss: Sequence[PreferenceLoss]) -> bool:
        return True

    def check(self, cfg: TrainConfig, terms: PreferenceObjective) -> None:
        check_reference_is_used("copy", terms)

    def open(self, job: Job, terms: PreferenceObjective) -> ReferenceLogps:
        cfg = job.cfg
        adapter = FrozenModel() if isinstance(cfg.adapter, NoAdapter) else cfg.adapter
        copy = build.build_model(
            job.source, cfg.quantization, adapter, cfg.precision, MemoryConfig(), job.run, cfg.init == "random"
        )
        judge = terms.logps_fn(copy.requires_grad_(False).eval())
        return ReferenceLogps(judge, judge)


@dataclass(frozen=True)
class PrecomputedReference:
    """Log-probabilities that are computed once, before the first step, and kept in the run's folder."""

    kind: ClassVar[str] = "precomputed"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: Sequence[PreferenceLoss]) -> bool:
        return False

    def asks(self, loss: Sequence[PreferenceLoss]) -> bool:
        return False

    def check(self, cfg: TrainConfig, terms: PreferenceObjective) -> None:
        check_reference_is_used("precomputed", terms)
        if is_streaming(cfg.data):
            raise FieldError(
                "reference", "precomputed: nobody knows all rows of a stream before: use disable_adapter or copy"
            )
        if any(term.needs_mismatched for term in terms.terms):
            raise FieldError(
                "reference", "precomputed: kto asks for other answers in each step: use disable_adapter or copy"
            )

    def open(self, job: Job, terms: PreferenceObjective) -> ReferenceLogps:
        """The model is still the one that training begins with, whatever state comes next."""
        whole = [(job.data, job.space.folder, num_precompute_epochs(job))]
        whole += [(job.held, job.space.folder / "eval", 1)] if job.held else []
        return ReferenceLogps(*(ReferenceLogpTable.of(job, terms, *one).judge for one in whole))


def num_precompute_epochs(job: Job) -> int:
    """Epochs of which the run may see rows: those that it begins, and those that ways back lead on to."""
    cfg, data = job.cfg, job.data
    steps = cfg.max_steps or data.num_steps(cfg.epochs)
    passed = cfg.step_guard.max_interventions * min(cfg.save_every, steps) if cfg.step_guard.returns else 0
    return next(n for n in count(1) if data.num_steps(n) >= steps + passed)


@dataclass(frozen=True)
class AutoReference:
    """What training began with as it costs least: updates off where the model is that without them; else a copy."""

    kind: ClassVar[str] = "auto"

    def copies(self, adapter: NoAdapter | LoRAConfig, loss: Sequence[PreferenceLoss]) -> bool:
        return self.asks(loss) and disable_adapter_problem(adapter) is not None

    def asks(self, loss: Sequence[PreferenceLoss]) -> bool:
        return any(term.needs_reference for term in loss)

    def check(self, cfg: TrainConfig, terms: PreferenceObjective) -> None:
        """One of both always can."""

    def open(self, job: Job, terms: PreferenceObjective) -> ReferenceLogps:
        if not any(term.needs_reference for term in terms.terms):
            return ReferenceLogps()
        return (
            DisableAdapterReference() if disable_adapter_problem(job.cfg.adapter) is None else CopiedReference()
        ).open(job, terms)


Reference = AutoReference | DisableAdapterReference | CopiedReference | PrecomputedReference


class RunningMean(Stateful):
    """The mean of all log-ratios so far, around which BCO tells good from bad."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(2, dtype=torch.float64)

    def take(self, ratios: Tensor) -> Tensor:
        """The mean with those of one more step, if all of them are numbers."""
        total, count = (x.to(ratios.device, non_blocking=True) for x in (self.total, self.count))
        more = ratios.double().sum()
        self.total = torch.where(more.isfinite(), total + more, total)
        self.count = torch.where(more.isfinite(), count + len(ratios), count)
        return self.mean(ratios)

    def mean(self, ratios: Tensor) -> Tensor:
        return (self.total / self.count.clamp(min=1)).to(ratios)

    def state_dict(self) -> dict[str, Any]:
        return {"total": float(self.total), "count": int(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = torch.tensor([state["total"], state["count"]], dtype=torch.float64)


def check_reference_is_used(kind: str, terms: PreferenceObjective) -> None:
    """FieldError if there is nothing that a reference is asked for."""
    if not any(term.needs_reference for term in terms.terms):
        losses = " and ".join(kind_name(type(term)) for term in terms.terms)
        raise FieldError("reference", f"{kind}: nothing is compared with a reference by {losses}: leave it out")


def disable_adapter_problem(adapter: NoAdapter | LoRAConfig) -> str | None:
    """Why a model without its updates is not the one that training began with; None, if it is."""
    if not isinstance(adapter, LoRAConfig):
        return "disable_adapter: all weights are trained, so there is nothing to turn off"
    if adapter.adapter_path is not None:
        return "disable_adapter: training begins with an adapter, and without it the model is another"
    if adapter.modules_to_save or adapter.bias != "none":
        return "disable_adapter: some weights are trained whole, and cannot be turned off"
    return None


@dataclass(frozen=True)
class ReferenceLogpTable:
    """Log-probabilities by the number of a document; NaN of those that were never asked for."""

    logps: Tensor  # (documents,) fp32, on the device

    def judge(self, batch: Batch) -> Tensor:
        assert batch.document_indices is not None
        return self.logps[batch.document_indices]

    @staticmethod
    def of(job: Job, terms: PreferenceObjective, data: DataLoader, folder: Path, epochs: int) -> "ReferenceLogpTable":
        """As a file has it, or computed now and put there: always so where a run starts over."""
        key, run = reference_fingerprint(job, terms, data), job.run
        # Epochs of a mix may each hold some documents only: what is not whole is good for as many epochs of that mix.
        portions = [(part.weight, part.repeat, part.max_samples_per_epoch) for part in data.mixture.datasets]
        some = f"{key} {portions} {data.mixture.temperature} {data.mixture.shuffle}"
        found = None if job.space.overwrite else run.run_on_main(partial(read_cached_logps, folder / FILE, key, some, epochs))
        if found is None:
            found = compute_reference_logps(job.model, terms.logps_fn(job.model), data, epochs, run)
            run.run_on_main(
                partial(write_cached_logps, folder / FILE, some if np.isnan(found).any() else key, epochs, found)
            )
        return ReferenceLogpTable(torch.from_numpy(found).to(run.device))


def reference_fingerprint(job: Job, terms: PreferenceObjective, data: DataLoader) -> str:
    """Of all that log-probabilities depend on."""
    cfg = job.cfg
    folders = [job.source.path, *(Path(start) for start in [cfg.adapter.adapter_path] if start is not None)]
    paths = [path for folder in folders for path in sorted(folder.iterdir())]
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    choices = [asdict(choice) for choice in (cfg.adapter, cfg.quantization, cfg.precision)]
    told = [data.fingerprint, str(job.source.path), files, choices, terms.ld_alpha, cfg.init, cfg.seed]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def compute_reference_logps(
    model: Decoder, judge: RefLogpsFn, data: DataLoader, epochs: int, run: DistributedContext
) -> np.ndarray:
    """What a model makes of all documents that some epochs bring, (documents,)."""
    found = np.full(sum(len(part) for part in data.datasets), np.nan, np.float32)
    for epoch in range(epochs):
        steps = range(data.num_steps(epoch), data.num_steps(epoch + 1))
        for step in tqdm(steps, "asking the reference", disable=not run.is_main_process or None, leave=False):
            run.heartbeat.beat(0, "prepare")
            for batch in data[step]:
                assert batch.document_indices is not None
                found[batch.document_indices.numpy()] = judge(batch.to(run.device)).float().cpu().numpy()
        for other in run.all_gather_objects(found):
            found = np.where(np.isnan(found), other, found)
        if not np.isnan(found).any():
            break
    return found


def read_cached_logps(file: Path, whole: str, some: str, epochs: int) -> np.ndarray | None:
    """What a file has of all documents, or of those of at least so many epochs."""
    try:
        with np.load(file) as stored:
            enough = stored["key"] == whole or (stored["key"] == some and stored["epochs"] >= epochs)
            return stored["logps"] if enough else None
    except (OSError, ValueError, KeyError):
        return None


def write_cached_logps(file: Path, key: str, epochs: int, logps: np.ndarray) -> None:
    """The file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f".{file.name}")
    try:
        with partial_file.open("wb") as stream:
            np.savez(stream, key=np.array(key), epochs=np.array(epochs), logps=logps)
        partial_file.replace(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
