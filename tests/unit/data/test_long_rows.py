"""Rows longer than `max_length`: dropped rows are reported, and truncated ones are not reported as duplicates."""

import pytest

from tests.unit.data.test_row_checks import LIMIT, check_rows, make_document, make_rows, make_target
from tunekit.data.check_target import CheckContext, CheckTarget
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import PreprocessSummary, TokenizedDataset
from tunekit.data.row_checks import run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import fit_documents


@pytest.mark.parametrize(("dropped", "is_reported"), [(18, True), (2, True), (1, False), (0, False)])
def test_dropped_rows_are_reported(nano: Tokenizer, dropped: int, is_reported: bool) -> None:
    """Rows that were removed for other reasons do not count."""
    rows = TokenizedDataset.from_documents(make_rows(nano, 20 - dropped), [f"a:{row}" for row in range(20 - dropped)])
    rows.summary = PreprocessSummary(rows=30, filtered=6, skipped=4, dropped=dropped)
    findings = run_data_checks(CheckTarget("data", [rows], nano, CheckContext(LIMIT)))
    assert [finding.kind for finding in findings] == ["dropped rows"] * is_reported
    for finding in findings:
        assert (finding.severity, finding.count, finding.fraction) == ("doubtful", dropped, dropped / 20)
        assert f"{dropped} of 20 rows ({5 * dropped}%)" in str(finding) and f"{LIMIT} tokens" in str(finding)
        assert "max_length" in str(finding)


def make_stories(tokenizer: Tokenizer, *lengths: int) -> list[Document]:
    """Rows with the same start, truncated to LIMIT tokens."""
    rows = [make_document(tokenizer, ("A story, please.", "Once there was a cat. " * length)) for length in lengths]
    return [truncated for row in rows for truncated in fit_documents(row, LIMIT, "truncate", 1)]


def test_rows_that_differ_after_the_cut_are_no_duplicates(nano: Tokenizer) -> None:
    truncated = make_stories(nano, *range(20, 32))
    assert len({finding.tokens.tobytes() for finding in truncated}) == 1 and all(
        finding.full_length > LIMIT for finding in truncated
    )
    findings = check_rows(nano, make_rows(nano, 12) + truncated)
    assert set(findings) == {"truncated answers", "truncated duplicates"}, "not the same answer either"
    finding = findings["truncated duplicates"]
    assert (finding.severity, finding.count, finding.row_locations[0]) == ("doubtful", 11, "data.jsonl:14")
    assert "11 of 24 rows (46%)" in str(finding) and f"{LIMIT} tokens" in str(finding) and "max_length" in str(finding)
    assert "data.jsonl:14" in str(finding) and "data.jsonl:13" in str(finding)
    assert not {"truncated duplicates", "duplicates"} & set(check_rows(nano, make_rows(nano) + truncated[:1]))


def test_duplicates_among_truncated_rows_are_reported(nano: Tokenizer) -> None:
    rows = make_rows(nano, 12)
    findings = check_rows(nano, rows + make_stories(nano, 20, 30) + rows[3:5])
    assert (findings["duplicates"].count, findings["duplicates"].row_locations) == (
        2,
        ("data.jsonl:15", "data.jsonl:16"),
    )
    assert all(location in str(findings["duplicates"]) for location in ("data.jsonl:15", "data.jsonl:4"))
    assert findings["truncated duplicates"].row_locations == ("data.jsonl:14",)


def test_complete_row_is_no_copy_of_a_truncated_one(nano: Tokenizer) -> None:
    (truncated,) = make_stories(nano, 20)
    complete = truncated._replace(full_length=LIMIT)
    assert not {"truncated duplicates", "duplicates"} & set(check_rows(nano, [*make_rows(nano), truncated, complete]))
    findings = check_rows(nano, [*make_rows(nano), truncated, complete, complete])
    assert findings["duplicates"].row_locations == ("data.jsonl:43",) and "truncated duplicates" not in findings


def test_truncated_eval_rows_in_training_data_are_reported(nano: Tokenizer) -> None:
    rows, truncated = make_rows(nano), make_stories(nano, *range(20, 32))
    all_findings = run_data_checks(
        make_target(nano, rows + truncated[:1]), make_target(nano, truncated[1:], "validation")
    )
    findings = {finding.kind: finding for finding in all_findings if finding.config_key == "validation"}
    assert "overlap" not in findings and "same prompts" not in findings
    assert (findings["truncated overlap"].severity, findings["truncated overlap"].count) == ("doubtful", 11)
    assert "11 rows" in str(findings["truncated overlap"]) and f"{LIMIT} tokens" in str(findings["truncated overlap"])
