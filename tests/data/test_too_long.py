"""Rows that are longer than `length`: many that are dropped are told, and what is left of others is no copy."""

import pytest

from tests.data.test_checks import LIMIT, found, ordinary, subject, turn
from tunekit.data.preprocess.tokenized_dataset import Document, PreprocessSummary, TokenizedDataset
from tunekit.data.row_checks import CheckContext, CheckTarget, run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import fit_documents


@pytest.mark.parametrize(("dropped", "told"), [(18, True), (2, True), (1, False), (0, False)])
def test_rows_that_are_dropped_as_too_long(nano: Tokenizer, dropped: int, told: bool) -> None:
    """Of those that were not left out for another reason."""
    rows = TokenizedDataset(ordinary(nano, 20 - dropped), [f"a:{row}" for row in range(20 - dropped)])
    rows.prepared = PreprocessSummary(rows=30, left_out=6, skipped=4, dropped=dropped)
    seen = run_data_checks(CheckTarget("data", [rows], nano, CheckContext(LIMIT)))
    assert [one.kind for one in seen] == ["dropped rows"] * told
    for one in seen:
        assert (one.severity, one.count, one.share) == ("doubtful", dropped, dropped / 20)
        assert str(one).startswith(f"data: {dropped} of 20 rows ({5 * dropped}%) are longer than {LIMIT} tokens, ")
        assert "raise `max_length`" in str(one)


def stories(tokenizer: Tokenizer, *lengths: int) -> list[Document]:
    """Rows that begin alike, cut where they are too long."""
    said = [turn(tokenizer, ("Tell me a story.", "Once there was a cat. " * length)) for length in lengths]
    return [one for row in said for one in fit_documents(row, LIMIT, "truncate", 1)]


def test_rows_that_are_alike_once_cut_are_no_copies(nano: Tokenizer) -> None:
    cut = stories(nano, *range(20, 32))
    assert len({one.tokens.tobytes() for one in cut}) == 1 and all(one.whole > LIMIT for one in cut)
    told = found(nano, ordinary(nano, 12) + cut)
    assert set(told) == {"cut answers", "alike once cut"}, "nor do they have the same answer"
    one = told["alike once cut"]
    assert (one.severity, one.count, one.where[0]) == ("doubtful", 11, "data.jsonl:14")
    assert f"11 of 24 rows (46%) are like earlier ones once cut at {LIMIT} tokens" in str(one)
    assert str(one).endswith("raise `max_length`: data.jsonl:14 begins as data.jsonl:13 does")
    assert not {"alike once cut", "duplicates"} & set(found(nano, ordinary(nano) + cut[:1]))


def test_true_copies_beside_rows_that_are_cut(nano: Tokenizer) -> None:
    rows = ordinary(nano, 12)
    told = found(nano, rows + stories(nano, 20, 30) + rows[3:5])
    assert (told["duplicates"].count, told["duplicates"].where) == (2, ("data.jsonl:15", "data.jsonl:16"))
    assert str(told["duplicates"]).endswith("data.jsonl:15 is data.jsonl:4 again")
    assert told["alike once cut"].where == ("data.jsonl:14",)


def test_a_row_that_ends_where_others_are_cut_is_none_of_them(nano: Tokenizer) -> None:
    (cut,) = stories(nano, 20)
    whole = cut._replace(whole=LIMIT)
    assert not {"alike once cut", "duplicates"} & set(found(nano, [*ordinary(nano), cut, whole]))
    told = found(nano, [*ordinary(nano), cut, whole, whole])
    assert told["duplicates"].where == ("data.jsonl:43",) and "alike once cut" not in told


def test_held_out_rows_that_are_learnt_as_far_as_they_are_left(nano: Tokenizer) -> None:
    rows, cut = ordinary(nano), stories(nano, *range(20, 32))
    seen = run_data_checks(subject(nano, rows + cut[:1]), subject(nano, cut[1:], "validation"))
    told = {one.kind: one for one in seen if one.part == "validation"}
    assert "overlap" not in told and "same prompts" not in told
    assert (told["overlap once cut"].severity, told["overlap once cut"].count) == ("doubtful", 11)
    assert f"all 11 rows are like rows of `data` once cut at {LIMIT} tokens" in str(told["overlap once cut"])
