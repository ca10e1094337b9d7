"""Micro-batches, and the collator that builds those of one rank from the rows of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.data.dataloader.packing import pack_rows
from tunekit.data.dataloader.shared_prefix import locate_prefixes, prefix_lengths, without_prefix
from tunekit.data.document import UNEQUAL_WEIGHTS, DocFlags, Document, first_target
from tunekit.data.preprocess.tokenized_dataset import ConcatDataset, TokenizedDataset
from tunekit.errors import UserError
from tunekit.kernels.sequence_layout import SequenceLayout

IGNORE = -100
# Rows are padded to a multiple of this many tokens: kernels are compiled and tuned for each new shape.
LENGTH_MULTIPLE = 16
CPU_FIELDS = ("cu_seqlens", "shared_prefixes")  # read by the host in each step


@dataclass(frozen=True)
class LossWeights:
    """Weights of the targets of a batch, (B, S) fp32, and the sum of those of target tokens."""

    values: Tensor
    sum: float


@dataclass(frozen=True)
class BatchDocuments:
    """The D documents of a batch of preference or reward data.

    Documents of one dataset row are adjacent: 2i is the chosen and 2i + 1 the rejected answer of a pair.

    - `ids` (B, S): which document each token belongs to, -1 for padding
    - `flags` (D,): bits of `DocFlags`; `indices` (D,): indices in the data loader
    - `labels` (D,) fp32: label or margin of each document, NaN without one
    - `num_targets_with_prompts`: number of `Batch.targets_with_prompts` that are not IGNORE, counted on the host to
      avoid a synchronization
    - `mismatched`: the prompt of each document with the answer of the next row of the step, with the same document ids
    """

    ids: Tensor
    flags: Tensor
    indices: Tensor
    labels: Tensor
    num_targets_with_prompts: int = 0
    mismatched: "Batch | None" = None

    @property
    def is_desirable(self) -> Tensor:
        """Whether each answer is chosen or labeled as desirable, (D,) bool."""
        return (self.flags & DocFlags.DESIRABLE) != 0

    @property
    def margins(self) -> Tensor:
        """Target reward margin of each pair, (pairs,) fp32; 0 for rows without one."""
        return self.labels[::2].nan_to_num()


@dataclass(frozen=True)
class Batch:
    """Micro-batch of B rows of S positions. Tensors are (B, S) int64 unless stated otherwise.

    - `targets`: the next token if it is a target token, else IGNORE; with step labels, the label at the last token of
      each step
    - `positions`: position in the document, from 0
    - `cu_seqlens`: (documents + 1,) int32 on the CPU, bounds of the documents in the B * S flattened tokens; padding
      of a row counts as a document. None: each row is one document with padding at its end
    - `num_target_tokens`: number of targets that are not IGNORE; `num_tokens`: number of tokens without padding
    - `row_lengths` (B,): tokens of each row without padding; None: no row is padded
    - `loss_weights`: None: all are 1
    - `shared_prefixes` (documents, 2), on the CPU, exists if packed documents continue a prefix that is stored in
      another document: the length of the prefix, at which their positions start, and its start in the flattened tokens
    - `document_fields`: of preference and reward data; see `documents`
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None
    num_target_tokens: int
    num_tokens: int
    row_lengths: Tensor | None = None
    loss_weights: LossWeights | None = None
    shared_prefixes: Tensor | None = None
    document_fields: BatchDocuments | None = None

    @property
    def documents(self) -> BatchDocuments:
        """The documents of a batch of preference or reward data."""
        assert self.document_fields is not None, "not a batch of preference or reward data"
        return self.document_fields

    @property
    def loss_denominator(self) -> float:
        """Sum of the weights of the target tokens: their number, unless they have weights."""
        return self.num_target_tokens if self.loss_weights is None else self.loss_weights.sum

    def require_equal_weights(self) -> None:
        """Raise UserError if target tokens have weights."""
        if self.loss_weights is not None:
            raise UserError(UNEQUAL_WEIGHTS)

    @property
    def token_mask(self) -> Tensor:
        """Whether a token is not padding, (B, S) bool."""
        if self.row_lengths is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.row_lengths[:, None]

    @cached_property
    def layout(self) -> SequenceLayout | None:
        """Document bounds and prefixes for the model. Cached: all passes over this batch share derived values."""
        return None if self.cu_seqlens is None else SequenceLayout(self.cu_seqlens, self.shared_prefixes)

    @property
    def targets_with_prompts(self) -> Tensor:
        """Targets (B, S) that include the prompts of desirable documents: all of their tokens except the first."""
        ids, is_desirable = self.documents.ids, self.documents.is_desirable
        next_tokens, next_ids = (F.pad(x[:, 1:], (0, 1), value=IGNORE) for x in (self.tokens, ids))
        # The id of padding, -1, selects the appended zero.
        includes_prompt = torch.cat([is_desirable, is_desirable.new_zeros(1)])[ids]
        return torch.where((next_ids == ids) & includes_prompt, next_tokens, self.targets)

    def to(self, device: torch.device | str) -> "Batch":
        """Copy of the batch on a device."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Copy of the batch in pinned memory, from which a GPU can copy while it computes."""
        return map_tensors(self, Tensor.pin_memory)


