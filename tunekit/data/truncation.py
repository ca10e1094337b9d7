"""Documents longer than a row: truncate, drop, or split them into several rows."""

from collections.abc import Iterator
from typing import Literal

from tunekit.data.document import DocFlags, Document
from tunekit.errors import UserError

TooLong = Literal["truncate", "drop", "split"]


def fit_documents(document: Document, max_length: int, strategy: TooLong, context: int) -> list[Document]:
    """Documents of at most `max_length` tokens, each with target tokens. The first token is never a target.

    `split` uses overlapping windows: each target token is a target in exactly one window, the first that contains it,
    and each later window starts `context` tokens before its first target. Windows are slices of the rendered text. They
    do not start at a turn, after the system message, because that would be another conversation: templates drop
    reasoning, number calls, and reject roles depending on earlier turns, and a turn may be longer than a row.
    """
    if len(document.tokens) <= max_length or not document.loss_mask[1:].any():
        return [require_targets(document, document, max_length)]
    if strategy == "drop":
        return []
    if strategy == "split":
        return list(split_windows(document, max_length, context))
    return [require_targets(document.prefix(max_length), document, max_length)]


def require_targets(truncated: Document, document: Document, max_length: int) -> Document:
    """Return the truncated document. Raise UserError if it has no target tokens."""
    if truncated.loss_mask[1:].any():
        return truncated
    if document.loss_mask[1:].any():
        first = int(document.loss_mask[1:].argmax()) + 2
        raise UserError(
            f"no target tokens in the first {max_length:,} of {document.full_length:,} tokens: the first target token "
            f"is token {first:,}. Raise `max_length`, set `excess_length_strategy: drop`, or remove the row"
        )
    raise UserError(f"none of the {document.full_length:,} tokens is a target token. Remove the row")


def split_windows(document: Document, max_length: int, context: int) -> Iterator[Document]:
    """Windows of a document, from its start to its last target token."""
    is_target = document.loss_mask.copy()
    is_target[0] = False
    targets, nth = is_target.nonzero()[0], document.loss_mask.cumsum() - 1
    start, num_done = 0, 0
    while num_done < len(targets):
        end = min(start + max_length, int(targets[-1]) + 1)
        loss_mask = document.loss_mask[start:end].copy()  # keeps the mask of the first token, which is no target here
        loss_mask[1 : max(int(targets[num_done]) - start, 1)] = False
        if loss_mask[1:].any():
            yield document._replace(
                tokens=document.tokens[start:end],
                loss_mask=loss_mask,
                values=document.values[nth[start:end][loss_mask]] if document.has_target_values else document.values,
                full_length=end - start,
                doc_flags=document.doc_flags | DocFlags.SPLIT,
            )
        num_done = int(targets.searchsorted(end))
        if num_done < len(targets):
            start = int(targets[num_done]) - context
