"""One micro-batch, and how the rows of a step become those of a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.data.dataloader.mixture import ConcatDataset
from tunekit.data.dataloader.packing import pack_rows
from tunekit.data.dataloader.shared_prefix import SharedPrefixRows
from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset, first_target
from tunekit.kernels.sequence_layout import SequenceLayout

IGNORE = -100
# Rows are padded to a multiple of this many tokens: kernels are made and tuned anew for every other shape.
LENGTH_MULTIPLE = 16
TENSOR_FIELDS = ("tokens", "targets", "positions", "owner", "signs", "numbers", "values")


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens; tensors but `offsets` are (B, S) int64. `targets`: the next token if learnt, else IGNORE.

    Of steps that are judged, they are the label at the last token of each. `positions` count from 0 in each document.
    `offsets` (documents + 1,), int32 on the CPU, bounds the documents in the flattened B·S tokens (what pads a row is a
    document too); None: each row is one document with padding at its end. `learnt` counts the targets that are not
    IGNORE, `real` the tokens that are not padding.

    Where documents are judged or compared, `owner` says of which of the D documents each token is, -1 of padding. The
    documents of a row follow each other: of pairs, 2i is chosen and 2i + 1 rejected. `signs` and `numbers` (D,) are
    their `Sign` bits and which of the loader's they are, `values` (D,) fp32 what rows say of them, NaN if nothing.
    `others` has a mismatched answer for each, if the loader makes them: its prompt with the answer of the step's next
    row, under the same owner.

    `num_full_targets` counts the targets of losses that are about prompts too: where an answer is good, all tokens of
    its document but the first. The host knows it, so that nothing waits for a device to count them.

    `prefixes` (documents, 2), on the CPU, is there where packed documents go on from the first tokens of others: how
    many these are, at which positions then begin, and where they are in the flattened rows. They are the others' own.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None
    num_target_tokens: int
    num_tokens: int
    document_ids: Tensor | None = None
    doc_flags: Tensor | None = None
    document_indices: Tensor | None = None
    labels: Tensor | None = None
    mismatched: "Batch | None" = None
    shared_prefixes: Tensor | None = None
    num_full_targets: int | None = None

    @cached_property
    def layout(self) -> SequenceLayout | None:
        """Bounds and prefixes as a model takes them; what is derived of them is shared by all passes of this batch."""
        return None if self.cu_seqlens is None else SequenceLayout(self.cu_seqlens, self.shared_prefixes)

    @property
    def margins(self) -> Tensor:
        """By how much each pair's chosen answer is to be the better one (pairs,), fp32; 0 where rows do not say."""
        assert self.labels is not None
        return self.labels[::2].nan_to_num()

    @property
    def full_targets(self) -> Tensor:
        """Targets (B, S) of all tokens of good documents but the first of each, and of the others as ever."""
        assert self.document_ids is not None and self.doc_flags is not None, "rows of documents that are compared"
        good = (self.doc_flags & DocFlags.DESIRABLE) != 0
        tokens, behind = (F.pad(x[:, 1:], (0, 1), value=IGNORE) for x in (self.tokens, self.document_ids))
        chosen = torch.cat([good, good.new_zeros(1)])[self.document_ids]  # padding, -1, finds the last
        return torch.where((behind == self.document_ids) & chosen, tokens, self.targets)

    def to(self, device: torch.device | str) -> "Batch":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """In memory from which a GPU can copy while it computes."""
        return self.map_tensors(Tensor.pin_memory)

    def map_tensors(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        there = {name: move(value) for name in TENSOR_FIELDS if (value := vars(self)[name]) is not None}
        return replace(self, **there, others=None if self.mismatched is None else self.mismatched.map_tensors(move))


class RowPlan(NamedTuple):
    """Numbers of the documents of a row, and of those whose answers are put behind their prompts, if any are."""

    documents: np.ndarray
    mismatched: np.ndarray | None = None


@dataclass(frozen=True)
class Collator:
    """How the `batch` rows of a step lie: on which of `size` ranks, `micro_batch` rows at once, filled with `pad`.

    `capacity` is the tokens of a packed row; None: each document is a row of its own, and `each` of them that belong
    together are counted as one. `owned`: batches tell documents apart. `crossed` is the most tokens of a mismatched
    answer; 0: none are made. `shared`: tokens with which such documents of a packed row begin alike are written once.
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
        """The micro-batches of this rank. Every rank has equally many, so that all take part in all exchanges.

        The number of a document is `first` and its index.
        """
        sizes = [documents.lengths[row] for row in rows]
        tokens = [int(size.sum() if self.capacity else size.max()) for size in sizes]
        # Longest first: rows of like length share a micro-batch, and a step that does not fit in memory fails at once.
        order = sorted(range(len(rows)), key=tokens.__getitem__, reverse=True)
        told = self.plan_rows(rows)
        mine = [told[row] for row in order[self.dp_rank :: self.dp_size]]
        parts = [mine[start : start + self.micro_batch_size] for start in range(0, len(mine), self.micro_batch_size)]
        made = [self.make_batch(documents, part, first) for part in parts]
        missing = -(-len(rows[:: self.dp_size]) // self.micro_batch_size) - len(parts)
        if not missing:
            return made
        # A rank with fewer rows goes through the motions with the others, on a row of which it learns nothing.
        return made + [empty_batch(self.make_batch(documents, [told[order[-1]]], first))] * missing

    def plan_rows(self, rows: Sequence[np.ndarray]) -> list[RowPlan]:
        """Rows of a step, each with the answers of the next one: of a pair's documents, the same side's."""
        if not self.max_mismatched_length:
            return [RowPlan(row) for row in rows]
        nexts = np.roll(np.concatenate(rows), -self.docs_per_row)
        return list(map(RowPlan, rows, np.split(nexts, np.cumsum([len(row) for row in rows])[:-1])))

    def make_batch(self, documents: TokenizedDataset | ConcatDataset, rows: Sequence[RowPlan], first: int) -> Batch:
        """The micro-batch of some rows."""
        lines = [[documents[int(i)] for i in row.documents] for row in rows]
        if not self.capacity:
            lines = [[document] for line in lines for document in line]
        batch, written = self.collate_rows(lines)
        if not self.with_document_ids:
            return batch
        all_of = [document for line in lines for document in line]
        numbers = np.concatenate([row.documents for row in rows])
        signs = torch.tensor([int(document.doc_flags) for document in all_of])
        values = torch.tensor([document.value for document in all_of], dtype=torch.float32)
        counted = np.split(np.arange(len(all_of)), np.cumsum([len(line) for line in lines])[:-1])
        batch = replace(batch, owner=document_ids(written, counted, batch.tokens.shape[1]), signs=signs)
        batch = replace(batch, numbers=torch.from_numpy(numbers + first), values=values)
        batch = replace(batch, num_full_targets=int((batch.full_targets != IGNORE).sum()))
        if not self.max_mismatched_length:
            return batch
        nexts = [documents[int(i)] for row in rows if row.mismatched is not None for i in row.mismatched]
        return replace(batch, others=self.collate_mismatched(list(map(self.make_mismatched, all_of, nexts)), batch))

    def make_mismatched(self, asked: Document, answered: Document) -> Document:
        """The prompt of one document, up to its first learnt token, with what another has from there on."""
        before, behind = first_target(asked), first_target(answered)
        tokens = np.concatenate((asked.tokens[:before], answered.tokens[behind:]))[: self.max_mismatched_length]
        learnt = np.concatenate((np.zeros(before, bool), answered.loss_mask[behind:]))[: self.max_mismatched_length]
        return Document(tokens, learnt, len(tokens), asked.doc_flags)

    def collate_mismatched(self, documents: list[Document], batch: Batch) -> Batch:
        """Mismatched answers as a batch of their own: of other lengths, so where rows are packed, in rows of others."""
        lengths = np.array([len(document.tokens) for document in documents])
        plan = pack_rows(lengths, self.capacity) if self.capacity else None
        places = list(np.arange(len(documents))[:, None]) if plan is None else plan.rows(0, len(plan))
        lines = [[documents[i] for i in place] for place in places]
        made = self.collate(lines)
        whose = document_ids(lines, places, made.tokens.shape[1])
        return replace(made, owner=whose, signs=batch.doc_flags, numbers=batch.document_indices, values=batch.labels)

    def collate_rows(self, rows: Sequence[Sequence[Document]]) -> tuple[Batch, Sequence[Sequence[Document]]]:
        """Rows of documents, and what of these is written."""
        if not self.share_prefixes:
            return self.collate(rows), rows
        found = SharedPrefixRows.of(rows, self.docs_per_row)
        batch = self.collate(found.rows)
        prefixes = found.prefixes(batch.tokens.shape[1])
        if prefixes is None or batch.cu_seqlens is None:
            return batch, rows
        before = prefixes[:, 0].long().repeat_interleave(batch.cu_seqlens.diff().long()).view_as(batch.positions)
        return replace(batch, positions=batch.positions + before, prefixes=prefixes), found.rows

    def collate(self, rows: Sequence[Sequence[Document]]) -> Batch:
        """Rows of documents side by side, each filled up at its end."""
        sizes = [sum(len(document.tokens) for document in row) for row in rows]
        longest = max(sizes)
        width = max(
            longest, min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.capacity or longest + LENGTH_MULTIPLE)
        )
        tokens = np.full(len(rows) * width, self.pad_id, np.int64)
        targets = np.full_like(tokens, IGNORE)
        bounds = [0]
        for end_of_row, row in enumerate(rows, 1):
            for document in row:
                start, end = bounds[-1], bounds[-1] + len(document.tokens)
                tokens[start:end] = document.tokens
                if document.doc_flags & DocFlags.STEPWISE:
                    targets[start:end][document.loss_mask] = document.values
                else:
                    targets[start : end - 1] = np.where(document.loss_mask[1:], document.tokens[1:], IGNORE)
                bounds.append(end)
            if self.capacity and bounds[-1] < end_of_row * width:
                bounds.append(end_of_row * width)  # what pads a packed row is a document of its own
            bounds[-1] = end_of_row * width
        positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], np.diff(bounds))
        return Batch(
            *(torch.from_numpy(flat).view(len(rows), width) for flat in (tokens, targets, positions)),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if self.capacity else None,
            num_target_tokens=int((targets != IGNORE).sum()),
            num_tokens=sum(sizes),
        )


def document_ids(rows: Sequence[Sequence[Document]], places: Sequence[np.ndarray], width: int) -> Tensor:
    """Which document each token (rows, width) is of, where those of the rows are called `places`; -1 for padding."""
    found = np.full((len(rows), width), -1)
    for line, row, named in zip(found, rows, places, strict=True):
        sizes = [len(document.tokens) for document in row]
        line[: sum(sizes)] = np.repeat(named, sizes)
    return torch.from_numpy(found)


def empty_batch(batch: Batch) -> Batch:
    """The same of which nothing is learnt, and no token is anybody's."""
    full = None if batch.num_full_targets is None else 0
    found = replace(batch, targets=torch.full_like(batch.targets, IGNORE), learnt=0, real=0, num_full_targets=full)
    if batch.document_ids is None or batch.doc_flags is None or batch.document_indices is None or batch.labels is None:
        return found
    others = None if batch.mismatched is None else empty_batch(batch.mismatched)
    none = torch.full_like(batch.document_ids, -1)
    signs, numbers, values = batch.doc_flags[:0], batch.document_indices[:0], batch.labels[:0]
    return replace(found, owner=none, signs=signs, numbers=numbers, values=values, others=others)
