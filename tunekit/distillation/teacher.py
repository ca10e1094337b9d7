"""Where a teacher's view of rows comes from: a model that is asked in each step, or files that it has written once."""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tunekit import assets, build
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.tokenizer import Tokenizer
from tunekit.distillation import teacher_logits
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.hub import download
from tunekit.kernels.kl_divergence import FullTargets, top_k_targets
from tunekit.losses import cross_entropy
from tunekit.losses.cross_entropy import local_targets
from tunekit.losses.kl_divergence import KLDivergenceLoss, MetricTensors
from tunekit.losses.metric_sums import MetricSums
from tunekit.models.decoder import Decoder, Head
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization


class Teacher(ABC):
    """A teacher at work."""

    @abstractmethod
    def compute_loss(self, loss: KLDivergenceLoss, model: Decoder, batch: Batch) -> tuple[Tensor, MetricTensors]:
        """The loss of a student, and other figures, summed over the learnt tokens of a batch."""

    @torch.no_grad()
    def evaluate(
        self, loss: KLDivergenceLoss, model: Decoder, data: DataLoader, run: DistributedContext
    ) -> dict[str, float]:
        """The loss and other figures of a learnt token, over all rows and ranks."""
        tally, counts = MetricSums(), [0]

        def each(model: Decoder, batch: Batch) -> Tensor:
            found, figures = self.compute_loss(loss, model, batch)
            tally.add(figures)
            counts.append(batch.num_target_tokens)
            return found

        found = cross_entropy.eval_loss(each, model, data, run)
        return {"loss": found, **{name: float(value) for name, value in token_means(tally, run, sum(counts)).items()}}


def token_means(tally: MetricSums, run: DistributedContext, tokens: int) -> MetricTensors:
    """Of a learnt token, where this rank had so many: ranks that share rows have added different ones."""
    return tally.means(run, run.sum_counts(tokens) / run.dims.cp)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(ABC):
    """Which model it is, and how it is kept."""

    model: str  # folder of a checkpoint, an adapter or a run; a Hub name; tunekit/nano
    quantization: NoQuantization | NF4Config | FP4Config | Float8Config = NoQuantization()  # how its weights are stored
    precision: PrecisionConfig = PrecisionConfig()

    @abstractmethod
    def check(self, student: Tokenizer) -> None:
        """UserError if it is not there, writes no text, knows rows by other tokens than the student, or too few."""

    def num_shared_ids(self, student: Tokenizer) -> int:
        """How many ids it and the student both embed. UserError if it is none to learn these rows from."""
        try:
            source, _, words = build.resolve_model(self.model, download.SMALL)
            require_language_model(source, self.model)
        except UserError as error:
            raise UserError(f"teacher.model: {error}") from None
        check_same_vocabulary(student, words, self.model)
        return num_ids_of_both(student, source.spec.vocab)

    def load_model(self, run: DistributedContext) -> Decoder:
        """The model, over devices as the student is."""
        try:
            return build.load_for_inference(self.model, self.precision, run, self.quantization)[0].eval()
        except UserError as error:
            raise UserError(f"teacher.model: {error}") from None

    @abstractmethod
    def open(
        self,
        loss: KLDivergenceLoss,
        student: Decoder,
        words: Tokenizer,
        loaders: list[DataLoader],
        run: DistributedContext,
    ) -> Teacher:
        """Ready to be compared with a student, on the rows of some loaders, which are written with these words."""


@dataclass(frozen=True, kw_only=True)
class OnlineTeacherConfig(TeacherConfig):
    """A model in memory beside the student, which each step asks. Of what it makes, only hidden states are kept.

    This is meant where no `kind` is written.
    """

    kind: ClassVar[str] = "online"
    usual: ClassVar = True

    top_k: int | None = None  # Teacher tokens kept per position; null: the full distribution

    def __post_init__(self) -> None:
        check_top_k(self.top_k)

    def check(self, student: Tokenizer) -> None:
        check_top_k(self.top_k, self.num_shared_ids(student), "or null, for each token by itself")

    def open(
        self,
        loss: KLDivergenceLoss,
        student: Decoder,
        words: Tokenizer,
        loaders: list[DataLoader],
        run: DistributedContext,
    ) -> Teacher:
        model = self.load_model(run)
        for loader in loaders:
            loader.check_vocab(model.spec.vocab)
        return OnlineTeacher(model, self.top_k, num_common_ids(student, model))


