"""Row checks find each planted fault, and report nothing for valid rows and the bundled data."""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.chat_families import FAMILIES, write_family
from tests.helpers.encode_rows import encode_document
from tunekit.data import check_target, row_checks, row_stats
from tunekit.data.check_target import CheckContext, CheckTarget, Finding, RewardTarget
from tunekit.data.datasets import ChatDataset
from tunekit.data.document import DocFlags, Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.row_checks import run_data_checks
from tunekit.data.sft_datasets import SegmentsDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import fit_documents
from tunekit.errors import UserError
from tunekit.losses.embedding import CosineSimilarity

LIMIT = 64
SIDES = DocFlags.DESIRABLE | DocFlags.UNDESIRABLE
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "June"]


def make_document(tokenizer: Tokenizer, *turns: tuple[str, str]) -> Document:
    """Build a conversation of the nano model; targets are the answers with their end token."""
    token_ids, mask = [tokenizer.bos], [False]
    for question, answer in turns:
        prompt = tokenizer.encode(f"<|user|>{question}<|turn|><|assistant|>")
        target = tokenizer.encode(f"{answer}<|turn|>")
        token_ids, mask = token_ids + prompt + target, mask + [False] * len(prompt) + [True] * len(target)
    return Document(np.array(token_ids, np.int32), np.array(mask), len(token_ids))


def make_rows(tokenizer: Tokenizer, count: int = 40, first: int = 0) -> list[Document]:
    """Build valid rows with different questions and answers; every fifth has a second turn."""
    rows = []
    for index in range(first, first + count):
        name = NAMES[index % 10]
        turns = [(f"What has {name} in box {index}?", f"In box {index} {name} has {index * 7 % 50} things.")]
        turns += [(f"And what in box {index + 1}?", "Nothing.")] if index % 5 == 0 else []
        rows.append(make_document(tokenizer, *turns))
    return rows


def make_target(tokenizer: Tokenizer, documents: list[Document], name: str = "data", **context) -> CheckTarget:
    rows = TokenizedDataset.from_documents(documents, [f"{name}.jsonl:{row}" for row in range(1, len(documents) + 1)])
    return CheckTarget(name, [rows], tokenizer, CheckContext(**{"max_length": LIMIT, **context}))


def check_rows(tokenizer: Tokenizer, documents: list[Document], **context) -> dict[str, Finding]:
    return {finding.kind: finding for finding in run_data_checks(make_target(tokenizer, documents, **context))}


def test_ordinary_rows_show_nothing(nano: Tokenizer) -> None:
    assert not run_data_checks(
        make_target(nano, make_rows(nano)), make_target(nano, make_rows(nano, 8, 100), "eval_data")
    )


def mask_last_targets(document: Document, *, drop: int) -> Document:
    """Mask the last `drop` target tokens of each target span."""
    mask = document.loss_mask.copy()
    for end in np.flatnonzero(mask & ~np.append(mask[1:], False)):
        mask[end - drop + 1 : end + 1] = False
    return document._replace(loss_mask=mask)


def test_rows_beyond_the_context_are_reported(nano: Tokenizer) -> None:
    documents = make_rows(nano)
    longest = max(len(document.tokens) for document in documents)
    count = sum(len(document.tokens) == longest for document in documents)
    assert not check_rows(nano.with_vocab_size(2048, "model", longest), documents)
    finding = check_rows(nano.with_vocab_size(2048, "model", longest - 1), documents)["context length"]
    assert (finding.severity, finding.count) == ("doubtful", count)


Plant = Callable[[Tokenizer, list[Document]], list[Document]]


def change_all(change: Callable[[Tokenizer, Document], Document]) -> Plant:
    return lambda tokenizer, rows: [change(tokenizer, row) for row in rows]


def change_some(change: Callable[[Tokenizer, Document], Document], rows: slice = slice(2, 5)) -> Plant:
    def plant(tokenizer: Tokenizer, all_rows: list[Document]) -> list[Document]:
        changed = list(all_rows)
        changed[rows] = [change(tokenizer, row) for row in changed[rows]]
        return changed

    return plant


