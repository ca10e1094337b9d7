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

from tunekit import assemble
from tunekit.adapters import Frozen, Full, LoRA
from tunekit.config.choices import kind_name
from tunekit.data.steps.batch import Batch
from tunekit.data.steps.loader import Loader
from tunekit.data.steps.mix import streams
from tunekit.errors import FieldError, UserError
from tunekit.losses.comparison import Loss
from tunekit.losses.objective import Judge, Judges, Objective
from tunekit.memory import Memory
from tunekit.models.decoder import Decoder
from tunekit.parallel.run import Run
from tunekit.training import Job, Moving, Training

FILE = "reference.npz"


@dataclass(frozen=True)
class Off:
    """The same model with its updates off: no memory, and one more pass forward."""

    kind: ClassVar[str] = "off"

    def copies(self, adapter: Full | LoRA, loss: Sequence[Loss]) -> bool:
        """Whether a second model is in memory."""
        return False

    def asks(self, loss: Sequence[Loss]) -> bool:
        """Whether each step has a pass for it."""
        return True

    def check(self, cfg: Training, terms: Objective) -> None:
        insist_on_comparison("off", terms)
        if (reason := keeps_nothing(cfg.adapter)) is not None:
            raise FieldError("reference", f"{reason}: `copy` or `cached` keeps what training began with")

    def open(self, job: Job, terms: Objective) -> Judges:
        judge = terms.judged(job.model)

        def asked(batch: Batch) -> Tensor:
            with job.cfg.adapter.off(job.model):
                return judge(batch)

        return Judges(asked, asked)


@dataclass(frozen=True)
class Copy:
    """A second model, frozen, stored and shared as the first one: what there is where all weights are trained."""

    kind: ClassVar[str] = "copy"

    def copies(self, adapter: Full | LoRA, loss: Sequence[Loss]) -> bool:
        return True

    def asks(self, loss: Sequence[Loss]) -> bool:
        return True

    def check(self, cfg: Training, terms: Objective) -> None:
        insist_on_comparison("copy", terms)

    def open(self, job: Job, terms: Objective) -> Judges:
        cfg = job.cfg
        adapter = Frozen() if isinstance(cfg.adapter, Full) else cfg.adapter
        copy = assemble.model(job.source, cfg.weights, adapter, cfg.precision, Memory(), job.run, cfg.init == "random")
        judge = terms.judged(copy.requires_grad_(False).eval())
        return Judges(judge, judge)


@dataclass(frozen=True)
class Cached:
    """Log-probabilities that are computed once, before the first step, and kept in the run's folder."""

    kind: ClassVar[str] = "cached"

    def copies(self, adapter: Full | LoRA, loss: Sequence[Loss]) -> bool:
        return False

    def asks(self, loss: Sequence[Loss]) -> bool:
        return False

    def check(self, cfg: Training, terms: Objective) -> None:
        insist_on_comparison("cached", terms)
        if streams(cfg.data):
            raise FieldError("reference", "cached: nobody knows all rows of a stream before: use off or copy")
        if any(term.others for term in terms.terms):
            raise FieldError("reference", "cached: kto asks for other answers in each step: use off or copy")

    def open(self, job: Job, terms: Objective) -> Judges:
        """The model is still the one that training begins with, whatever state comes next."""
        whole = [(job.data, job.space.folder, passes(job))]
        whole += [(job.held, job.space.folder / "validation", 1)] if job.held else []
        return Judges(*(Table.of(job, terms, *one).judge for one in whole))


def passes(job: Job) -> int:
    """Epochs of which the run may see rows: those that it begins, and those that ways back lead on to."""
    cfg, data = job.cfg, job.data
    steps = cfg.steps or data.steps(cfg.epochs)
    passed = cfg.guard.most * min(cfg.save_every, steps) if cfg.guard.returns else 0
    return next(n for n in count(1) if data.steps(n) >= steps + passed)


@dataclass(frozen=True)
class Initial:
    """What training began with as it costs least: updates off where the model is that without them; else a copy."""

    kind: ClassVar[str] = "initial"

    def copies(self, adapter: Full | LoRA, loss: Sequence[Loss]) -> bool:
        return self.asks(loss) and keeps_nothing(adapter) is not None

    def asks(self, loss: Sequence[Loss]) -> bool:
        return any(term.compares for term in loss)

    def check(self, cfg: Training, terms: Objective) -> None:
        """One of both always can."""

    def open(self, job: Job, terms: Objective) -> Judges:
        if not any(term.compares for term in terms.terms):
            return Judges()
        return (Off() if keeps_nothing(job.cfg.adapter) is None else Copy()).open(job, terms)