BatchPart = TypeVar("BatchPart", bound=Batch | BatchDocuments | LossWeights)


def map_tensors(part: BatchPart, fn: Callable[[Tensor], Tensor]) -> BatchPart:
    """Copy of a batch, or of a part of it, with `fn` applied to its tensors, except those that stay on the CPU."""
    changes: dict[str, Any] = {}
    for name in (field.name for field in fields(part) if field.name not in CPU_FIELDS):
        value = getattr(part, name)
        if isinstance(value, Tensor):
            changes[name] = fn(value)
        elif isinstance(value, Batch | BatchDocuments | LossWeights):
            changes[name] = map_tensors(value, fn)
    return replace(part, **changes)


class RowPlan(NamedTuple):
    """Indices of the documents of a row, and of the documents whose answers follow their prompts in mismatched rows."""

    documents: np.ndarray
    mismatched: np.ndarray | None = None


@dataclass(frozen=True)
class Collator:
    """Splits the `global_batch_size` rows of a step over `dp_size` ranks and into padded micro-batches.

    - `capacity`: tokens of a packed row; None: no packing, each document is padded to the longest of its micro-batch
    - `docs_per_row`: documents that count as one dataset row, 2 for pairs
    - `with_document_ids`: add the fields of preference and reward data to batches
    - `max_mismatched_length`: maximum tokens of a mismatched answer; 0: batches have none
    - `share_prefixes`: store the common prefix of the documents of a packed dataset row only once
    """

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    pad_id: int
    capacity: int | None
    docs_per_row: int = 1
    with_document_ids: bool = False
    max_mismatched_length: int = 0
    share_prefixes: bool = False

    def micro_batches(
        self, documents: TokenizedDataset | ConcatDataset, rows: Sequence[np.ndarray], first: int = 0
    ) -> list[Batch]:
        """Micro-batches of this rank. All ranks have the same number, so that all take part in all collectives.

        `rows` are the document indices of each row of the step. `first` is added to the indices that batches report.
        """
        lengths = [documents.lengths[row] for row in rows]
        row_sizes = [int(length.sum() if self.capacity else length.max()) for length in lengths]
        # Longest first: rows of similar length share a micro-batch, and a step that does not fit in memory fails early.
        order = sorted(range(len(rows)), key=row_sizes.__getitem__, reverse=True)
        plans = self.plan_rows(rows)
        local = [plans[row] for row in order[self.dp_rank :: self.dp_size]]
        groups = [local[start : start + self.micro_batch_size] for start in range(0, len(local), self.micro_batch_size)]
        batches = [self.make_batch(documents, group, first) for group in groups]
        num_missing = -(-len(rows[:: self.dp_size]) // self.micro_batch_size) - len(groups)
        if not num_missing:
            return batches
        # A rank with fewer rows adds empty batches: the shortest row of the step without targets.
        return batches + [empty_batch(self.make_batch(documents, [plans[order[-1]]], first))] * num_missing

    def plan_rows(self, rows: Sequence[np.ndarray]) -> list[RowPlan]:
        """Rows of a step, with the documents of the next row for mismatched answers (same side of a pair)."""
        if not self.max_mismatched_length:
            return [RowPlan(row) for row in rows]
        mismatched = np.roll(np.concatenate(rows), -self.docs_per_row)
        return list(map(RowPlan, rows, np.split(mismatched, np.cumsum([len(row) for row in rows])[:-1])))

    def make_batch(self, documents: TokenizedDataset | ConcatDataset, plans: Sequence[RowPlan], first: int) -> Batch:
        """Build one micro-batch of planned rows."""
        rows = [[documents[int(i)] for i in plan.documents] for plan in plans]
        if not self.capacity:
            rows = [[document] for row in rows for document in row]
        batch, collated = self.collate_rows(rows)
        if not self.with_document_ids:
            return batch
        row_documents = [document for row in rows for document in row]
        indices = np.concatenate([plan.documents for plan in plans])
        ids = np.split(np.arange(len(row_documents)), np.cumsum([len(row) for row in rows])[:-1])
        batch_documents = BatchDocuments(
            document_ids(collated, ids, batch.tokens.shape[1]),
            flags=torch.tensor([int(document.doc_flags) for document in row_documents]),
            indices=torch.from_numpy(indices + first),
            labels=torch.tensor([document.value for document in row_documents], dtype=torch.float32),
        )
        targets = replace(batch, document_fields=batch_documents).targets_with_prompts
        batch_documents = replace(batch_documents, num_targets_with_prompts=int((targets != IGNORE).sum()))
        if self.max_mismatched_length:
            answers = [documents[int(i)] for plan in plans if plan.mismatched is not None for i in plan.mismatched]
            mismatched = list(map(self.make_mismatched, row_documents, answers))
            batch_documents = replace(batch_documents, mismatched=self.collate_mismatched(mismatched, batch_documents))
        return replace(batch, document_fields=batch_documents)

    def make_mismatched(self, prompt: Document, answer: Document) -> Document:
        """Prompt of one document, up to its first target, followed by the answer of another document."""
        prompt_length, answer_start = first_target(prompt), first_target(answer)
        end = self.max_mismatched_length
        tokens = np.concatenate((prompt.tokens[:prompt_length], answer.tokens[answer_start:]))[:end]
        loss_mask = np.concatenate((np.zeros(prompt_length, bool), answer.loss_mask[answer_start:]))[:end]
        return Document(tokens, loss_mask, len(tokens), prompt.doc_flags)

    def collate_mismatched(self, documents: list[Document], originals: BatchDocuments) -> Batch:
        """Batch of mismatched answers. Their lengths differ from the originals, so packed rows are planned again."""
        lengths = np.array([len(document.tokens) for document in documents])
        plan = pack_rows(lengths, self.capacity) if self.capacity else None
        indices = list(np.arange(len(documents))[:, None]) if plan is None else plan.rows(0, len(plan))
        rows = [[documents[i] for i in row] for row in indices]
        mismatched = self.collate(rows)
        ids = document_ids(rows, indices, mismatched.tokens.shape[1])
        return replace(mismatched, document_fields=replace(originals, ids=ids, num_targets_with_prompts=0))

    def collate_rows(self, rows: Sequence[Sequence[Document]]) -> tuple[Batch, Sequence[Sequence[Document]]]:
        """Batch of rows of documents, and the documents as stored in it: without prefixes that another one stores."""
        if not self.share_prefixes:
            return self.collate(rows), rows
        lengths = [prefix_lengths(row, self.docs_per_row) for row in rows]
        suffixes = [list(map(without_prefix, row, counts)) for row, counts in zip(rows, lengths, strict=True)]
        batch = self.collate(suffixes)
        prefixes = locate_prefixes(suffixes, lengths, self.docs_per_row, batch.tokens.shape[1])
        if prefixes is None or batch.cu_seqlens is None:
            return batch, rows
        offsets = prefixes[:, 0].long().repeat_interleave(batch.cu_seqlens.diff().long()).view_as(batch.positions)
        return replace(batch, positions=batch.positions + offsets, shared_prefixes=prefixes), suffixes

    def collate(self, rows: Sequence[Sequence[Document]]) -> Batch:
        """Batch of rows of concatenated documents, padded at the end of each row."""
        sizes = [sum(len(document.tokens) for document in row) for row in rows]
        longest = max(sizes)
        padded = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        width = max(longest, min(padded, self.capacity or longest + LENGTH_MULTIPLE))
        tokens = np.full(len(rows) * width, self.pad_id, np.int64)
        targets, weights = np.full_like(tokens, IGNORE), np.ones(len(tokens), np.float32)
        is_weighted = any(document.doc_flags & DocFlags.WEIGHTED for row in rows for document in row)
        bounds = [0]
        for num_rows, row in enumerate(rows, 1):
            for document in row:
                start, end = bounds[-1], bounds[-1] + len(document.tokens)
                tokens[start:end] = document.tokens
                if document.doc_flags & DocFlags.STEPWISE:
                    targets[start:end][document.loss_mask] = document.values
                else:
                    targets[start : end - 1] = np.where(document.loss_mask[1:], document.tokens[1:], IGNORE)
                if document.doc_flags & DocFlags.WEIGHTED:
                    weights[start:end][document.loss_mask] = document.values
                bounds.append(end)
            if self.capacity and bounds[-1] < num_rows * width:
                bounds.append(num_rows * width)  # the padding of a packed row is a document
            bounds[-1] = num_rows * width
        positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], np.diff(bounds))
        weights = np.roll(weights, -1)  # targets are the next tokens
        total = float(weights[targets != IGNORE].sum(dtype=np.float64))
        return Batch(
            *(torch.from_numpy(flat).view(len(rows), width) for flat in (tokens, targets, positions)),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if self.capacity else None,
            num_target_tokens=int((targets != IGNORE).sum()),
            num_tokens=sum(sizes),
            row_lengths=torch.tensor(sizes),
            loss_weights=LossWeights(torch.from_numpy(weights).view(len(rows), width), total) if is_weighted else None,
        )


