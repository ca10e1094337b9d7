"""Long documents are truncated, dropped, or split so that every target token is trained on exactly once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit.data.document import DocFlags, Document
from tunekit.data.truncation import fit_documents
from tunekit.errors import UserError


def make_document(pattern: str) -> Document:
    """Build a document of tokens 100, 101, ...; `x` in `pattern` is a target."""
    mask = np.array([letter == "x" for letter in pattern], bool)
    return Document(np.arange(100, 100 + len(mask), dtype=np.int32), mask, len(mask), DocFlags.MISSING_END_TOKEN)


def windows_of(parts: list[Document]) -> list[tuple[int, str]]:
    return [(int(part.tokens[0]) - 100, "".join(".x"[bit] for bit in part.loss_mask.astype(int))) for part in parts]


def test_short_document_is_unchanged() -> None:
    for strategy in ("truncate", "drop", "split"):
        document = make_document("..xx")
        assert fit_documents(document, 4, strategy, 2) == [document]


def test_truncation_keeps_start_and_full_length() -> None:
    (truncated,) = fit_documents(make_document("..xx..xx"), 5, "truncate", 2)
    assert windows_of([truncated]) == [(0, "..xx.")]
    assert (truncated.full_length, truncated.doc_flags) == (8, DocFlags.MISSING_END_TOKEN)


def test_drop_removes_the_document() -> None:
    assert fit_documents(make_document("..xx..xx"), 5, "drop", 2) == []
    with pytest.raises(UserError, match="3 tokens"):
        fit_documents(make_document("x.."), 2, "drop", 1)


def test_windows_overlap_by_their_context() -> None:
    assert windows_of(fit_documents(make_document("..xx..xx"), 6, "split", 3)) == [(0, "..xx.."), (3, "x..xx")]
    assert windows_of(fit_documents(make_document("..xxxxxx"), 4, "split", 2)) == [
        (0, "..xx"),
        (2, "x.xx"),
        (4, "x.xx"),
    ]
    assert windows_of(fit_documents(make_document("......xx...."), 4, "split", 2)) == [(4, "..xx")]
    assert windows_of(fit_documents(make_document("xxxxxxx"), 3, "split", 1)) == [(0, "xxx"), (2, "xxx"), (4, "xxx")]
    assert all(part.full_length == len(part.tokens) for part in fit_documents(make_document("..xxxxxx"), 4, "split", 2))


@pytest.mark.parametrize("pattern", ["....", "x...", ""])
def test_document_without_targets_is_an_error(pattern: str) -> None:
    for strategy in ("truncate", "split"):
        with pytest.raises(UserError, match=f"{len(pattern)} tokens"):
            fit_documents(make_document(pattern), 3, strategy, 1)


def test_truncation_that_drops_all_targets_is_an_error() -> None:
    with pytest.raises(UserError, match="3 of 6 tokens.* 5"):
        fit_documents(make_document("....xx"), 3, "truncate", 1)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(2, 12), st.data())
def test_split_trains_on_each_target_once_with_context(mask: list[bool], length: int, data) -> None:
    context = data.draw(st.integers(1, length - 1))
    document = make_document("".join(".x"[bit] for bit in mask))
    if not document.loss_mask[1:].any():
        return
    windows = fit_documents(document, length, "split", context)
    seen: Counter[int] = Counter()
    for window in windows:
        assert len(window.tokens) <= length
        assert (np.diff(window.tokens) == 1).all(), "a window is contiguous"
        for position in window.loss_mask[1:].nonzero()[0] + 1:
            token = int(window.tokens[position])
            seen[token] += 1
            assert position >= min(context, token - 100)
    assert seen == Counter((document.loss_mask[1:].nonzero()[0] + 101).tolist())
