"""Sources of teacher distributions: a model that runs in each step, or logits that were stored once."""

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
from tunekit.data.dataloader.mixture import MixtureBase, is_streaming
from tunekit.data.datasets import DatasetConfig
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


class BaseTeacher(ABC):
    """Source of teacher distributions for the batches of a run."""

    @abstractmethod
    def compute_loss(self, loss: KLDivergenceLoss, model: Decoder, batch: Batch) -> tuple[Tensor, MetricTensors]:
        """Loss of the student and metrics, summed over the target tokens of a batch."""

    @torch.no_grad()
    def evaluate(
        self, loss: KLDivergenceLoss, model: Decoder, data: DataLoader | None, dist: DistributedContext
    ) -> dict[str, float]:
        """Mean loss and metrics per target token, over all held-out rows and ranks, if there are any."""
        if data is None:
            return {}
        sums, counts = MetricSums(), [0]

        def batch_loss(model: Decoder, batch: Batch) -> Tensor:
            loss_sum, metrics = self.compute_loss(loss, model, batch)
            sums.add(metrics)
            counts.append(batch.num_target_tokens)
            return loss_sum

        mean_loss = cross_entropy.eval_loss(batch_loss, model, data, dist)
        means = token_means(sums, dist, sum(counts))
        return {"loss": mean_loss, **{name: float(value) for name, value in means.items()}}


def token_means(sums: MetricSums, dist: DistributedContext, num_tokens: int) -> MetricTensors:
    """Means per target token. `num_tokens` counts those of this rank; CP ranks have added different tokens."""
    return sums.means(dist, dist.sum_counts(num_tokens) / dist.dims.cp)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(ABC):
    """Teacher model, and the format of its weights."""

    keeps_shared_keys: ClassVar[bool] = True  # an offline teacher keeps the model of an online one, and the reverse
    model: str  # Directory of a checkpoint, adapter or run; a Hub name; or tunekit/nano
    quantization: NoQuantization | NF4Config | FP4Config | Float8Config = NoQuantization()  # Format of its weights
    precision: PrecisionConfig = PrecisionConfig()

    @abstractmethod
    def check(self, student: Tokenizer) -> None:
        """Raise UserError if the teacher is missing, is not a language model or has an incompatible vocabulary."""

    def check_rows(self, data: DatasetConfig | MixtureBase, lmbda: float) -> None:  # noqa: B027
        """Raise FieldError if the teacher cannot score these rows, of which a fraction `lmbda` is generated."""

    @abstractmethod
    def runs_in_each_step(self) -> bool:
        """Whether the teacher model is in memory during training."""

    def num_shared_ids(self, student: Tokenizer) -> int:
        """Number of token ids that teacher and student both embed. Raises UserError for an unsuitable teacher."""
        try:
            source, _, tokenizer = build.resolve_model(self.model, download.SMALL)
            require_language_model(source, self.model)
        except UserError as error:
            raise UserError(f"teacher.model: {error}") from None
        check_same_vocabulary(student, tokenizer, self.model)
        return num_ids_of_both(student, source.spec.vocab)

    def load_model(self, dist: DistributedContext) -> Decoder:
        """Load the teacher in eval mode, sharded like the student."""
        try:
            return build.load_for_inference(self.model, self.precision, dist, self.quantization)[0]
        except UserError as error:
            raise UserError(f"teacher.model: {error}") from None

    @abstractmethod
    def open(
        self,
        loss: KLDivergenceLoss,
        student: Decoder,
        tokenizer: Tokenizer,
        loaders: list[DataLoader],
        dist: DistributedContext,
    ) -> BaseTeacher:
        """Create the teacher for a student and the rows of data loaders, which use the given tokenizer."""


@dataclass(frozen=True, kw_only=True)
class OnlineTeacherConfig(TeacherConfig):
    """Teacher model in memory, which runs in each step. Its logits are computed in chunks. The default kind."""

    kind: ClassVar[str] = "online"
    is_default: ClassVar[bool] = True

    top_k: int | None = None  # Teacher tokens kept per position; null: the full distribution

    def __post_init__(self) -> None:
        check_top_k(self.top_k)

    def check(self, student: Tokenizer) -> None:
        check_top_k(self.top_k, self.num_shared_ids(student), "null for the full distribution")

    def runs_in_each_step(self) -> bool:
        return True

    def open(
        self,
        loss: KLDivergenceLoss,
        student: Decoder,
        tokenizer: Tokenizer,
        loaders: list[DataLoader],
        dist: DistributedContext,
    ) -> BaseTeacher:
        model = self.load_model(dist)
        for loader in loaders:
            loader.check_vocab(model.spec.vocab)
        return OnlineTeacher(model, self.top_k, num_common_ids(student, model))


