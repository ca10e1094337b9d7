"""Documents that are longer than a row may be: cut at the end, dropped, or gone on with in further rows."""

from collections.abc import Iterator
from typing import Literal

from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.errors import UserError

TooLong = Literal["truncate", "drop", "split"]


def fit_documents(document: Document, length: int, too_long: TooLong, context: int) -> list[Document]:
    """Documents of at most `length` tokens with something to learn in each (a first token is never a target).

    `split` goes on in windows: each learnt token is learnt in exactly one, the first that reaches it, and every later
    window begins `context` tokens before what it learns. Windows are pieces of the text as the template wrote it. To
    begin again at a turn, behind the system message, would be another conversation: templates drop reasoning, number
    calls and refuse roles by what came before, and a turn that is longer than a row has no such beginning.
    """
    if len(document.tokens) <= length or not document.loss_mask[1:].any():
        return [insisted(document, document, length)]
    if too_long == "drop":
        return []
    if too_long == "split":
        return list(windows(document, length, context))
    return [insisted(document.prefix(length), document, length)]


def insisted(short: Document, document: Document, length: int) -> Document:
    """The document, if there is something to learn in it."""
    if short.loss_mask[1:].any():
        return short
    if document.loss_mask[1:].any():
        first = int(document.loss_mask[1:].argmax()) + 2
        raise UserError(
            f"nothing to learn in its first {length:,} tokens: learnt is only from {first:,} "
            f"of {document.full_length:,}; raise `max_length`, say `excess_length_strategy: drop`, or take the row out"
        )
    raise UserError(f"nothing to learn in its {document.full_length:,} tokens; take the row out")


def windows(document: Document, length: int, context: int) -> Iterator[Document]:
    """Windows over a document, from its beginning to the last token that is learnt."""
    targets = document.loss_mask.copy()
    targets[0] = False
    places = targets.nonzero()[0]
    start, done = 0, 0
    while done < len(places):
        end = min(start + length, int(places[-1]) + 1)
        learnt = document.loss_mask[start:end].copy()  # of its first token too, though that is no target
        learnt[1 : max(int(places[done]) - start, 1)] = False
        if learnt[1:].any():
            tokens, signs = document.tokens[start:end], document.doc_flags | DocFlags.SPLIT
            yield document._replace(tokens=tokens, learnt=learnt, whole=end - start, signs=signs)
        done = int(places.searchsorted(end))
        if done < len(places):
            start = int(places[done]) - context
