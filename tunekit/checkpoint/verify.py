"""Verifies saved files: loads them and compares their logits with those of the model that was saved.

Differences are in standard deviations of the logits of a token over the vocabulary, or of all scores. Matmuls are in
fp32 for any compute_dtype, so that only differences of the weights count.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, layerwise_forward, peft_adapter
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.final_checkpoint import VERIFICATION as FILE
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import LazyLogits, LogitsFn, ModelSource, checkpoint_logits
from tunekit.checkpoint.model_dir import ModelDir, read_json
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.spec import DecoderSpec

FILES = "model and files"
# Maximum mean difference after rounding the model to the dtypes of its files. Reordered sums differ by 1e-6.
TOLERANCE = 1e-4
PEAK_FACTOR = 40  # maximum ratio of the largest to the mean difference; 5 to 16 were measured
# Maximum mean difference of the logits of a router, relative to the tolerance. All tokens use the experts of the model
# that was saved: a rounding error can route a token to another expert, which changes its logits a lot.
ROUTER_FACTOR = 4
# The merge is recomputed, and some sums round differently, which changed logits by 0.002 of the rounding difference.
MERGE_TOLERANCE = 0.05
# Maximum mean difference due to rounding, in standard deviations; beyond it, the dtype is unsuitable for the model.
# Measured in bf16: 0.0026 in nano, 0.0025 to 0.04 in random models of 4 to 64 layers, 0.13 in a random Llama 4, where
# rounding routes some tokens to other experts.
MAX_ROUNDING = 0.5
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a fox who",
    "In 1969, for the first time, two people walked on",
    "Water boils at 100 degrees and freezes at",
    "3 + 4 * 5 =",
    "Dear Sir or Madam,",
    "def add(a, b):\n    return",
    "SELECT name FROM users WHERE",
    '{"city": "Oslo", "day":',
    "Die Hauptstadt von Österreich ist",
    "Le chat dort sur la",
    "東京は日本の",
    "Столица Болгарии —",
    "القاهرة عاصمة",
)
QUESTIONS = ("Why is the sky blue?", "Write a haiku about rain.", "What is 17 times 23?", "Name three rivers in Asia.")
MAX_PROMPT_TOKENS = 32
RANDOM_LENGTHS = (32, 16, 8, 8)  # tokens of the random prompts


@dataclass(frozen=True)
class VerificationResult:
    """Differences of logits in standard deviations. `top1` is the fraction of tokens with the same argmax."""

    compared: str
    largest: float
    mean: float
    unexplained: float  # mean difference after rounding the model to the dtypes of the files
    top1: float
    tokens: int
    tolerance: float  # on `unexplained`
    passed: bool
    scores: bool = False  # the model has a score head
    exceeded: str | None = None  # the limit that was exceeded, if the verification failed

    def __str__(self) -> str:
        if self.largest == 0 and self.passed:
            return f"verified: {self.compared} give the same {self.noun} bit for bit ({self.tokens} tokens)"
        verdict = "verified" if self.passed else "verification failed"
        unit = "all scores" if self.scores else "the logits of a token"
        agreement = "" if self.scores else f"; top-1 agreement {self.top1:.1%} of {self.tokens} tokens"
        return (
            f"{verdict}: {self.noun} of {self.compared} differ by {self.mean:.2g} on average and by {self.largest:.2g} "
            f"at most, in standard deviations of {unit}; {self.explanation}{agreement}"
        )

    @property
    def noun(self) -> str:
        return "scores" if self.scores else "logits"

    @property
    def explanation(self) -> str:
        """The limit that was exceeded, or the tolerance and how much of the mean difference is due to rounding."""
        if self.exceeded is not None:
            return self.exceeded
        if self.unexplained >= self.mean:
            return f"the tolerance is {self.tolerance:.2g} on average"
        rounding = "is due to rounding the weights to the dtypes of the files"
        if self.unexplained == 0:
            return f"all of it {rounding}"
        return f"all but {self.unexplained:.2g} {rounding} (tolerance {self.tolerance:.2g})"

    @property
    def metrics(self) -> dict[str, float]:
        """Values for the metrics of a run."""
        return {
            "verify/max_logit_diff": self.largest,
            "verify/mean_logit_diff": self.mean,
            "verify/top1_agreement": self.top1,
        }

    def write(self, folder: Path) -> "VerificationResult":
        """Write verification.json next to the verified files, and return self. Non-finite values are null."""
        values = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in asdict(self).items()}
        (folder / FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        return self


def verify_saved(
    folder: Path, model: Decoder, model_source: ModelSource, dist: DistributedContext
) -> VerificationResult:
    """Compare saved files with the model in memory. Must be called on all ranks; all get the result."""
    source = model_source.source
    model_source = replace(model_source, precision=replace(model_source.precision, compute_dtype="fp32"))
    rows = dist.run_on_main(partial(probe_prompts, folder, source.spec))
    expected = live_logits(model, model_source, rows, dist)
    if AdapterDir.is_adapter(folder):  # adapters are saved in the dtype of training, without rounding
        directory = AdapterDir.open(folder)
        adapter = peft_adapter.read_adapter_config(directory, source)
        written, rounded = replace(model_source, source=replace(source, adapter=directory), adapter=adapter), None
    else:
        written = ModelSource(HFCheckpoint.open(folder))
        round_logits = partial(layerwise_forward.rounded_logits, dtypes=written.source.dtypes, like=expected)
        rounded = live_logits(model, model_source, rows, dist, round_logits)

    def compare() -> VerificationResult:
        assert expected is not None, "only the main process compares"
        with atomic.wrap_write_errors(folder):
            actual = checkpoint_logits(written, rows, dist.device, like=expected)
            return compare_logits(FILES, expected, actual, rounded).write(folder)

    return dist.run_on_main(compare)


def verify_merge(folder: Path, source: HFCheckpoint, adapter: LoRAConfig, device: torch.device) -> VerificationResult:
    """Compare a merged checkpoint with its base plus adapter."""
    rows = probe_prompts(folder, source.spec)
    model, merged = ModelSource(source, adapter=adapter), ModelSource(HFCheckpoint.open(folder))
    expected = checkpoint_logits(model, rows, device)
    rounded = checkpoint_logits(model, rows, device, rounded_dtypes=merged.source.dtypes, like=expected)
    actual = checkpoint_logits(merged, rows, device, like=expected)
    compared = "base with adapter and merged files"
    return compare_logits(compared, expected, actual, rounded, MERGE_TOLERANCE).write(folder)


def verify_export(
    source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, exported: HFCheckpoint, allowed: float, device: torch.device
) -> VerificationResult:
    """Compare files of another format, opened as a checkpoint, with the exported model.

    `allowed` is the maximum mean difference for the format.
    """
    rows = probe_prompts(source.path, source.spec)
    expected = checkpoint_logits(ModelSource(source, adapter=adapter), rows, device)
    actual = checkpoint_logits(ModelSource(exported), rows, device, like=expected)
    return compare_logits("model and exported files", expected, actual, tolerance=allowed)


def live_logits(
    model: Decoder,
    model_source: ModelSource,
    rows: Sequence[Sequence[int]],
    dist: DistributedContext,
    logits_fn: LogitsFn = layerwise_forward.forward_logits,
) -> LazyLogits | None:
    """Logits of a model in memory, computed as from files: matmuls in fp32, without torch.compile.

    If the model is sharded, only the main process gets them.
    """
    if not layerwise_forward.is_fully_local(model):
        meta_model = model_source.build_meta_model(dist.device)
        return layerwise_forward.gathered_logits(model, meta_model, rows, dist, logits_fn)
    compute, model.compute_dtype = model.compute_dtype, torch.float32
    try:
        with torch.compiler.set_stance("force_eager"):
            return logits_fn(model, rows, dist.device)
    finally:
        model.compute_dtype = compute


class LogitDiff(NamedTuple):
    """Largest and mean difference of logits, fraction of tokens with the same argmax, and number of tokens."""

    largest: float
    mean: float
    top1: float
    tokens: int


def compare_logits(
    compared: str,
    expected: LazyLogits,
    actual: LazyLogits,
    rounded: LazyLogits | None = None,
    rounding_fraction: float = 0.0,
    tolerance: float = TOLERANCE,
) -> VerificationResult:
    """Compare logits with the expected ones. `rounded` are the expected logits after rounding the weights.

    A fraction `rounding_fraction` of the difference due to rounding is tolerated in addition.
    """
    total, unexplained = logit_diffs([expected, rounded or expected], actual)
    tolerance = max(tolerance, rounding_fraction * total.mean)
    router = (rounded or expected).routing.mean_difference(actual.routing)
    limits = (
        ("the mean difference", total.mean, max(MAX_ROUNDING, tolerance)),
        ("the mean difference without rounding", unexplained.mean, tolerance),
        ("the largest difference without rounding", unexplained.largest, PEAK_FACTOR * tolerance),
        ("the mean difference of the logits of a router", router, ROUTER_FACTOR * tolerance),
    )
    problems = (f"{name} is {value:.2g}, above {limit:.2g}" for name, value, limit in limits if not value <= limit)
    exceeded = next(problems, None)
    metrics = total.largest, total.mean, unexplained.mean, total.top1, total.tokens
    return VerificationResult(compared, *metrics, tolerance, exceeded is None, actual.is_score, exceeded)


def logit_diffs(expected: Sequence[LazyLogits], actual: LazyLogits) -> list[LogitDiff]:
    """Differences of `actual` from each of the expected logits. Every chunk is computed once."""
    accumulators = [LogitDiffAccumulator(actual.is_score) for _ in expected]
    for columns, *references in zip(actual.chunks(), *(accumulator.chunks() for accumulator in expected), strict=True):
        for accumulator, reference in zip(accumulators, references, strict=True):
            accumulator.add(reference.cpu(), columns.cpu())
    return [accumulator.result() for accumulator in accumulators]


class LogitDiffAccumulator:
    """Accumulates statistics of two logits over chunks of columns, one value per token."""

    def __init__(self, scores: bool) -> None:
        self.scores = scores
        self.num_columns = 0
        self.total, self.squares, self.abs_diff, self.max_diff = torch.zeros(4)
        self.top1 = torch.full((2, 1), -math.inf), torch.zeros((2, 1), dtype=torch.long)

    def add(self, expected: Tensor, actual: Tensor) -> None:
        """Add the next columns, (tokens, columns)."""
        expected_fp64, diff = expected.double(), (expected - actual).abs()
        self.total, self.squares = self.total + expected_fp64.sum(-1), self.squares + expected_fp64.square().sum(-1)
        self.abs_diff = self.abs_diff + diff.double().sum(-1)
        self.max_diff = torch.maximum(self.max_diff, diff.amax(-1))
        (best, token), (value, index) = self.top1, torch.stack([expected, actual]).max(-1)
        is_better = value > best
        self.top1 = torch.where(is_better, value, best), torch.where(is_better, index + self.num_columns, token)
        self.num_columns += expected.shape[1]

    def result(self) -> LogitDiff:
        spread = self.standard_deviation().clamp_min(1e-30)  # propagates NaN
        expected, actual = self.top1[1]
        mean, agreement = (self.abs_diff / spread).mean() / self.num_columns, (expected == actual).float().mean()
        return LogitDiff((self.max_diff / spread).max().item(), mean.item(), agreement.item(), len(expected))

    def standard_deviation(self) -> Tensor:
        """Standard deviation of the logits of each token, or of all scores, which have few columns per token."""
        total, squares, count = self.total, self.squares, self.num_columns
        if self.scores:
            total, squares, count = total.sum(), squares.sum(), count * len(total)
        return ((squares - total.square() / count) / (count - 1)).clamp_min(0).sqrt()


def probe_prompts(folder: Path, spec: DecoderSpec) -> list[list[int]]:
    """Short prompts as token ids: random tokens, texts, and questions in the chat template."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(spec.vocab, (length,), generator=generator).tolist() for length in RANDOM_LENGTHS]
    directory = ModelDir(folder)
    if directory.has_tokenizer:
        tokenizer = directory.tokenizer
        rows += tokenizer.encode_texts(TEXTS, special=True)
        with suppress(UserError):  # no chat template, or it rejects a single user message
            rows += [tokenizer.encode_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    valid = ([token for token in row if token < spec.vocab] for row in rows)
    return [row[-min(MAX_PROMPT_TOKENS, spec.context) :] for row in valid if row]


def check_unchanged(folder: Path) -> None:
    """Raise UserError if the checksum of a weight file has changed since a run saved it. Other files may be edited."""
    sums = atomic.read_mark(folder) or {} if atomic.is_complete(folder) else {}
    weights = {folder / name: value for name, value in sums.items() if name.endswith(".safetensors")}
    if changed := next((file for file, value in weights.items() if not atomic.is_intact(file, value)), None):
        raise UserError(f"{changed}: the checksum differs, the file was changed or is corrupt")


def read_verification(folder: Path) -> dict[str, Any] | None:
    """Read verification.json of a directory; None if the files were not verified."""
    return read_json(folder / FILE) if (folder / FILE).is_file() else None


def raise_if_failed(folder: Path) -> None:
    """Raise UserError if the files of a directory failed verification. The files are kept for inspection."""
    saved = read_verification(folder)
    if saved is not None and saved["passed"] is not True:
        fields: dict[str, Any] = {key: math.nan if value is None else value for key, value in saved.items()}
        result = VerificationResult(**fields)
        raise UserError(f"{folder}: {result}. The files are kept, see {FILE}; `tune push` refuses them.")