class OnlineTeacher(BaseTeacher):
    """Teacher model that runs in each step."""

    def __init__(self, model: Decoder, top_k: int | None, num_ids: int) -> None:
        self.model, self.top_k, self.num_ids = model, top_k, num_ids

    def compute_loss(self, loss: KLDivergenceLoss, model: Decoder, batch: Batch) -> tuple[Tensor, MetricTensors]:
        """Run the student inside the teacher's forward pass, while the weights of the teacher's head are gathered."""
        results, grad_enabled = [], torch.is_grad_enabled()

        def read(hidden: Tensor, head: Head) -> Tensor:
            states = hidden.flatten(0, 1)
            if self.top_k is None:
                teacher = FullTargets(states, head)
            else:
                target_rows = local_targets(model, batch)[1]
                teacher = top_k_targets(states, head, target_rows, self.top_k, loss.temperature, self.num_ids)
            with torch.set_grad_enabled(grad_enabled):
                results.append(loss(model, batch, teacher))
            return hidden[:0]

        with torch.no_grad():
            self.model(batch.tokens, batch.positions, batch.layout, head_fn=read, sharded=True)
        return results[0]


@dataclass(frozen=True, kw_only=True)
class OfflineTeacherConfig(TeacherConfig):
    """Teacher logits on disk. If rows are missing, the model is loaded and writes them; later runs do not need it.

    A target token takes 8 bytes for each of its top-k tokens. All other tokens are stored as one probability.
    """

    kind: ClassVar[str] = "offline"
    logits_dir: str  # Directory of the precomputed teacher logits
    top_k: int = 64  # Teacher tokens kept per position

    def __post_init__(self) -> None:
        check_top_k(self.top_k)

    def check(self, student: Tokenizer) -> None:
        """Check top_k, and the vocabulary unless it was checked when the files were written."""
        digest, name = vocab_digest(student), without_revision(self.model)
        infos = (info for info in self.read_complete_sets() if without_revision(info["model"]) == name)
        vocab = next((info["total"] for info in infos if info["words"] == digest), None)
        check_top_k(self.top_k, self.num_shared_ids(student) if vocab is None else num_ids_of_both(student, vocab))

    def check_rows(self, data: DatasetConfig | MixtureBase, lmbda: float) -> None:
        if lmbda:
            raise FieldError("on_policy.lmbda", "not available with an offline teacher. Set teacher.kind=online.")
        if is_streaming(data):
            raise FieldError("teacher", "an offline teacher cannot read streamed rows. Set teacher.kind=online.")

    def runs_in_each_step(self) -> bool:
        return False

    def read_complete_sets(self) -> list[dict[str, Any]]:
        """Metadata of the complete sets of files in `logits_dir`."""
        files = Path(self.logits_dir).expanduser().glob(f"*/{teacher_logits.INFO_FILE}")
        paths = sorted(file.parent for file in files)
        return [teacher_logits.read_info(path) for path in paths if teacher_logits.is_complete(path)]

    def open(
        self,
        loss: KLDivergenceLoss,
        student: Decoder,
        tokenizer: Tokenizer,
        loaders: list[DataLoader],
        dist: DistributedContext,
    ) -> BaseTeacher:
        paths = [self.logits_path(loss, student, loader) for loader in loaders]
        revision = dist.run_on_main(lambda: model_revision(self.model))
        logits = dist.run_on_main(lambda: self.find_existing(paths, revision, dist))
        if logits is None:
            dist.log(f"{self.logits_dir}: teacher logits are missing for some rows; computing them with {self.model}")
            self.num_shared_ids(tokenizer)
            model = self.load_model(dist)
            num_ids = num_common_ids(student, model)
            logits = teacher_logits.TopKLogits(self.top_k, loss.temperature, num_ids, model.spec.vocab)
            info = {**asdict(logits), "model": self.model, "words": vocab_digest(tokenizer), "seen": revision}
            for path, loader in zip(paths, loaders, strict=True):
                loader.check_vocab(model.spec.vocab)
                teacher_logits.write_teacher_logits(path, info, logits, model, loader, dist)
        return OfflineTeacher(teacher_logits.TeacherLogits(paths, logits))

    def logits_path(self, loss: KLDivergenceLoss, student: Decoder, loader: DataLoader) -> Path:
        """Directory of the files for the rows of a loader, named by a hash of everything that determines the logits."""
        options = str(self.quantization), str(self.precision), self.top_k, loss.temperature, student.spec.vocab
        key = json.dumps([without_revision(self.model), loader.fingerprint, *options])
        return Path(self.logits_dir).expanduser() / hashlib.sha256(key.encode()).hexdigest()[:16]

    def find_existing(
        self, paths: list[Path], revision: dict[str, Any], dist: DistributedContext
    ) -> teacher_logits.TopKLogits | None:
        """Format of the logits stored in these directories; None if one is incomplete."""
        is_complete = all(teacher_logits.is_complete(path) for path in paths)
        infos = {path: teacher_logits.read_info(path) for path in paths if (path / teacher_logits.INFO_FILE).is_file()}
        changed = {path: info for path, info in infos.items() if revision and info["seen"] not in ({}, revision)}
        if changed:
            dist.log(self.check_other_revision(changed, revision, is_complete))
        if not is_complete:
            return None
        return teacher_logits.TopKLogits(*(infos[paths[0]][name] for name in ("top", "temperature", "ids", "total")))

    def check_other_revision(
        self, infos: dict[Path, dict[str, Any]], revision: dict[str, Any], is_complete: bool
    ) -> str:
        """Message about complete files of another commit, which a run may use if a branch has moved meanwhile.

        Raises UserError if they would be mixed with files of the current commit.
        """
        commits = {info["seen"].get("commit") for info in infos.values()}
        paths, remedy = ", ".join(map(str, infos)), "Set another teacher.logits_dir, or delete these files"
        if None in commits or "commit" not in revision:
            raise UserError(f"{paths}: written by a different version of {self.model}. {remedy}.")
        old, name = " and ".join(sorted(commits)), without_revision(self.model)
        message = f"{paths}: written at commit {old}, but {self.model} is at {revision['commit']}"
        if is_complete and all(self.model in (name, info["model"]) for info in infos.values()):
            return f"{message}; using the files"
        raise UserError(f"{message}. {remedy}. To use them in a new run, set teacher.model={name}@{min(commits)}.")


