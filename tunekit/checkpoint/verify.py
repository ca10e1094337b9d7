"""Whether written files hold the model that was meant: they are read again, and asked the same as the model itself.

Logits are compared in units of their spread over the vocabulary, one standard deviation at each token; scores in that
of all scores. Products are in fp32 whatever the run computed in, so that what differs are the weights.
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

from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, gathered_logits, layerwise_forward, peft_adapter
from tunekit.checkpoint.final_checkpoint import VERIFICATION as FILE
from tunekit.checkpoint.gathered_logits import Ask
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.layerwise_forward import LazyLogits
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec
from tunekit.quantization.config import NoQuantization

EXACT, PLAIN, FULL = PrecisionConfig("fp32"), NoQuantization(), NoAdapter()
FILES = "model and files"
# What may be left once the model is rounded as its files are: the same sums in another order differ by about 1e-6.
FINEST = 1e-4
PEAK = 40  # the largest of such differences may be so many times the mean: 5 to 16 times were measured
# A merge rounds sums that are made anew here: some fall to the other side, which was 0.002 of what rounding changes.
# One of them may send a token to another expert.
HALFWAY, ASTRAY = 0.05, 1.0
# What rounding itself may change on average, as a share of the logits' spread: beyond that the dtype ruins the model.
# Measured in bf16: 0.0026 in the nano, 0.0025 to 0.04 in random models of 4 to 64 layers, 0.13 in a random Llama 4,
# where rounding sends some tokens to another expert.
ROUNDING = 0.5
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
WIDTH = 32  # tokens of a probe at most
RANDOM = (32, 16, 8, 8)  # tokens of the probes that are drawn from the whole vocabulary


@dataclass(frozen=True)
class VerificationResult:
    """Differences of logits, in standard deviations; `top1`: the share of tokens with the same likeliest successor."""

    compared: str
    largest: float
    mean: float
    unexplained: float  # the mean that is left when the weights are rounded to the dtypes of the files
    top1: float
    tokens: int
    tolerance: float  # on `unexplained`
    passed: bool
    scores: bool = False  # what is compared are those of a head that scores: they name no token

    def __str__(self) -> str:
        if self.largest == 0 and self.passed:
            return f"verified: {self.compared} give the same {self.named} to the last bit ({self.tokens} tokens)"
        verdict = "verified" if self.passed else "verification failed"
        spread = "all scores spread" if self.scores else "the logits of a token spread"
        likeliest = f"; the likeliest token is the same at {self.top1:.1%} of {self.tokens}"
        return (
            f"{verdict}: {self.named} of {self.compared} differ by {self.mean:.2g} on average and by "
            f"{self.largest:.2g} at most, where 1 is how far {spread}; {self.reason}{'' if self.scores else likeliest}"
        )

    @property
    def named(self) -> str:
        return "scores" if self.scores else "logits"

    @property
    def reason(self) -> str:
        """Where the mean difference comes from, as far as that is known, and how much there may be."""
        if self.unexplained >= self.mean:
            return f"up to {self.tolerance:.2g} on average is allowed"
        rounding = "comes from rounding the weights to the dtypes of the files"
        if self.unexplained == 0:
            return f"all of that {rounding}"
        return f"all but {self.unexplained:.2g} of the average {rounding}, and up to {self.tolerance:.2g} may be left"

    @property
    def figures(self) -> dict[str, float]:
        """What goes into the metrics of a run."""
        return {
            "verify/max_logit_diff": self.largest,
            "verify/mean_logit_diff": self.mean,
            "verify/top1_agreement": self.top1,
        }

    def write(self, folder: Path) -> None:
        """Leave it beside the files that it is about. A number that is not finite is null."""
        plain = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in asdict(self).items()}
        (folder / FILE).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ModelSource:
    """What a model was built of."""

    source: HFCheckpoint
    weights: NoQuantization = PLAIN
    adapter: NoAdapter | LoRAConfig = FULL
    precision: PrecisionConfig = EXACT

    def outline(self, device: torch.device) -> Decoder:
        """The model without a number, not divided over ranks, with products in fp32."""
        with torch.device("meta"):
            net = Decoder(self.source.spec)
        self.weights.apply(net)
        self.adapter.apply(net)
        replace(self.precision, compute_dtype="fp32").apply(net, self.source.dtypes, device)
        return net


def verify_saved(folder: Path, model: Decoder, made: ModelSource, run: DistributedContext) -> VerificationResult:
    """The files of a model or adapter against the live model. All ranks take part, and get the verdict."""
    source, how, device = made.source, replace(made.precision, compute_dtype="fp32"), run.device
    rows = run.shared(partial(probe_prompts, folder, source.spec))
    if (folder / peft_adapter.CONFIG).is_file():  # it was written as it was trained: nothing was rounded
        adapter = replace(peft_adapter.read_adapter_config(folder, source), adapter_path=str(folder))
        found = partial(layerwise_forward.checkpoint_logits, source, adapter, rows, how, device, made.weights)
        wanted, rounded = live(model, made, rows, run), None
    else:
        written = HFCheckpoint.open(folder)
        found = partial(layerwise_forward.checkpoint_logits, written, FrozenModel(), rows, EXACT, device)
        wanted = live(model, made, rows, run)
        rounded = live(model, made, rows, run, partial(layerwise_forward.rounded_logits, dtypes=written.dtypes))

    def judged() -> VerificationResult:
        assert wanted is not None, "the main process has the logits"
        with atomic.wrap_write_errors(folder):
            return kept(folder, compare_logits(FILES, wanted, found(), rounded))

    return run.shared(judged)


def verify_merge(folder: Path, source: HFCheckpoint, adapter: LoRAConfig, device: torch.device) -> VerificationResult:
    """The files of a merged model against its base with the adapter beside it."""
    rows, written = probe_prompts(folder, source.spec), HFCheckpoint.open(folder)
    wanted = layerwise_forward.checkpoint_logits(source, adapter, rows, EXACT, device)
    rounded = layerwise_forward.checkpoint_logits(source, adapter, rows, EXACT, device, written=written.dtypes)
    found = layerwise_forward.checkpoint_logits(written, FrozenModel(), rows, EXACT, device)
    return kept(
        folder, compare_logits("base with adapter and merged files", wanted, found, rounded, HALFWAY, peak=ASTRAY)
    )


def verify_export(
    source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, written: HFCheckpoint, allowed: float, device: torch.device
) -> VerificationResult:
    """Files of another format, opened so that they read as a checkpoint, against the model that they were made of.

    `allowed` is the mean difference that the format makes.
    """
    rows = probe_prompts(source.path, source.spec)
    wanted = layerwise_forward.checkpoint_logits(source, adapter, rows, EXACT, device)
    found = layerwise_forward.checkpoint_logits(written, FrozenModel(), rows, EXACT, device)
    return compare_logits("model and exported files", wanted, found, tolerance=allowed, peak=PEAK * allowed)


def live(
    model: Decoder,
    made: ModelSource,
    rows: Sequence[Sequence[int]],
    run: DistributedContext,
    ask: Ask = layerwise_forward.forward_logits,
) -> LazyLogits | None:
    """Logits of a model in memory, with products in fp32 and nothing compiled, as they are made from files.

    The main process has them where the model is divided.
    """
    if not gathered_logits.is_fully_local(model):
        return gathered_logits.gathered_logits(model, made.outline(run.device), rows, run, ask)
    compute, model.compute = model.compute, torch.float32
    try:
        with torch.compiler.set_stance("force_eager"):
            return ask(model, rows, run.device)
    finally:
        model.compute = compute


class LogitDiff(NamedTuple):
    """Largest and mean difference of logits, and how often the likeliest token is the same; of how many tokens."""

    largest: float
    mean: float
    top1: float
    tokens: int


def compare_logits(
    what: str,
    wanted: LazyLogits,
    found: LazyLogits,
    rounded: LazyLogits | None = None,
    share: float = 0.0,
    tolerance: float = FINEST,
    peak: float = PEAK * FINEST,
) -> VerificationResult:
    """Logits against those that they should be; `rounded` are these with the weights' rounding.

    Of what rounding changes, a `share` may be left.
    """
    whole, rest = distances([wanted, rounded or wanted], found)
    tolerance = max(tolerance, share * whole.mean)
    passed = rest.mean <= tolerance and rest.largest <= peak and whole.mean <= max(ROUNDING, tolerance)
    figures = whole.largest, whole.mean, rest.mean, whole.top1, whole.tokens
    return VerificationResult(what, *figures, tolerance, passed, found.scores)


def distances(wanted: Sequence[LazyLogits], found: LazyLogits) -> list[LogitDiff]:
    """How far some logits are from others, each of them read once."""
    sums = [LogitDiffAccumulator(found.scores) for _ in wanted]
    for part, *others in zip(found.parts(), *(one.parts() for one in wanted), strict=True):
        for one, other in zip(sums, others, strict=True):
            one.add(other.cpu(), part.cpu())
    return [one.distance() for one in sums]


class LogitDiffAccumulator:
    """What is known of two kinds of logits after some of their columns: a number for each token."""

    def __init__(self, scores: bool) -> None:
        self.scores = scores
        self.seen, self.total, self.squares, self.apart = 0, torch.zeros(()), torch.zeros(()), torch.zeros(())
        self.most = torch.zeros(())
        self.likeliest = torch.full((2, 1), -math.inf), torch.zeros((2, 1), dtype=torch.long)

    def add(self, wanted: Tensor, found: Tensor) -> None:
        """The next columns, (tokens, some)."""
        exact, apart = wanted.double(), (wanted - found).abs()
        self.total, self.squares = self.total + exact.sum(-1), self.squares + exact.square().sum(-1)
        self.apart, self.most = self.apart + apart.double().sum(-1), torch.maximum(self.most, apart.amax(-1))
        (most, which), (value, index) = self.likeliest, torch.stack([wanted, found]).max(-1)
        better = value > most
        self.likeliest = torch.where(better, value, most), torch.where(better, index + self.seen, which)
        self.seen += wanted.shape[1]

    def distance(self) -> LogitDiff:
        spread = self.spread().clamp_min(1e-30)  # a NaN stays one, here and in what is made of it
        one, other = self.likeliest[1]
        mean, same = (self.apart / spread).mean() / self.seen, (one == other).float().mean()
        return LogitDiff((self.most / spread).max().item(), mean.item(), same.item(), len(one))

    def spread(self) -> Tensor:
        """One standard deviation of the logits of each token. Scores are few: theirs is that over all tokens."""
        total, squares, count = self.total, self.squares, self.seen
        if self.scores:
            total, squares, count = total.sum(), squares.sum(), count * len(total)
        return ((squares - total.square() / count) / (count - 1)).clamp_min(0).sqrt()


def probe_prompts(folder: Path, spec: DecoderSpec) -> list[list[int]]:
    """Some tens of short rows of tokens: texts, questions as the chat template writes them, and random tokens."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(spec.vocab, (length,), generator=draw).tolist() for length in RANDOM]
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.open(folder)
        rows += tokenizer.encode_texts(TEXTS, special=True)
        with suppress(UserError):  # there is no chat template, or none for a question alone
            rows += [tokenizer.prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    known = ([token for token in row if token < spec.vocab] for row in rows)
    return [row[-min(WIDTH, spec.context) :] for row in known if row]


def kept(folder: Path, found: VerificationResult) -> VerificationResult:
    found.write(folder)
    return found


def read_verification(folder: Path) -> dict[str, Any] | None:
    """What was found about the files of a folder; None if nobody looked."""
    return read_json(folder / FILE) if (folder / FILE).is_file() else None


def raise_if_failed(folder: Path) -> None:
    """UserError if the files of a folder were found not to be what was meant. They stay, to be looked at."""
    told = read_verification(folder)
    if told is not None and told["passed"] is not True:
        known: dict[str, Any] = {key: math.nan if value is None else value for key, value in told.items()}
        found = VerificationResult(**known)
        raise UserError(f"{folder}: {found}; the files stay there, see {FILE}, but `tune push` refuses them")