def drop_targets(_: Tokenizer, row: Document) -> Document:
    return row._replace(loss_mask=np.zeros_like(row.loss_mask))


def double_bos(tokenizer: Tokenizer, row: Document) -> Document:
    return Document(
        np.append(np.int32(tokenizer.bos), row.tokens), np.append(False, row.loss_mask), row.full_length + 1
    )


def drop_bos(_: Tokenizer, row: Document) -> Document:
    return Document(row.tokens[1:], row.loss_mask[1:], row.full_length - 1)


def cut_answer(_: Tokenizer, row: Document) -> Document:
    return Document(row.tokens[:-3], row.loss_mask[:-3], row.full_length)


def cut_after_answer(_: Tokenizer, row: Document) -> Document:
    return row._replace(full_length=row.full_length + 9)


def empty_answer(tokenizer: Tokenizer, row: Document) -> Document:
    return make_document(tokenizer, (f"Say nothing to {zlib.crc32(row.tokens.tobytes())}", ""))


def same_answer(tokenizer: Tokenizer, row: Document) -> Document:
    return make_document(tokenizer, (f"Is it {zlib.crc32(row.tokens.tobytes())}?", "Yes."))


def too_short(_: Tokenizer, row: Document) -> Document:
    return Document(np.array([row.tokens[0], 3], np.int32), np.array([False, True]), 2)


def token_beyond_vocab(_: Tokenizer, row: Document) -> Document:
    tokens = row.tokens.copy()
    tokens[4] = 2048
    return row._replace(tokens=tokens)


def wrong_end_token(tokenizer: Tokenizer, row: Document) -> Document:
    tokens = row.tokens.copy()
    tokens[tokens == tokenizer.eos] = tokenizer.model.token_to_id("<|tool|>")
    return row._replace(tokens=tokens)


def set_flags(flags: DocFlags) -> Callable[[Tokenizer, Document], Document]:
    return lambda _, row: row._replace(doc_flags=flags)


