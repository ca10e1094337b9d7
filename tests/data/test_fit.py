"""Long documents: cut, dropped, or gone on with so that every learnt token is learnt exactly once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.data.truncation import fit_documents
from tunekit.errors import UserError


def document(learnt: str) -> Document:
    """Tokens 100, 101, …; `x` is learnt."""
    mask = np.array([letter == "x" for letter in learnt], bool)
    return Document(np.arange(100, 100 + len(mask), dtype=np.int32), mask, len(mask), DocFlags.UNENDED)


def shown(parts: list[Document]) -> list[tuple[int, str]]:
    return [(int(part.tokens[0]) - 100, "".join(".x"[bit] for bit in part.learnt.astype(int))) for part in parts]


def test_a_document_that_fits_is_left_alone() -> None:
    for way in ("truncate", "drop", "split"):
        whole = document("..xx")
        assert fit_documents(whole, 4, way, 2) == [whole]


def test_truncation_keeps_the_beginning_and_says_how_long_it_was() -> None:
    (part,) = fit_documents(document("..xx..xx"), 5, "truncate", 2)
    assert shown([part]) == [(0, "..xx.")]
    assert (part.whole, part.signs) == (8, DocFlags.UNENDED)


def test_a_document_is_dropped_whole() -> None:
    assert fit_documents(document("..xx..xx"), 5, "drop", 2) == []
    with pytest.raises(UserError, match="nothing to learn in its 3 tokens"):
        fit_documents(document("x.."), 2, "drop", 1)


def test_windows_go_on_before_what_they_learn() -> None:
    assert shown(fit_documents(document("..xx..xx"), 6, "split", 3)) == [(0, "..xx.."), (3, "x..xx")]
    assert shown(fit_documents(document("..xxxxxx"), 4, "split", 2)) == [(0, "..xx"), (2, "x.xx"), (4, "x.xx")]
    assert shown(fit_documents(document("......xx...."), 4, "split", 2)) == [(4, "..xx")]
    assert shown(fit_documents(document("xxxxxxx"), 3, "split", 1)) == [(0, "xxx"), (2, "xxx"), (4, "xxx")]
    assert all(part.whole == len(part.tokens) for part in fit_documents(document("..xxxxxx"), 4, "split", 2))


@pytest.mark.parametrize("learnt", ["....", "x...", ""])
def test_nothing_to_learn_is_told(learnt: str) -> None:
    for way in ("truncate", "split"):
        with pytest.raises(UserError, match=f"nothing to learn in its {len(learnt)} tokens; take the row out"):
            fit_documents(document(learnt), 3, way, 1)


def test_what_is_learnt_only_behind_the_cut_is_told() -> None:
    with pytest.raises(UserError, match="nothing to learn in its first 3 tokens: learnt is only from 5 of 6; raise"):
        fit_documents(document("....xx"), 3, "truncate", 1)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(2, 12), st.data())
def test_every_learnt_token_is_learnt_once_behind_what_stood_before_it(mask: list[bool], length: int, data) -> None:
    context = data.draw(st.integers(1, length - 1))
    whole = document("".join(".x"[bit] for bit in mask))
    if not whole.learnt[1:].any():
        return
    parts = fit_documents(whole, length, "split", context)
    seen: Counter[int] = Counter()
    for part in parts:
        assert len(part.tokens) <= length
        assert (np.diff(part.tokens) == 1).all(), "a window is a piece of the text"
        for place in part.learnt[1:].nonzero()[0] + 1:
            token = int(part.tokens[place])
            seen[token] += 1
            assert place >= min(context, token - 100)
    assert seen == Counter((whole.learnt[1:].nonzero()[0] + 101).tolist())
