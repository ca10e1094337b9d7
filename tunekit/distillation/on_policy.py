"""On-policy distillation (GKD, arXiv:2306.13649): the student generates the answers of some rows during training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tunekit.data.check_target import format_percent
from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.unpack import DocumentSpan, unpack_documents
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.row_stats import iter_blocks
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, check_range
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder
from tunekit.models.weight_init import named_generator


@dataclass(frozen=True)
class OnPolicyConfig:
    """Options of the answers that the student generates. They replace the last answer of a row; plain text has none.

    Samples depend only on the seed, the step and the tokens of the row.
    """

    lmbda: float = 0.0  # Fraction of rows whose answers the student generates (GKD)
    max_new_tokens: int = 256  # Maximum length of an answer in tokens
    temperature: float = 1.0  # Sampling temperature; 0: greedy decoding
    top_k: int | None = None  # Sample from the k most likely tokens; null, 0 or -1: all
    top_p: float = 1.0  # Sample from the most likely tokens with this total probability (nucleus sampling)
    batch_size: int = 16  # Answers that a device generates at once

    def __post_init__(self) -> None:
        check_range(self, "lmbda", ge=0, le=1)
        check_range(self, "batch_size", ge=1)
        SamplingConfig(
            self.temperature, self.top_k, self.top_p, max_new_tokens=self.max_new_tokens
        )  # validates these fields

    def check(self, max_length: int, kd_ratio: float) -> None:
        """Raise FieldError if a row has no space for a prompt and an answer, or if part of the loss is cross-entropy.

        Cross-entropy would train on the student's own answers.
        """
        if self.lmbda and kd_ratio != 1:
            message = (
                "cross-entropy on answers that the student generated is not meaningful. Set loss.kd_ratio=1 "
                "or on_policy.lmbda=0."
            )
            raise FieldError("loss.kd_ratio", message)
        if self.lmbda and self.max_new_tokens >= max_length:
            raise FieldError(
                "on_policy.max_new_tokens",
                f"must be less than data.max_length={max_length:,}, which includes the prompt, got "
                f"{self.max_new_tokens:,}. Lower it, or raise data.max_length.",
            )


def warn_short_room(cfg: OnPolicyConfig, data: DataLoader, dist: DistributedContext) -> None:
    """Log a warning about rows whose prompts leave less than `max_new_tokens` for the answer."""
    if cfg.lmbda == 0:
        return
    max_length = data.mixture.max_length
    blocks = ((dataset, block) for dataset in data.datasets for block in iter_blocks(dataset.bounds))
    available = np.concatenate([max_length - answer_starts(dataset, *block) for dataset, block in blocks])
    has_answer = available < max_length
    short = has_answer & (available < cfg.max_new_tokens)
    if not short.any():
        return
    rows = f"{short.sum():,} of {has_answer.sum():,} rows ({format_percent(float(short.sum() / has_answer.sum()))})"
    dist.log(
        f"doubtful: on_policy: answers of {rows} may be truncated: data.max_length={max_length:,} leaves fewer than "
        f"on_policy.max_new_tokens={cfg.max_new_tokens:,} tokens after their prompts, at least "
        f"{available[short].min():,}. Raise data.max_length."
    )


def answer_starts(documents: TokenizedDataset, start: int, stop: int) -> np.ndarray:
    """Positions of the last answers in documents start to stop, as `answer_start`; 0 without an answer."""
    bounds = np.asarray(documents.bounds[start : stop + 1])
    starts = bounds[:-1] - bounds[0]
    mask, positions = np.asarray(documents.loss_mask[bounds[0] : bounds[-1]]), np.arange(bounds[-1] - bounds[0])
    last = np.maximum.reduceat(np.where(mask, positions, -1), starts)
    document_of = np.repeat(np.arange(len(starts)), np.diff(bounds))
    # The first token of a document is never a target
    is_prompt = ~mask & (positions > starts[document_of]) & (positions < last[document_of])
    prompt_ends = np.maximum.reduceat(np.where(is_prompt, positions + 1, -1), starts)
    return np.where(prompt_ends < 0, 0, prompt_ends - starts)


@dataclass(frozen=True)
class StudentSampler:
    """Replaces answers in the micro-batches of a step by answers that the student generates."""

    cfg: OnPolicyConfig
    layout: Collator
    max_length: int  # the most tokens of a document
    stop_ids: frozenset[int]  # ids that end an answer

    def __call__(self, model: Decoder, batches: list[Batch], dist: DistributedContext) -> list[Batch]:
        """Generate answers for the selected rows of this rank. Collective: all ranks decode each token together."""
        if self.cfg.lmbda == 0:
            return batches
        spans = [list(unpack_documents(batch)) for batch in batches]
        selected = [span for batch_spans in spans for span in batch_spans if self.is_selected(span, dist)]
        generated = self.generate_answers(model, selected, dist)
        answers = {id(span): answer for span, answer in zip(selected, generated, strict=True)}
        pairs = zip(batches, spans, strict=True)
        return [self.replace_answers(batch, batch_spans, answers).to(dist.device) for batch, batch_spans in pairs]

    def is_selected(self, span: DocumentSpan, dist: DistributedContext) -> bool:
        """Whether the student generates the answer of a row in this step."""
        if not 0 < answer_start(span) < self.max_length:
            return False
        generator = named_generator(dist.seed, f"{row_name(span, dist)} share")
        return torch.rand(1, generator=generator).item() < self.cfg.lmbda

    def generate_answers(
        self, model: Decoder, spans: Sequence[DocumentSpan], dist: DistributedContext
    ) -> list[np.ndarray]:
        """Answer of each row, with its stop token. Equal rows have equal answers."""
        cfg, names = self.cfg, [row_name(span, dist) for span in spans]
        sampling = SamplingConfig(
            cfg.temperature, cfg.top_k, cfg.top_p, max_new_tokens=cfg.max_new_tokens, seed=dist.seed
        )
        requests = {
            name: GenerationRequest(name, span.tokens[: answer_start(span)].tolist(), sampling, self.stop_ids)
            for name, span in zip(names, spans, strict=True)
        }
        longest = max((len(request.prompt) for request in requests.values()), default=1)
        engine = GenerationEngine(model, cfg.batch_size, min(self.max_length, longest + cfg.max_new_tokens), dist)
        outputs = engine.generate([*requests.values()])
        return [np.array([output.token for output in outputs[name]], np.int32) for name in names]

    def replace_answers(self, batch: Batch, spans: Sequence[DocumentSpan], answers: dict[int, np.ndarray]) -> Batch:
        """Copy of a batch with the generated answers."""
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
    """Position of the first token of the last answer of a row; 0 if all tokens are targets."""
    ignored = np.flatnonzero(span.targets == IGNORE)
    return int(ignored[-1]) + 2 if len(ignored) else 0


def row_name(span: DocumentSpan, dist: DistributedContext) -> str:
    return f"{dist.step} {span.key}"


def prompt_with_answer(prompt: np.ndarray, answer: np.ndarray) -> Document:
    """Document of a prompt and an answer; the tokens of the answer are targets."""
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    return Document(tokens, np.arange(len(tokens)) >= len(prompt), len(tokens))