FAULTS: dict[str, tuple[Plant, str, str, int]] = {  # name: fault, kind, severity, number of rows
    "no targets": (change_all(drop_targets), "no target tokens", "wrong", 40),
    "no targets in some": (change_some(drop_targets), "no target tokens", "doubtful", 3),
    "no end token": (change_all(lambda _, row: mask_last_targets(row, drop=1)), "terminators", "wrong", 40),
    "some without end token": (
        change_some(lambda _, row: mask_last_targets(row, drop=1)),
        "terminators",
        "doubtful",
        3,
    ),
    "a flag for that": (change_some(set_flags(DocFlags.MISSING_END_TOKEN)), "terminators", "doubtful", 3),
    "two beginnings": (change_all(double_bos), "bos", "wrong", 40),
    "some with two beginnings": (change_some(double_bos), "bos", "doubtful", 3),
    "no beginning": (change_all(drop_bos), "bos", "doubtful", 40),
    "truncated answers": (change_some(cut_answer), "truncated answers", "doubtful", 3),
    "empty answers": (change_some(empty_answer), "empty answers", "doubtful", 3),
    "flag of an empty answer": (change_some(set_flags(DocFlags.EMPTY_TURN)), "empty answers", "doubtful", 3),
    "one answer": (change_some(same_answer, slice(0, 36)), "constant answers", "doubtful", 36),
    "one answer in half": (change_some(same_answer, slice(0, 24)), "constant answers", "note", 24),
    "copies": (lambda _, rows: rows + rows[3:13], "duplicates", "doubtful", 10),
    "a copy": (lambda _, rows: rows + rows[3:4], "duplicates", "note", 1),
    "short rows": (change_some(too_short, slice(7, 8)), "short", "doubtful", 1),
    "another vocabulary": (change_some(token_beyond_vocab), "vocabulary", "wrong", 3),
    "ends that do not stop": (change_all(wrong_end_token), "stops", "doubtful", 40),
    "special tokens": (change_some(set_flags(DocFlags.SPECIAL_IN_TEXT)), "special tokens", "doubtful", 3),
    "prompt in targets": (change_some(set_flags(DocFlags.PROMPT_TRAINED)), "prompt in targets", "doubtful", 3),
    "tools unused": (change_some(set_flags(DocFlags.TOOLS_NOT_RENDERED)), "tools unused", "doubtful", 3),
    "reasoning dropped": (change_some(set_flags(DocFlags.REASONING_DROPPED)), "reasoning dropped", "note", 3),
    "merged tokens": (change_some(set_flags(DocFlags.FIRST_TOKEN_MERGED)), "merged tokens", "doubtful", 3),
    "negatives unused": (change_some(set_flags(DocFlags.NEGATIVES_UNUSED)), "negatives unused", "doubtful", 3),
    "content lost": (change_some(set_flags(DocFlags.CONTENT_LOST)), "content lost", "doubtful", 3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(nano: Tokenizer, name: str) -> None:
    plant, kind, severity, num_rows = FAULTS[name]
    findings = check_rows(nano, plant(nano, make_rows(nano)), vocab_size=2048)
    assert set(findings) == {kind} | ({"empty answers"} if kind == "short" else set())
    finding = findings[kind]
    assert (finding.severity, finding.count) == (severity, num_rows)
    assert len(finding.row_locations) == min(num_rows, check_target.MAX_LISTED) and all(
        place.startswith("data.jsonl:") for place in finding.row_locations
    )
    assert "\n" not in str(finding)


def test_answer_that_merges_with_its_prompt_is_not_empty(nano: Tokenizer) -> None:
    rows = [
        row._replace(doc_flags=DocFlags.FIRST_TOKEN_MERGED) for row in change_all(empty_answer)(nano, make_rows(nano))
    ]
    assert set(check_rows(nano, rows)) == {"merged tokens"}


def test_only_the_last_target_of_segments_needs_an_end_token(nano: Tokenizer) -> None:
    def check_segments(city_end: str, year_end: str, start: str = "<|begin|>") -> dict[str, Finding]:
        documents = []
        for number in range(8):
            texts = (f"{start}Name: {NAMES[number]}\nCity:", f" London{city_end}", "\nYear:", f" 181{number}{year_end}")
            segments = [{"text": text, "train": i % 2 == 1} for i, text in enumerate(texts)]
            documents.append(encode_document(SegmentsDataset("x"), nano, {"segments": segments}))
        return check_rows(nano, documents)

    assert not check_segments("", "<|turn|>")
    assert "last target" in check_segments("<|turn|>", "")["terminators"].hint
    finding = check_segments("", "", "")["terminators"]
    assert finding.severity == "wrong" and finding.count == 8
    assert "first segment with <|begin|>" in check_segments("", "<|turn|>", "")["bos"].hint


def test_empty_answers_of_pairs_and_labeled_rows(nano: Tokenizer) -> None:
    """A rejected answer is no target text to generate, and a labeled text may be empty."""
    rows = change_some(empty_answer)(nano, make_rows(nano))
    assert "stop at once" in str(check_rows(nano, rows)["empty answers"])
    findings = check_rows(nano, rows, reward_target=RewardTarget("pairs"))
    assert "prefer or avoid" in str(findings["empty answers"])
    unpaired = change_all(set_flags(DocFlags.DESIRABLE))(nano, rows)
    assert "prefer or avoid" in str(check_rows(nano, unpaired)["empty answers"])
    assert "empty answers" not in check_rows(nano, rows, reward_target=RewardTarget("labels"))


def test_finding_names_first_rows(nano: Tokenizer) -> None:
    finding = check_rows(nano, change_some(drop_targets, slice(11, 20))(nano, make_rows(nano)))["no target tokens"]
    assert finding.row_locations == ("data.jsonl:12", "data.jsonl:13", "data.jsonl:14") and finding.documents == (
        11,
        12,
        13,
    )
    assert "9 of 40 rows (22%)" in str(finding)


def test_row_cut_after_answer_is_no_fault(nano: Tokenizer) -> None:
    assert not check_rows(nano, change_all(cut_after_answer)(nano, make_rows(nano)))


def test_split_windows_are_no_fault(nano: Tokenizer) -> None:
    """Windows of long answers end anywhere and may contain little more than the end token."""
    long_rows = [
        make_document(nano, (f"Count {row}", " ".join(str(row * number) for number in range(60)))) for row in range(8)
    ]
    for length in range(24, 40):
        windows = [
            (window, f"a:{i}")
            for i, row in enumerate(long_rows)
            for window in fit_documents(row, length, "split", length // 4)
        ]
        rows = TokenizedDataset.from_documents([window for window, _ in windows], [location for _, location in windows])
        assert len(rows) > 5 * len(long_rows)
        assert not run_data_checks(CheckTarget("data", [rows], nano, CheckContext(length)))


def test_rows_are_counted_instead_of_their_windows(nano: Tokenizer) -> None:
    row = make_document(nano, ("Count", " ".join(map(str, range(60)))))
    windows = fit_documents(row, 32, "split", 8)
    rows = TokenizedDataset.from_documents(windows * 2, ["a:1"] * len(windows) + ["a:2"] * len(windows))
    (duplicates,) = (
        finding
        for finding in run_data_checks(CheckTarget("data", [rows], nano, CheckContext(32)))
        if finding.kind == "duplicates"
    )
    assert "1 of 2 rows (50%) is a copy of earlier ones (a:2)" in str(duplicates)
    assert duplicates.documents == (len(windows),)


def test_text_windows_are_no_cut_answers(nano: Tokenizer) -> None:
    """Windows of a long text end anywhere; only the last one ends with eos."""
    tokens = np.array(nano.encode("Once there was a cat, and it had a hat. " * 40, special=True), np.int32)
    windows = [tokens[start : start + LIMIT] for start in range(0, len(tokens) - 2, LIMIT - 1)]
    dataset = TokenizedDataset.from_documents(
        [Document(window, np.ones(len(window), bool), len(window)) for window in windows], ["a:1"] * len(windows)
    )
    assert not run_data_checks(CheckTarget("data", [dataset], nano, CheckContext(LIMIT)))


def test_target_fraction_below_one_percent_is_reported(nano: Tokenizer) -> None:
    context = " ".join(f"The {row}th box is empty." for row in range(100))
    rows = [make_document(nano, (f"{context} Which box is it, {name}?", "Box.")) for name in NAMES]
    assert check_rows(nano, rows, max_length=9999)["target fraction"].severity == "doubtful"
    assert "target fraction" not in check_rows(nano, make_rows(nano))


def test_unknown_tokens_are_counted(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs["turns"])
    unknown = 0
    tokenizer.names["unk_token"] = tokenizer.model.id_to_token(unknown)
    rows = [np.arange(2, 40, dtype=np.int32) for _ in range(10)]
    for row in rows[:4]:
        row[5] = unknown
    mask = np.arange(38) > 20
    findings = {
        finding.kind: finding
        for finding in run_data_checks(make_target(tokenizer, [Document(row, mask, 38) for row in rows]))
    }
    assert (findings["unknown tokens"].count, findings["unknown tokens"].severity) == (4, "doubtful")


def test_packed_rows_with_one_document_are_noted(nano: Tokenizer) -> None:
    rows = make_rows(nano)
    assert check_rows(nano, rows, docs_per_packed_row=np.ones(40, int))["packing"].severity == "note"
    assert not check_rows(nano, rows, docs_per_packed_row=np.full(20, 2))


@pytest.mark.parametrize(("warmup", "is_reported"), [(5, False), (9, False), (10, True), (100, True)])
def test_warmup_longer_than_run_is_reported(nano: Tokenizer, warmup: int, is_reported: bool) -> None:
    context = {"num_steps": 10, "warmup_steps": warmup, "length_key": "max_steps"}
    findings = check_rows(nano, make_rows(nano), **context)
    assert ("warm-up" in findings) is is_reported
    assert not is_reported or "max_steps" in str(findings["warm-up"])


def test_tokenizer_without_end_token_is_reported(nano: Tokenizer) -> None:
    tokenizer = Tokenizer(nano.model, {}, nano.templates)
    assert {"no end token", "no pad token"} <= set(check_rows(tokenizer, make_rows(nano)))


def make_labeled_rows(tokenizer: Tokenizer, values: list[float], num_cut: int = 0) -> list[Document]:
    """Build texts that have a label, or steps that have labels, without an end token."""
    rows = []
    for number, value in enumerate(values):
        token_ids = np.array([tokenizer.bos, *tokenizer.encode(f"In box {number} are {number * 7} things.")], np.int32)
        mask = np.arange(len(token_ids)) == len(token_ids) - 1
        rows.append(
            Document(token_ids, mask, len(token_ids) + num_cut, DocFlags.STEPWISE, np.array([value], np.float32))
        )
    return rows


def test_scored_rows_need_no_end_token(nano: Tokenizer) -> None:
    rows = make_labeled_rows(nano, [0, 1] * 10)
    assert "terminators" in check_rows(nano, rows)
    assert not check_rows(nano, rows, reward_target=RewardTarget("labels"))
    assert (
        check_rows(nano, make_labeled_rows(nano, [0, 1] * 10, 5), reward_target=RewardTarget("labels"))[
            "truncated rows"
        ].count
        == 20
    )
    assert "no end token" not in check_rows(
        Tokenizer(nano.model, {}, nano.templates), rows, reward_target=RewardTarget("pairs")
    )


@pytest.mark.parametrize(("num_same", "severity"), [(20, "wrong"), (19, "doubtful"), (18, None)])
def test_constant_labels_are_reported(nano: Tokenizer, num_same: int, severity: str | None) -> None:
    rows = make_labeled_rows(nano, [1] * num_same + [0] * (20 - num_same))
    finding = check_rows(nano, rows, reward_target=RewardTarget("labels")).get("constant labels")
    assert (finding and finding.severity) == severity
    assert "constant labels" not in check_rows(nano, rows, reward_target=RewardTarget("pairs"))


@pytest.mark.parametrize("flag", [DocFlags.DESIRABLE, DocFlags.UNDESIRABLE])
def test_one_sided_data_of_any_size_is_reported(nano: Tokenizer, flag: DocFlags) -> None:
    """Unpaired preferences and labels, with two rows as with many; few held-out rows may be of one class."""
    for rows, context in (
        ([row._replace(doc_flags=flag) for row in make_rows(nano, 2)], {}),
        (make_labeled_rows(nano, [1, 1]), {"reward_target": RewardTarget("labels")}),
    ):
        assert check_rows(nano, rows, **context)["constant labels"].severity == "wrong"
        findings = [*row_checks.run_checks(make_target(nano, rows, "eval_data", **context))]
        assert [item.severity for item in findings if item.kind == "constant labels"] == ["doubtful"]
    both = [row._replace(doc_flags=side) for row, side in zip(make_rows(nano, 2), (flag, flag ^ SIDES), strict=True)]
    assert "constant labels" not in check_rows(nano, both)


def test_labels_that_the_loss_cannot_use_are_the_same_for_checks_and_training(nano: Tokenizer) -> None:
    rows, loss = make_labeled_rows(nano, [0.5, 1.5, -2, 1] * 3), CosineSimilarity()
    context = {"reward_target": RewardTarget("labels"), "label_rule": loss.label_rule}
    finding = check_rows(nano, rows, **context)["labels"]
    assert (finding.severity, finding.count, finding.row_locations[0]) == ("wrong", 6, "data.jsonl:2")
    dataset = TokenizedDataset.from_documents(rows, [f"data.jsonl:{row}" for row in range(1, 13)])
    with pytest.raises(UserError, match="data.jsonl:2: "):
        loss.check_labels(dataset)
    assert "labels" not in check_rows(nano, rows, reward_target=RewardTarget("labels"))


@pytest.mark.parametrize(("labels", "classes", "absent"), [
    ([0, 1], 5, ("2, 3, 4:", "3 of 5", "loss.num_labels=2")),
    ([1, 2], 9, ("0, 3, 4, ..:", "7 of 9", "loss.num_labels=3")),
    ([0, 2], 3, ("1:", "1 of 3")),
    ([0, 1, 2], 3, None),
    ([0, 1], None, None),
    ([1], 2, None),
])  # fmt: skip
def test_absent_classes_are_reported(
    nano: Tokenizer, labels: list[float], classes: int | None, absent: tuple[str, ...] | None
) -> None:
    """Evaluation rows may lack a class."""
    rows = make_labeled_rows(nano, labels * 12)
    context = {"reward_target": RewardTarget("labels", classes)}
    finding = check_rows(nano, rows, **context).get("absent classes")
    assert (finding is None) == (absent is None)
    assert all(text in str(finding) for text in absent or ())
    assert finding is None or finding.severity == "doubtful"
    complete = make_labeled_rows(nano, [number % (classes or 2) for number in range(100, 160)])
    eval_target = make_target(nano, rows, "eval_data", **context)
    assert "absent classes" not in {
        other.kind for other in run_data_checks(make_target(nano, complete, **context), eval_target)
    }


def find_overlap(tokenizer: Tokenizer, eval_rows: list[Document]) -> dict[str, Finding]:
    findings = run_data_checks(
        make_target(tokenizer, make_rows(tokenizer)), make_target(tokenizer, eval_rows, "eval_data")
    )
    return {finding.kind: finding for finding in findings}


def test_eval_rows_in_training_data_are_reported(nano: Tokenizer) -> None:
    rows, new_rows = make_rows(nano), make_rows(nano, 10, 100)
    finding = find_overlap(nano, rows[:6] + new_rows[:4])["overlap"]
    assert (finding.severity, finding.count, finding.row_locations[0]) == ("wrong", 6, "eval_data.jsonl:1")
    assert find_overlap(nano, rows[:2] + new_rows)["overlap"].severity == "doubtful"
    assert not find_overlap(nano, new_rows)


def make_pairs(tokenizer: Tokenizer, pairs: list[tuple[Document, Document]], key: str) -> CheckTarget:
    """Rows of two documents, all of whose tokens are targets, as those of embedding models."""
    documents = [document._replace(loss_mask=np.ones_like(document.loss_mask)) for row in pairs for document in row]
    locations = [f"{key}.jsonl:{number}" for number in range(len(pairs)) for _ in range(2)]
    return CheckTarget(key, [TokenizedDataset.from_documents(documents, locations)], tokenizer, CheckContext(LIMIT))


def test_rows_with_several_documents_are_compared_as_a_whole(nano: Tokenizer) -> None:
    """Queries may share a hard negative, and pairs of texts one or both texts with other pairs."""
    rows, negative = make_rows(nano), make_rows(nano, 1, 500)[0]
    train = [*zip(rows[:20], repeat(negative)), *zip(rows[:20], rows[20:], strict=True)]
    held_out = [(rows[30], negative), (rows[0], rows[21]), (rows[20], rows[0])]
    target = make_pairs(nano, train, "data")
    assert len(target) == 40 and not [*row_checks.find_duplicates(target)]
    assert not [*row_checks.find_overlap(target, make_pairs(nano, held_out, "eval_data"))]
    held_out += train[5:8]
    (finding,) = row_checks.find_overlap(target, make_pairs(nano, held_out, "eval_data"))
    assert (finding.kind, finding.severity, finding.count) == ("overlap", "wrong", 3)
    (finding,) = row_checks.find_duplicates(make_pairs(nano, train + train[:2], "data"))
    assert finding.count == 2


def test_eval_prompts_in_training_data_with_another_answer_are_reported(nano: Tokenizer) -> None:
    repeated = [make_document(nano, (f"What has {NAMES[row]} in box {row}?", "I do not know.")) for row in (1, 2)]
    finding = find_overlap(nano, repeated + make_rows(nano, 8, 100))["same prompts"]
    assert (finding.severity, finding.count) == ("doubtful", 2)


def test_answers_in_training_data_do_not_have_another_answer(nano: Tokenizer) -> None:
    """A held-out pair may share one of its answers with a pair of the training data."""
    first, second, third = (make_document(nano, ("What is in box 3?", answer)) for answer in ("Nuts.", "Ink.", "Tea."))

    def make_pair(documents: list[Document], key: str) -> CheckTarget:
        rows = TokenizedDataset.from_documents(documents, [f"{key}:1"] * 2)
        return CheckTarget(key, [rows], nano, CheckContext(LIMIT))

    train = make_pair([first, second], "data")
    assert not [*row_checks.find_overlap(train, make_pair([second, first], "eval_data"))]
    (finding,) = row_checks.find_overlap(train, make_pair([first, third], "eval_data"))
    assert finding.kind == "same prompts"


def test_prompt_of_many_rows_is_no_overlap(nano: Tokenizer) -> None:
    rows = [make_document(nano, ("A story, please.", f"There was a cat called {row}.")) for row in range(60)]
    findings = run_data_checks(make_target(nano, rows[:50]), make_target(nano, rows[50:], "eval_data"))
    assert not findings


def test_mix_is_checked_as_one_dataset(nano: Tokenizer) -> None:
    rows = make_rows(nano)
    datasets = [
        TokenizedDataset.from_documents(rows[:25], [f"a:{row}" for row in range(25)]),
        TokenizedDataset.from_documents(rows[25:] + rows[:3], [f"b:{row}" for row in range(18)]),
    ]
    (finding,) = run_data_checks(CheckTarget("data", datasets, nano, CheckContext(LIMIT)))
    assert (finding.kind, finding.count, finding.row_locations) == ("duplicates", 3, ("b:15", "b:16", "b:17"))


def test_block_size_does_not_change_stats(nano: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = change_some(drop_targets)(nano, make_rows(nano)) + make_rows(nano, 5)
    one_block = make_target(nano, rows).stats
    monkeypatch.setattr(row_stats, "BLOCK_TOKENS", 70)
    small_blocks = make_target(nano, rows).stats
    for name, value in one_block._asdict().items():
        np.testing.assert_array_equal(value, getattr(small_blocks, name), name)


def test_stats_equal_those_of_a_loop(nano: Tokenizer) -> None:
    """Compare every array with plain Python, on rows with random loss masks."""
    rng = random.Random(5)
    rows = []
    for _ in range(300):
        size = rng.randint(1, 12)
        tokens = np.array([rng.choice([1, 3, 5, 300, 301]) for _ in range(size)], np.int32)
        mask = np.array([rng.random() < 0.5 for _ in range(size)])
        rows.append(Document(tokens, mask, size + rng.choice([0, 0, 4])))
    stats = make_target(nano, rows).stats
    for index, row in enumerate(rows):
        expected = expected_stats(row, set(nano.special_ids), nano.bos)
        assert {name: getattr(stats, name)[index] for name in expected} == expected
    for name, get_tokens in (
        ("token_hash", lambda row: row.tokens),
        ("answer_hash", lambda row: row.tokens[row.loss_mask]),
    ):
        texts = [get_tokens(row).tobytes() for row in rows]
        values = getattr(stats, name).tolist()
        assert len(set(values)) == len(set(texts)) == len(set(zip(values, texts, strict=True)))


def expected_stats(row: Document, special_ids: set[int], bos: int | None) -> dict[str, int | bool]:
    tokens, mask = row.tokens.tolist(), row.loss_mask.tolist()
    ends = [i for i in range(len(tokens)) if mask[i] and not (i + 1 < len(tokens) and mask[i + 1])]
    cut = [i for i in ends if i == len(tokens) - 1 and len(tokens) < row.full_length and tokens[i] not in special_ids]
    complete = [i for i in ends if i > 0 and i not in cut and not all(mask)]
    return {
        "targets": sum(mask[1:]),
        "first_target": mask.index(True) if any(mask) else len(tokens),
        "all_targets": all(mask),
        "complete_turns": len(complete),
        "turns_with_end": sum(tokens[i] in special_ids for i in complete),
        "last_token": tokens[complete[-1]] if complete else -1,
        "end_missing": bool(cut),
        "max_token": max(tokens),
        "first_token": tokens[0],
        "double_bos": tokens[:2] == [bos, bos],
    }


def tokenize_dataset(dataset: ChatDataset, tokenizer: Tokenizer) -> TokenizedDataset:
    prepared = dataset.prepare_tokenizer(tokenizer)
    rows = list(open_dataset(dataset.source, dataset.split, dataset.max_samples).rows)
    documents = list(iter_documents(dataset.encode_rows(prepared, rows), [row.where for row in rows]))
    return TokenizedDataset.from_documents(
        [document for document, _ in documents], [location for _, location in documents]
    )


def iter_documents(results, locations: list[str]) -> Iterator[tuple[Document, str]]:
    for result, location in zip(results, locations, strict=True):
        for document in result:
            yield document, location


def test_bundled_tool_data_has_no_faults(nano: Tokenizer) -> None:
    datasets = [
        tokenize_dataset(ChatDataset("tunekit/tools", split=split, max_length=256), nano) for split in ("train", "test")
    ]
    findings = run_data_checks(
        *(
            CheckTarget(name, [finding], nano, CheckContext(256, 2048))
            for name, finding in zip("dv", datasets, strict=True)
        )
    )
    assert not [str(finding) for finding in findings if finding.severity != "note"]


def make_conversations(count: int, system: bool) -> str:
    """JSON lines with conversations of one to three turns."""
    rng, lines = random.Random(3), []
    for row in range(count):
        system_message = [{"role": "system", "content": "You are brief."}] if system and row % 2 else []
        turns = []
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(NAMES)
            turns.append({"role": "user", "content": f"Where is {name}, please? I looked in room {row}.\n\n- and in 3"})
            turns.append({"role": "assistant", "content": f"{name} went to room {rng.randint(1, 9)}{row}."})
        lines.append(json.dumps({"messages": system_message + turns}))
    return "\n".join(lines)


def test_ordinary_chats_have_no_faults(tmp_path: Path, nano: Tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(make_conversations(200, system=True))
    rows = tokenize_dataset(ChatDataset(str(tmp_path / "rows.jsonl"), max_length=256), nano)
    assert not [
        str(finding)
        for finding in run_data_checks(CheckTarget("data", [rows], nano, CheckContext(256, 2048)))
        if finding.severity != "note"
    ]


# GLM ends the last turn with nothing, SmolLM3 marks the prompt as generated, Mistral drops a system message from some
# conversations. The end token of Gemma is named in a generation_config.json, which these directories lack.
KNOWN_FAULTS = {
    "mistral": {"content lost"},
    "glm4": {"terminators"},
    "smollm3": {"prompt in targets"},
    "gemma2": {"stops"},
    "gemma3": {"stops"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_templates_have_no_unexpected_faults(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer.open(write_family(tmp_path, name))
    (tmp_path / "rows.jsonl").write_text(make_conversations(40, FAMILIES[name].system))
    rows = tokenize_dataset(ChatDataset(str(tmp_path / "rows.jsonl"), max_length=4096), tokenizer)
    findings = [
        finding
        for finding in run_data_checks(CheckTarget("data", [rows], tokenizer, CheckContext(4096)))
        if finding.severity != "note"
    ]
    assert {finding.kind for finding in findings} == KNOWN_FAULTS.get(name, set()), [
        str(finding) for finding in findings
    ]
    assert all(finding.severity == "doubtful" for finding in findings)


def test_template_without_end_of_single_turns_is_wrong(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_family(tmp_path, "glm4"))
    conversations = [
        [{"role": "user", "content": f"And {n}?"}, {"role": "assistant", "content": f"So {n}."}] for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
    rows = tokenize_dataset(ChatDataset(str(tmp_path / "rows.jsonl"), max_length=4096), tokenizer)
    (finding,) = run_data_checks(CheckTarget("data", [rows], tokenizer, CheckContext(4096)))
    assert (finding.kind, finding.severity, finding.count) == ("terminators", "wrong", 20)
