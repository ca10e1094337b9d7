"""Rows whose answers the student writes itself while it learns, for a teacher to mark (arXiv:2306.13649)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.dataloader.unpack import DocumentSpan, unpack_documents
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.row_checks import format_percent
from tunekit.data.row_stats import iter_blocks
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.generation.generate import SamplingConfig, generate_tokens
from tunekit.models.decoder import Decoder
from tunekit.models.weight_init import named_generator


@dataclass(frozen=True)
class OnPolicyConfig:
    """Which rows are answered anew in each step, and how. A row's last answer is replaced; plain text has none.

    What a row draws depends on the seed, the step and its tokens alone.
    """

    lmbda: float = 0.0  # Fraction of rows whose answers the student generates (GKD)
    max_new_tokens: int = 256  # longest answer
    temperature: float = 1.0
    top_k: int | None = None  # draw from the likeliest k only
    top_p: float = 1.0  # of these, draw from the likeliest that have this share of the probability
    batch_size: int = 16  # answers that a device writes at once

    def __post_init__(self) -> None:
        if not 0 <= self.lmbda <= 1:
            raise FieldError("lmbda", f"a share of the rows from 0 to 1, not {self.lmbda}")
        if self.batch_size < 1:
            raise FieldError("batch_size", f"must be 1 or more, not {self.batch_size}")
        SamplingConfig(self.temperature, self.top_k, self.top_p, self.max_new_tokens)  # says what is wrong with these

    def check(self, length: int, kd_ratio: float) -> None:
        """FieldError where no row of so many tokens could hold a prompt and an answer, or where part of the loss is
        cross-entropy on the data: it would train on the student's own answers."""
        if self.lmbda and kd_ratio != 1:
            told = (
                "cross-entropy on answers that the student generated is not meaningful. Set loss.kd_ratio=1 "
                "or on_policy.lmbda=0"
            )
            raise FieldError("loss.kd_ratio", told)
        if self.lmbda and self.max_new_tokens >= length:
            told = (
                f"answers of {self.max_new_tokens:,} tokens leave no room for a prompt in rows of "
                f"data.max_length={length:,}"
            )
            raise FieldError("on_policy.max_new_tokens", f"{told}: lower it, or raise data.max_length")

    def sampling(self, run: DistributedContext, names: Sequence[str]) -> SamplingConfig:
        return NamedRowSampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens, run.seed, tuple(names))


def warn_short_room(cfg: OnPolicyConfig, datasets: Sequence[TokenizedDataset], length: int) -> str | None:
    """What to tell where prompts leave less room than an answer may want: it then ends where the row is full."""
    if cfg.lmbda == 0:
        return None
    rooms = np.concatenate(
        [length - answer_starts(part, *place) for part in datasets for place in iter_blocks(part.bounds)]
    )
    asked = rooms < length
    short = asked & (rooms < cfg.max_new_tokens)
    if not short.any():
        return None
    rows = f"{short.sum():,} of {asked.sum():,} rows ({format_percent(float(short.sum() / asked.sum()))})"
    return (
        f"doubtful: on_policy: {rows} have no room for answers of "
        f"on_policy.max_new_tokens={cfg.max_new_tokens:,} behind their prompt "
        f"in data.max_length={length:,}, the fullest for {rooms[short].min():,}: answers are cut there; raise "
        "data.max_length"
    )


def answer_starts(documents: TokenizedDataset, first: int, behind: int) -> np.ndarray:
    """Where the last answer of each of some documents begins, as `begin` says of one; 0 where none is asked for."""
    bounds = np.asarray(documents.bounds[first : behind + 1])
    starts = bounds[:-1] - bounds[0]
    learnt, places = np.asarray(documents.learnt[bounds[0] : bounds[-1]]), np.arange(bounds[-1] - bounds[0])
    last = np.maximum.reduceat(np.where(learnt, places, -1), starts)
    of = np.repeat(np.arange(len(starts)), np.diff(bounds))
    prompt = ~learnt & (places > starts[of]) & (places < last[of])  # a first token is no target
    found = np.maximum.reduceat(np.where(prompt, places + 1, -1), starts)
    return np.where(found < 0, 0, found - starts)