class OfflineTeacher(BaseTeacher):
    """Teacher logits that are read from disk in each step."""

    def __init__(self, files: teacher_logits.TeacherLogits) -> None:
        self.files = files

    def compute_loss(self, loss: KLDivergenceLoss, model: Decoder, batch: Batch) -> tuple[Tensor, MetricTensors]:
        return loss(model, batch, self.files.targets_of(model, batch))


def check_top_k(top_k: int | None, num_ids: int | None = None, alternative: str = "") -> None:
    """Raise FieldError if `top_k` is below 1, UserError if it exceeds the `num_ids` shared ids (if known)."""
    if top_k is not None and top_k < 1:
        raise FieldError("top_k", f"must be >= 1, got {top_k}")
    if top_k is not None and num_ids is not None and top_k > num_ids:
        problem = f"must be <= {num_ids:,}, the vocabulary that student and teacher share, got {top_k:,}"
        raise UserError(f"teacher.top_k: {problem}{f', or {alternative}' * bool(alternative)}")


def num_ids_of_both(student: Tokenizer, vocab: int) -> int:
    """Number of token ids that a student with this tokenizer and a teacher with `vocab` ids both embed."""
    return vocab if student.vocab_size is None else min(student.vocab_size, vocab)


def num_common_ids(student: Decoder, teacher: Decoder) -> int:
    """Number of token ids that both models embed. Embeddings may be padded beyond the tokenizer's vocabulary."""
    return min(student.spec.vocab, teacher.spec.vocab)


def model_revision(name: str) -> dict[str, Any]:
    """Identity of a model's files: its commit on the Hub, or sizes and modification times of the files in a directory.

    Empty for models that are missing or ship with the package.
    """
    try:
        directory = download.resolve_model_dir(name, download.SMALL)
    except UserError:
        return {}
    if directory == assets.model_dir(name):
        return {}
    if (commit := download.cached_commit(directory)) is not None:
        return {"commit": commit}
    final_dir = build.final_dir_of(directory)
    files = sorted([*final_dir.glob("*config.json"), *final_dir.glob("*.safetensors")])
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def without_revision(name: str) -> str:
    """Hub name without its revision; other names are unchanged."""
    repo_and_revision = download.split_repo_revision(name)
    return name if repo_and_revision is None else repo_and_revision[0]


def vocab_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of the vocabulary."""
    return hashlib.sha256(json.dumps(sorted(token_texts(tokenizer).items())).encode()).hexdigest()


def check_same_vocabulary(student: Tokenizer, teacher: Tokenizer, name: str) -> None:
    """Raise UserError if an id is a different token for the student and for the teacher."""
    student_texts, teacher_texts = (token_texts(tokenizer) for tokenizer in (student, teacher))
    common = student_texts.keys() & teacher_texts.keys()
    different = sorted(token for token in common if student_texts[token] != teacher_texts[token])
    last = min(max(texts, default=-1) for texts in (student_texts, teacher_texts))
    different += sorted(token for token in student_texts.keys() ^ teacher_texts.keys() if token <= last)
    if different:
        first = different[0]
        raise UserError(
            f"teacher.model: the vocabulary of {name} differs from the student's: token {first} is "
            f"{teacher_texts.get(first)!r} in the teacher and {student_texts.get(first)!r} in the student "
            f"({len(different):,} of {len(student_texts):,} differ). Use a teacher with the student's tokenizer."
        )


def token_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Text of each token id."""
    return {token: text for text, token in tokenizer.model.get_vocab(with_added_tokens=True).items()}