class OnlineTeacher(Teacher):
    """A model that is asked in each step."""

    def __init__(self, model: Decoder, top_k: int | None, num_ids: int) -> None:
        self.model, self.top, self.ids = model, top_k, num_ids

    def compute_loss(self, loss: KLDivergenceLoss, model: Decoder, batch: Batch) -> tuple[Tensor, MetricTensors]:
        """The student runs inside the teacher's pass, where the weights of the teacher's head are whole."""
        found, wanted = [], torch.is_grad_enabled()

        def read(hidden: Tensor, head: Head) -> Tensor:
            states = hidden.flatten(0, 1)
            if self.top is None:
                teacher = FullTargets(states, head)
            else:
                teacher = top_k_targets(
                    states, head, local_targets(model, batch)[1], self.top, loss.temperature, self.ids
                )
            with torch.set_grad_enabled(wanted):
                found.append(loss(model, batch, teacher))
            return hidden[:0]

        with torch.no_grad():
            self.model(batch.tokens, batch.positions, batch.layout, read=read, part=True)
        return found[0]


@dataclass(frozen=True, kw_only=True)
class OfflineTeacherConfig(TeacherConfig):
    """Files in a folder. Where they lack these rows the model is loaded first and writes them; a later run needs none.

    For each learnt token they hold 8 bytes for each of the likeliest tokens; all others count as one.
    """

    kind: ClassVar[str] = "offline"
    logits_dir: str  # Directory of the precomputed teacher logits
    top_k: int = 64  # Teacher tokens kept per position; null: the full distribution

    def __post_init__(self) -> None:
        check_top_k(self.top_k)

    def check(self, student: Tokenizer) -> None:
        """Whoever has written files for this vocabulary was compared with it then, and need not be here."""
        words = vocab_digest(student)
        own = (
            found
            for found in self.read_complete_sets()
            if without_revision(found["model"]) == without_revision(self.model)
        )
        vocab = next((found["total"] for found in own if found["words"] == words), None)
        check_top_k(self.top_k, self.num_shared_ids(student) if vocab is None else num_ids_of_both(student, vocab))

    def read_complete_sets(self) -> list[dict[str, Any]]:
        """What whole sets of files say of themselves."""
        places = sorted(
            file.parent for file in Path(self.logits_dir).expanduser().glob(f"*/{teacher_logits.INFO_FILE}")
        )
        return [teacher_logits.read_info(place) for place in places if teacher_logits.is_complete(place)]

    def open(
        self,
        loss: KLDivergenceLoss,
        student: Decoder,
        words: Tokenizer,
        loaders: list[DataLoader],
        run: DistributedContext,
    ) -> Teacher:
        places = [self.logits_path(loss, student, loader) for loader in loaders]
        now = run.run_on_main(lambda: model_revision(self.model))
        kept = run.run_on_main(lambda: self.find_existing(places, now, run))
        if kept is None:
            run.log(f"{self.logits_dir}: what is wanted of some rows is not there yet: asking {self.model}")
            self.num_shared_ids(words)
            model = self.load_model(run)
            kept = teacher_logits.TopKLogits(
                self.top_k, loss.temperature, num_common_ids(student, model), model.spec.vocab
            )
            about = {**asdict(kept), "model": self.model, "words": vocab_digest(words), "seen": now}
            for place, loader in zip(places, loaders, strict=True):
                loader.check_vocab(model.spec.vocab)
                teacher_logits.write_teacher_logits(place, about, kept, model, loader, run)
        return OfflineTeacher(teacher_logits.TeacherLogits(places, kept))

    def logits_path(self, loss: KLDivergenceLoss, student: Decoder, loader: DataLoader) -> Path:
        """Where the files for some rows are: what decides their numbers is their name."""
        how = str(self.quantization), str(self.precision), self.top_k, loss.temperature, student.spec.vocab
        told = json.dumps([without_revision(self.model), loader.fingerprint, *how])
        return Path(self.logits_dir).expanduser() / hashlib.sha256(told.encode()).hexdigest()[:16]

    def find_existing(
        self, places: list[Path], now: dict[str, Any], run: DistributedContext
    ) -> teacher_logits.TopKLogits | None:
        """What is kept in all of these folders; None if one is not whole. `now`: what is `seen` of the model."""
        whole = all(teacher_logits.is_complete(place) for place in places)
        abouts = {
            place: teacher_logits.read_info(place) for place in places if (place / teacher_logits.INFO_FILE).is_file()
        }
        others = {place: about for place, about in abouts.items() if now and about["seen"] not in ({}, now)}
        if others:
            run.log(self.check_other_revision(others, now, whole))
        if not whole:
            return None
        return teacher_logits.TopKLogits(*(abouts[places[0]][name] for name in ("top", "temperature", "ids", "total")))

    def check_other_revision(self, abouts: dict[Path, dict[str, Any]], now: dict[str, Any], whole: bool) -> str:
        """A line on files of another commit, where a run may go on with them: a branch moves, and a run that was
        stopped must not end there. UserError where they would be mixed with those of the commit that is there now."""
        commits = {about["seen"].get("commit") for about in abouts.values()}
        places, mend = ", ".join(map(str, abouts)), "give another teacher.logits_dir, or delete them"
        if None in commits or "commit" not in now:
            raise UserError(f"{places}: another {self.model} wrote these files: {mend}")
        was, name = " and ".join(sorted(commits)), without_revision(self.model)
        told = f"{places}: {self.model} is at {now['commit']}, and these files are of {was}"
        if whole and all(self.model in (name, about["model"]) for about in abouts.values()):
            return f"{told}: going on with them"
        raise UserError(f"{told}: {mend}; a new run may go on with them as teacher.model={name}@{min(commits)}")