@dataclass(frozen=True)
class NamedRowSampling(SamplingConfig):
    """What a row draws depends on its name."""

    names: tuple[str, ...] = ()

    def numbers(self, rows: int, first: int = 0) -> Tensor:
        names = (*self.names, *[""] * (rows - len(self.names)))
        return torch.stack(
            [torch.rand(self.max_new_tokens, generator=named_generator(self.seed, name)) for name in names]
        )


@dataclass(frozen=True)
class StudentSampler:
    """Puts answers of the student into the micro-batches of a step, in rows of the same layout."""

    cfg: OnPolicyConfig
    layout: Collator
    max_length: int  # the most tokens of a document
    stop_ids: frozenset[int]  # ids that end an answer

    def __call__(self, model: Decoder, batches: list[Batch], run: DistributedContext) -> list[Batch]:
        """All ranks take part: each answers some of its own rows, a token at a time together."""
        if self.cfg.lmbda == 0:
            return batches
        spans = [list(unpack_documents(batch)) for batch in batches]
        asked = [span for some in spans for span in some if self.is_selected(span, run)]
        training = model.training
        found = self.generate_answers(model, asked, run)
        model.train(training)
        answers = {id(span): answer for span, answer in zip(asked, found, strict=True)}
        return [
            self.replace_answers(batch, some, answers).to(run.device)
            for batch, some in zip(batches, spans, strict=True)
        ]

    def is_selected(self, span: DocumentSpan, run: DistributedContext) -> bool:
        """Whether a row is answered anew in this step."""
        if not 0 < answer_start(span) < self.max_length:
            return False
        return (
            torch.rand(1, generator=named_generator(run.seed, f"{row_name(span, run)} share")).item() < self.cfg.lmbda
        )

    def generate_answers(
        self, model: Decoder, asked: Sequence[DocumentSpan], run: DistributedContext
    ) -> list[np.ndarray]:
        """The answer of each row, with the token that ended it."""
        at_once, found = self.cfg.batch_size, []
        (most,) = run.max_over_ranks(len(asked))
        for first in range(0, int(most), at_once):
            some = asked[first : first + at_once]
            prompts = [span.tokens[: answer_start(span)].tolist() for span in some]
            found += self.generate_batch(model, prompts, [row_name(span, run) for span in some], run)
        return found

    def generate_batch(
        self, model: Decoder, prompts: list[list[int]], names: Sequence[str], run: DistributedContext
    ) -> list[np.ndarray]:
        """Where weights are divided, who has no row or has ended goes on until all have."""
        answers: list[list[int]] = [[] for _ in prompts]
        finished: set[int] = set()
        sampling = self.cfg.sampling(run, names)
        for tokens in generate_tokens(model, prompts or [[self.layout.pad_id]], sampling, finished=finished):
            for row in set(range(len(prompts))) - finished:
                answers[row].append(tokens[row])
                if tokens[row] in self.stop_ids or len(prompts[row]) + len(answers[row]) == self.max_length:
                    finished.add(row)
            if not run.max_over_ranks(len(prompts) - len(finished))[0]:
                break
        return [np.array(answer, np.int32) for answer in answers]

    def replace_answers(self, batch: Batch, spans: Sequence[DocumentSpan], answers: dict[int, np.ndarray]) -> Batch:
        """The same rows, with the answers in them."""
        if not any(id(span) in answers for span in spans):
            return batch
        rows: list[list[Document]] = [[] for _ in range(len(batch.tokens))]
        for span in spans:
            answer = answers.get(id(span))
            rows[span.row].append(
                span.document if answer is None else prompt_with_answer(span.tokens[: answer_start(span)], answer)
            )
        return self.layout.collate(rows)


def answer_start(span: DocumentSpan) -> int:
    """Where the last answer of a row begins: how many tokens come before it."""
    unlearnt = np.flatnonzero(span.targets == IGNORE)
    return int(unlearnt[-1]) + 2 if len(unlearnt) else 0


def row_name(span: DocumentSpan, run: DistributedContext) -> str:
    return f"{run.step} {span.key}"


def prompt_with_answer(prompt: np.ndarray, answer: np.ndarray) -> Document:
    """A prompt and its answer, which is learnt."""
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    return Document(tokens, np.arange(len(tokens)) >= len(prompt), len(tokens))