def document_ids(rows: Sequence[Sequence[Document]], row_ids: Sequence[np.ndarray], width: int) -> Tensor:
    """Document id of each token, (B, width); -1 for padding. `row_ids` are the ids of the documents of each row."""
    ids = np.full((len(rows), width), -1)
    for id_row, row, documents in zip(ids, rows, row_ids, strict=True):
        sizes = [len(document.tokens) for document in row]
        id_row[: sum(sizes)] = np.repeat(documents, sizes)
    return torch.from_numpy(ids)


def empty_batch(batch: Batch) -> Batch:
    """Same batch without targets, whose tokens belong to no document."""
    documents = batch.document_fields
    return replace(
        batch,
        targets=torch.full_like(batch.targets, IGNORE),
        num_target_tokens=0,
        num_tokens=0,
        row_lengths=None if batch.row_lengths is None else torch.zeros_like(batch.row_lengths),
        loss_weights=None if batch.loss_weights is None else replace(batch.loss_weights, sum=0.0),
        document_fields=None if documents is None else without_documents(documents),
    )


def without_documents(documents: BatchDocuments) -> BatchDocuments:
    """The fields of an empty batch: no token belongs to a document."""
    mismatched = None if documents.mismatched is None else empty_batch(documents.mismatched)
    lists = documents.flags[:0], documents.indices[:0], documents.labels[:0]
    return BatchDocuments(torch.full_like(documents.ids, -1), *lists, mismatched=mismatched)