class OfflineTeacher(Teacher):
    """Files that are read in each step."""

    def __init__(self, files: teacher_logits.TeacherLogits) -> None:
        self.files = files

    def compute_loss(self, loss: KLDivergenceLoss, model: Decoder, batch: Batch) -> tuple[Tensor, MetricTensors]:
        return loss(model, batch, self.files.targets_of(model, batch))


def check_top_k(top: int | None, ids: int | None = None, other: str = "") -> None:
    """FieldError for less than a token; UserError for more than the `ids` that are common, once these are known."""
    if top is not None and top < 1:
        raise FieldError("top_k", f"must be 1 or more tokens, not {top}")
    if top is not None and ids is not None and top > ids:
        told = f"{top:,} tokens are more than the {ids:,} of the vocabulary that student and teacher share"
        raise UserError(f"teacher.top_k: {told}: say {ids} at most{f', {other}' * bool(other)}")


def num_ids_of_both(student: Tokenizer, vocab: int) -> int:
    """Ids that a student of this tokenizer and a teacher of so many embed."""
    return vocab if student.vocab is None else min(student.vocab, vocab)


def num_common_ids(student: Decoder, teacher: Decoder) -> int:
    """Ids that both embed: behind the tokens that a tokenizer knows, a model may be padded."""
    return min(student.spec.vocab, teacher.spec.vocab)


def model_revision(name: str) -> dict[str, Any]:
    """What tells a model from a later one of its name: its commit on the Hub; of a folder its files, their sizes and
    when they were written. Nothing of one that cannot be found, or that ships with the package."""
    try:
        folder = download.resolve_model_dir(name, download.SMALL)
    except UserError:
        return {}
    if folder == assets.model_dir(name):
        return {}
    if (commit := download.cached_commit(folder)) is not None:
        return {"commit": commit}
    done = build.final_dir_of(folder)
    files = sorted([*done.glob("*config.json"), *done.glob("*.safetensors")])
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def without_revision(name: str) -> str:
    """A name on the Hub without its revision: which commit it is stands in what was `seen`. Any other as it is."""
    parts = download.split_repo_revision(name)
    return name if parts is None else parts[0]


def vocab_digest(tokenizer: Tokenizer) -> str:
    """A name for what all ids stand for."""
    return hashlib.sha256(json.dumps(sorted(token_texts(tokenizer).items())).encode()).hexdigest()


def check_same_vocabulary(student: Tokenizer, teacher: Tokenizer, name: str) -> None:
    """UserError if an id is one token for the student and another for its teacher."""
    ours, theirs = (token_texts(one) for one in (student, teacher))
    both = ours.keys() & theirs.keys()
    apart = sorted(token for token in both if ours[token] != theirs[token])
    least = min(max(one, default=-1) for one in (ours, theirs))
    apart += sorted(token for token in ours.keys() ^ theirs.keys() if token <= least)
    if apart:
        first = apart[0]
        raise UserError(
            f"teacher.model: {name} has another vocabulary than the student: the token {first} is "
            f"{theirs.get(first)!r} there and {ours.get(first)!r} here ({len(apart):,} of {len(ours):,} differ); both "
            "must expect the same tokens: choose a teacher that shares the student's tokenizer"
        )


def token_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """What each id stands for."""
    return {token: text for text, token in tokenizer.model.get_vocab(with_added_tokens=True).items()}