Reference = Initial | Off | Copy | Cached


class Shift(Moving):
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


def insist_on_comparison(kind: str, terms: Objective) -> None:
    """FieldError if there is nothing that a reference is asked for."""
    if not any(term.compares for term in terms.terms):
        losses = " and ".join(kind_name(type(term)) for term in terms.terms)
        raise FieldError("reference", f"{kind}: nothing is compared with a reference by {losses}: leave it out")


def keeps_nothing(adapter: Full | LoRA) -> str | None:
    """Why a model without its updates is not the one that training began with; None, if it is."""
    if not isinstance(adapter, LoRA):
        return "off: all weights are trained, so there is nothing to turn off"
    if adapter.start is not None:
        return "off: training begins with an adapter, and without it the model is another"
    if adapter.whole or adapter.bias != "none":
        return "off: some weights are trained whole, and cannot be turned off"
    return None


@dataclass(frozen=True)
class Table:
    """Log-probabilities by the number of a document; NaN of those that were never asked for."""

    logps: Tensor  # (documents,) fp32, on the device

    def judge(self, batch: Batch) -> Tensor:
        assert batch.numbers is not None
        return self.logps[batch.numbers]

    @staticmethod
    def of(job: Job, terms: Objective, data: Loader, folder: Path, epochs: int) -> "Table":
        """As a file has it, or computed now and put there: always so where a run starts over."""
        key, run = digest(job, terms, data), job.run
        # Epochs of a mix may each hold some documents only: what is not whole is good for as many epochs of that mix.
        portions = [(part.weight, part.epochs, part.cap) for part in data.mix.parts]
        some = f"{key} {portions} {data.mix.temperature} {data.mix.shuffle}"
        found = None if job.space.fresh else run.shared(partial(kept, folder / FILE, key, some, epochs))
        if found is None:
            found = asked(job.model, terms.judged(job.model), data, epochs, run)
            run.shared(partial(keep, folder / FILE, some if np.isnan(found).any() else key, epochs, found))
        return Table(torch.from_numpy(found).to(run.device))


def digest(job: Job, terms: Objective, data: Loader) -> str:
    """Of all that log-probabilities depend on."""
    cfg = job.cfg
    folders = [job.source.path, *(Path(start) for start in [cfg.adapter.start] if start is not None)]
    paths = [path for folder in folders for path in sorted(folder.iterdir())]
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    choices = [asdict(choice) for choice in (cfg.adapter, cfg.weights, cfg.precision)]
    told = [data.digest, str(job.source.path), files, choices, terms.tail, cfg.init, cfg.seed]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def asked(model: Decoder, judge: Judge, data: Loader, epochs: int, run: Run) -> np.ndarray:
    """What a model makes of all documents that some epochs bring, (documents,)."""
    found = np.full(sum(len(part) for part in data.parts), np.nan, np.float32)
    for epoch in range(epochs):
        steps = range(data.steps(epoch), data.steps(epoch + 1))
        for step in tqdm(steps, "asking the reference", disable=not run.is_main or None, leave=False):
            run.beats.beat(0, "prepare")
            for batch in data[step]:
                assert batch.numbers is not None
                found[batch.numbers.numpy()] = judge(batch.to(run.device)).float().cpu().numpy()
        for other in run.gather(found):
            found = np.where(np.isnan(found), other, found)
        if not np.isnan(found).any():
            break
    return found


def kept(file: Path, whole: str, some: str, epochs: int) -> np.ndarray | None:
    """What a file has of all documents, or of those of at least so many epochs."""
    try:
        with np.load(file) as stored:
            enough = stored["key"] == whole or (stored["key"] == some and stored["epochs"] >= epochs)
            return stored["logps"] if enough else None
    except (OSError, ValueError, KeyError):
        return None


def keep(file: Path, key: str, epochs: int, logps: np.ndarray) -> None:
    """The file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f".{file.name}")
    try:
        with partial_file.open("wb") as stream:
            np.savez(stream, key=np.array(key), epochs=np.array(epochs), logps=logps)
        partial_file.replace(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
