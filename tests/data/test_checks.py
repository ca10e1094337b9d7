"""Each fault is found where it was planted, and nowhere else: neither in ordinary rows nor in those that ship."""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.families import FAMILIES, folder
from tunekit.data import row_checks, row_stats
from tunekit.data.datasets import ChatDataset
from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.row_checks import CheckContext, CheckTarget, Finding, RewardTarget, run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import fit_documents

LIMIT = 64
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "June"]


def turn(tokenizer: Tokenizer, *said: tuple[str, str]) -> Document:
    """A conversation of the nano: what the assistant says is learnt, with its end."""
    ids, learnt = [tokenizer.bos], [False]
    for question, answer in said:
        prompt = tokenizer.encode(f"<|user|>{question}<|turn|><|assistant|>")
        target = tokenizer.encode(f"{answer}<|turn|>")
        ids, learnt = ids + prompt + target, learnt + [False] * len(prompt) + [True] * len(target)
    return Document(np.array(ids, np.int32), np.array(learnt), len(ids))


def ordinary(tokenizer: Tokenizer, count: int = 40, first: int = 0) -> list[Document]:
    """Questions that differ, with answers of their own; some have a second turn."""
    found = []
    for row in range(first, first + count):
        name = NAMES[row % 10]
        said = [(f"What has {name} in box {row}?", f"In box {row} {name} has {row * 7 % 50} things.")]
        said += [(f"And what in box {row + 1}?", "Nothing.")] if row % 5 == 0 else []
        found.append(turn(tokenizer, *said))
    return found


def subject(tokenizer: Tokenizer, documents: list[Document], part: str = "data", **use) -> CheckTarget:
    rows = TokenizedDataset(documents, [f"{part}.jsonl:{row}" for row in range(1, len(documents) + 1)])
    return CheckTarget(part, [rows], tokenizer, CheckContext(**{"limit": LIMIT, **use}))


def found(tokenizer: Tokenizer, documents: list[Document], **use) -> dict[str, Finding]:
    return {one.kind: one for one in run_data_checks(subject(tokenizer, documents, **use))}


def test_ordinary_rows_show_nothing(nano: Tokenizer) -> None:
    assert not run_data_checks(subject(nano, ordinary(nano)), subject(nano, ordinary(nano, 8, 100), "eval_data"))


def unmasked(document: Document, *, drop: int) -> Document:
    """Without the last `drop` learnt tokens of each stretch."""
    learnt = document.learnt.copy()
    for end in np.flatnonzero(learnt & ~np.append(learnt[1:], False)):
        learnt[end - drop + 1 : end + 1] = False
    return document._replace(learnt=learnt)


Plant = Callable[[Tokenizer, list[Document]], list[Document]]


def every(change: Callable[[Tokenizer, Document], Document]) -> Plant:
    return lambda tokenizer, rows: [change(tokenizer, row) for row in rows]


def some(change: Callable[[Tokenizer, Document], Document], rows: slice = slice(2, 5)) -> Plant:
    def plant(tokenizer: Tokenizer, all_rows: list[Document]) -> list[Document]:
        changed = list(all_rows)
        changed[rows] = [change(tokenizer, row) for row in changed[rows]]
        return changed

    return plant


def nothing(_: Tokenizer, row: Document) -> Document:
    return row._replace(learnt=np.zeros_like(row.learnt))


def begun_twice(tokenizer: Tokenizer, row: Document) -> Document:
    return Document(np.append(np.int32(tokenizer.bos), row.tokens), np.append(False, row.learnt), row.whole + 1)


def headless(_: Tokenizer, row: Document) -> Document:
    return Document(row.tokens[1:], row.learnt[1:], row.whole - 1)


def cut(_: Tokenizer, row: Document) -> Document:
    return Document(row.tokens[:-3], row.learnt[:-3], row.whole)


def cut_behind(_: Tokenizer, row: Document) -> Document:
    return row._replace(whole=row.whole + 9)


def empty(tokenizer: Tokenizer, row: Document) -> Document:
    return turn(tokenizer, (f"Say nothing to {zlib.crc32(row.tokens.tobytes())}", ""))


def same_answer(tokenizer: Tokenizer, row: Document) -> Document:
    return turn(tokenizer, (f"Is it {zlib.crc32(row.tokens.tobytes())}?", "Yes."))


def short(_: Tokenizer, row: Document) -> Document:
    return Document(np.array([row.tokens[0], 3], np.int32), np.array([False, True]), 2)


def beyond(_: Tokenizer, row: Document) -> Document:
    tokens = row.tokens.copy()
    tokens[4] = 2048
    return row._replace(tokens=tokens)


def ended_otherwise(tokenizer: Tokenizer, row: Document) -> Document:
    tokens = row.tokens.copy()
    tokens[tokens == tokenizer.eos] = tokenizer.model.token_to_id("<|tool|>")
    return row._replace(tokens=tokens)


def signed(sign: DocFlags) -> Callable[[Tokenizer, Document], Document]:
    return lambda _, row: row._replace(signs=sign)


PLANTED: dict[str, tuple[Plant, str, str, int]] = {  # name: fault, kind, severity, rows
    "nothing learnt": (every(nothing), "nothing learnt", "wrong", 40),
    "nothing learnt in some": (some(nothing), "nothing learnt", "doubtful", 3),
    "no end learnt": (every(lambda _, row: unmasked(row, drop=1)), "terminators", "wrong", 40),
    "some ends not learnt": (some(lambda _, row: unmasked(row, drop=1)), "terminators", "doubtful", 3),
    "a sign of that": (some(signed(DocFlags.UNENDED)), "terminators", "doubtful", 3),
    "two beginnings": (every(begun_twice), "bos", "wrong", 40),
    "some with two beginnings": (some(begun_twice), "bos", "doubtful", 3),
    "no beginning": (every(headless), "bos", "doubtful", 40),
    "cut answers": (some(cut), "cut answers", "doubtful", 3),
    "empty answers": (some(empty), "empty answers", "doubtful", 3),
    "a sign of that too": (some(signed(DocFlags.EMPTY_TURN)), "empty answers", "doubtful", 3),
    "one answer": (some(same_answer, slice(0, 36)), "constant answers", "doubtful", 36),
    "one answer in half": (some(same_answer, slice(0, 24)), "constant answers", "note", 24),
    "copies": (lambda _, rows: rows + rows[3:13], "duplicates", "doubtful", 10),
    "a copy": (lambda _, rows: rows + rows[3:4], "duplicates", "note", 1),
    "short rows": (some(short, slice(7, 8)), "short", "doubtful", 1),
    "another vocabulary": (some(beyond), "vocabulary", "wrong", 3),
    "ends that do not stop": (every(ended_otherwise), "stops", "doubtful", 40),
    "special tokens": (some(signed(DocFlags.SPECIAL_IN_TEXT)), "special tokens", "doubtful", 3),
    "prompt learnt": (some(signed(DocFlags.PROMPT_LEARNT)), "prompt learnt", "doubtful", 3),
    "tools unused": (some(signed(DocFlags.TOOLS_UNUSED)), "tools unused", "doubtful", 3),
    "reasoning dropped": (some(signed(DocFlags.REASONING_DROPPED)), "reasoning dropped", "note", 3),
    "content lost": (some(signed(DocFlags.CONTENT_LOST)), "content lost", "doubtful", 3),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(nano: Tokenizer, name: str) -> None:
    plant, kind, severity, rows = PLANTED[name]
    told = found(nano, plant(nano, ordinary(nano)), vocab=2048)
    assert set(told) == {kind} | ({"empty answers"} if kind == "short" else set())
    one = told[kind]
    assert (one.severity, one.count) == (severity, rows)
    assert len(one.where) == min(rows, row_checks.SHOWN) and all(place.startswith("data.jsonl:") for place in one.where)
    assert "\n" not in str(one)


def test_what_an_empty_answer_teaches(nano: Tokenizer) -> None:
    """One of a pair is not what the model is taught to say; a text that is labelled may answer nothing."""
    rows = some(empty)(nano, ordinary(nano))
    assert "taught to end at once" in str(found(nano, rows)["empty answers"])
    pairs = found(nano, rows, scored=RewardTarget("pairs"))
    assert "that one is empty may be all that is learnt" in str(pairs["empty answers"])
    judged = every(signed(DocFlags.GOOD))(nano, rows)
    assert "that one is empty may be all that is learnt" in str(found(nano, judged)["empty answers"])
    assert "empty answers" not in found(nano, rows, scored=RewardTarget("labels"))


def test_the_first_rows_of_a_fault_are_named(nano: Tokenizer) -> None:
    told = found(nano, some(nothing, slice(11, 20))(nano, ordinary(nano)))["nothing learnt"]
    assert told.where == ("data.jsonl:12", "data.jsonl:13", "data.jsonl:14") and told.rows == (11, 12, 13)
    assert "9 of 40 rows (22%)" in str(told)


def test_a_row_that_is_cut_behind_an_answer_has_all_of_it(nano: Tokenizer) -> None:
    assert not found(nano, every(cut_behind)(nano, ordinary(nano)))


def test_rows_that_were_split_are_as_they_were(nano: Tokenizer) -> None:
    """Windows of long answers end where there is room no more, and may hold little but the end."""
    long = [turn(nano, (f"Count {row}", " ".join(str(row * number) for number in range(60)))) for row in range(8)]
    for length in range(24, 40):
        pieces = [
            (one, f"a:{i}") for i, row in enumerate(long) for one in fit_documents(row, length, "split", length // 4)
        ]
        rows = TokenizedDataset([one for one, _ in pieces], [where for _, where in pieces])
        assert len(rows) > 5 * len(long)
        assert not run_data_checks(CheckTarget("data", [rows], nano, CheckContext(length)))


def test_rows_and_not_their_windows_are_counted(nano: Tokenizer) -> None:
    row = turn(nano, ("Count", " ".join(map(str, range(60)))))
    pieces = fit_documents(row, 32, "split", 8)
    rows = TokenizedDataset(pieces * 2, ["a:1"] * len(pieces) + ["a:2"] * len(pieces))
    (copy,) = (
        one for one in run_data_checks(CheckTarget("data", [rows], nano, CheckContext(32))) if one.kind == "duplicates"
    )
    assert "1 of 2 rows (50%) is a copy of earlier ones (a:2); " in str(copy)
    assert copy.rows == (len(pieces),)


def test_text_is_no_answer(nano: Tokenizer) -> None:
    """Pieces of a long text end anywhere; only its last one ends with the token."""
    tokens = np.array(nano.encode("Once there was a cat, and it had a hat. " * 40, special=True), np.int32)
    parts = [tokens[first : first + LIMIT] for first in range(0, len(tokens) - 2, LIMIT - 1)]
    pieces = TokenizedDataset(
        [Document(part, np.ones(len(part), bool), len(part)) for part in parts], ["a:1"] * len(parts)
    )
    assert not run_data_checks(CheckTarget("data", [pieces], nano, CheckContext(LIMIT)))


def test_a_learnt_share_below_a_hundredth(nano: Tokenizer) -> None:
    read = " ".join(f"The {row}th box is empty." for row in range(100))
    rows = [turn(nano, (f"{read} Which box is it, {name}?", "Box.")) for name in NAMES]
    assert found(nano, rows, limit=9999)["learnt share"].severity == "doubtful"
    assert "learnt share" not in found(nano, ordinary(nano))


def test_what_the_tokenizer_cannot_write(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["turns"])
    unknown = 0
    tokenizer.names["unk_token"] = tokenizer.model.id_to_token(unknown)
    rows = [np.arange(2, 40, dtype=np.int32) for _ in range(10)]
    for row in rows[:4]:
        row[5] = unknown
    learnt = np.arange(38) > 20
    told = {one.kind: one for one in run_data_checks(subject(tokenizer, [Document(row, learnt, 38) for row in rows]))}
    assert (told["unknown tokens"].count, told["unknown tokens"].severity) == (4, "doubtful")


def test_packed_rows_that_hold_one_document(nano: Tokenizer) -> None:
    rows = ordinary(nano)
    assert found(nano, rows, packed=np.ones(40, int))["packing"].severity == "note"
    assert not found(nano, rows, packed=np.full(20, 2))


@pytest.mark.parametrize(("warmup", "told"), [(5, False), (9, False), (10, True), (100, True)])
def test_a_warm_up_longer_than_the_run(nano: Tokenizer, warmup: int, told: bool) -> None:
    assert ("warm-up" in found(nano, ordinary(nano), steps=10, warmup=warmup)) is told


def test_a_tokenizer_that_names_no_end(nano: Tokenizer) -> None:
    bare = Tokenizer(nano.model, {}, nano.templates)
    assert {"no end token", "no pad token"} <= set(found(bare, ordinary(nano)))


def labelled(tokenizer: Tokenizer, values: list[float], cut: int = 0) -> list[Document]:
    """Texts of which each has a label, or a step that has one, without the end that a model is to write."""
    found = []
    for number, value in enumerate(values):
        ids = np.array([tokenizer.bos, *tokenizer.encode(f"In box {number} are {number * 7} things.")], np.int32)
        learnt = np.arange(len(ids)) == len(ids) - 1
        found.append(Document(ids, learnt, len(ids) + cut, DocFlags.STEPS, np.array([value], np.float32)))
    return found


def test_what_is_scored_is_not_taught_to_write(nano: Tokenizer) -> None:
    fine = labelled(nano, [0, 1] * 10)
    assert "terminators" in found(nano, fine)
    assert not found(nano, fine, scored=RewardTarget("labels"))
    assert found(nano, labelled(nano, [0, 1] * 10, 5), scored=RewardTarget("labels"))["cut rows"].count == 20
    assert "no end token" not in found(Tokenizer(nano.model, {}, nano.templates), fine, scored=RewardTarget("pairs"))


@pytest.mark.parametrize(("same", "severity"), [(20, "wrong"), (19, "doubtful"), (18, None)])
def test_labels_that_are_the_same(nano: Tokenizer, same: int, severity: str | None) -> None:
    rows = labelled(nano, [1] * same + [0] * (20 - same))
    told = found(nano, rows, scored=RewardTarget("labels")).get("constant labels")
    assert (told and told.severity) == severity
    assert "constant labels" not in found(nano, rows, scored=RewardTarget("pairs"))


@pytest.mark.parametrize(("there", "classes", "told"), [
    ([0, 1], 5, "2, 3, 4: 3 of 5 classes (`loss.num_labels`) cannot be learnt; is that meant? loss.num_labels=2 "
                "would do"),
    ([1, 2], 9, "0, 3, 4, ..: 7 of 9 classes (`loss.num_labels`) cannot be learnt; is that meant? "
                "loss.num_labels=3 would"),
    ([0, 2], 3, "1: 1 of 3 classes (`loss.num_labels`) cannot be learnt; is that meant?"),
    ([0, 1, 2], 3, None),
    ([0, 1], None, None),
    ([1], 2, None),
])  # fmt: skip
def test_classes_that_no_row_has(nano: Tokenizer, there: list[float], classes: int | None, told: str | None) -> None:
    """Where rows are learnt from: of those that are held out, some may lack one."""
    rows = labelled(nano, there * 12)
    use = {"scored": RewardTarget("labels", classes)}
    finding = found(nano, rows, **use).get("absent classes")
    assert (finding is None) == (told is None)
    assert finding is None or str(finding).startswith(f"data: no row has the label {told}")
    assert finding is None or finding.severity == "doubtful"
    all_there = labelled(nano, [number % (classes or 2) for number in range(100, 160)])
    held = subject(nano, rows, "eval_data", **use)
    assert "absent classes" not in {one.kind for one in run_data_checks(subject(nano, all_there, **use), held)}


def overlap(tokenizer: Tokenizer, held: list[Document]) -> dict[str, Finding]:
    told = run_data_checks(subject(tokenizer, ordinary(tokenizer)), subject(tokenizer, held, "eval_data"))
    return {one.kind: one for one in told}


def test_held_out_rows_that_are_learnt(nano: Tokenizer) -> None:
    rows, new = ordinary(nano), ordinary(nano, 10, 100)
    told = overlap(nano, rows[:6] + new[:4])["overlap"]
    assert (told.severity, told.count, told.where[0]) == ("wrong", 6, "eval_data.jsonl:1")
    assert overlap(nano, rows[:2] + new)["overlap"].severity == "doubtful"
    assert not overlap(nano, new)


def test_held_out_prompts_that_are_learnt_with_another_answer(nano: Tokenizer) -> None:
    asked = [turn(nano, (f"What has {NAMES[row]} in box {row}?", "I do not know.")) for row in (1, 2)]
    told = overlap(nano, asked + ordinary(nano, 8, 100))["same prompts"]
    assert (told.severity, told.count) == ("doubtful", 2)


def test_a_prompt_that_begins_many_rows_is_nobodys(nano: Tokenizer) -> None:
    rows = [turn(nano, ("Tell me a story.", f"There was a cat called {row}.")) for row in range(60)]
    told = run_data_checks(subject(nano, rows[:50]), subject(nano, rows[50:], "eval_data"))
    assert not told


def test_a_mix_is_looked_at_as_one(nano: Tokenizer) -> None:
    rows = ordinary(nano)
    parts = [
        TokenizedDataset(rows[:25], ["a:1"] * 25),
        TokenizedDataset(rows[25:] + rows[:3], [f"b:{row}" for row in range(18)]),
    ]
    (told,) = run_data_checks(CheckTarget("data", parts, nano, CheckContext(LIMIT)))
    assert (told.kind, told.count, told.where) == ("duplicates", 3, ("b:15", "b:16", "b:17"))


def test_blocks_change_nothing(nano: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some(nothing)(nano, ordinary(nano)) + ordinary(nano, 5)
    whole = subject(nano, rows).measured
    monkeypatch.setattr(row_stats, "BLOCK", 70)
    parts = subject(nano, rows).measured
    for name, value in vars(whole).items():
        np.testing.assert_array_equal(value, vars(parts)[name], name)


def test_measures_are_those_of_a_loop(nano: Tokenizer) -> None:
    """Every array, of rows with any learnt tokens, against plain Python."""
    draw = random.Random(5)
    rows = []
    for _ in range(300):
        size = draw.randint(1, 12)
        tokens = np.array([draw.choice([1, 3, 5, 300, 301]) for _ in range(size)], np.int32)
        learnt = np.array([draw.random() < 0.5 for _ in range(size)])
        rows.append(Document(tokens, learnt, size + draw.choice([0, 0, 4])))
    seen = subject(nano, rows).measured
    for index, row in enumerate(rows):
        wanted = by_hand(row, set(nano.marks), nano.bos)
        assert {name: vars(seen)[name][index] for name in wanted} == wanted
    for name, of in (("print", lambda row: row.tokens), ("answer", lambda row: row.tokens[row.learnt])):
        texts = [of(row).tobytes() for row in rows]
        values = vars(seen)[name].tolist()
        assert len(set(values)) == len(set(texts)) == len(set(zip(values, texts, strict=True)))


def by_hand(row: Document, marks: set[int], bos: int | None) -> dict[str, int | bool]:
    tokens, learnt = row.tokens.tolist(), row.learnt.tolist()
    ends = [at for at in range(len(tokens)) if learnt[at] and not (at + 1 < len(tokens) and learnt[at + 1])]
    broken = [at for at in ends if at == len(tokens) - 1 and len(tokens) < row.whole and tokens[at] not in marks]
    whole = [at for at in ends if at > 0 and at not in broken and not all(learnt)]
    return {
        "targets": sum(learnt[1:]),
        "first": learnt.index(True) if any(learnt) else len(tokens),
        "all_learnt": all(learnt),
        "runs": len(whole),
        "ended": sum(tokens[at] in marks for at in whole),
        "last": tokens[whole[-1]] if whole else -1,
        "cut": bool(broken),
        "highest": max(tokens),
        "starts": tokens[0],
        "doubled": tokens[:2] == [bos, bos],
    }


def encoded(choice: ChatDataset, tokenizer: Tokenizer) -> TokenizedDataset:
    prepared = choice.prepare(tokenizer)
    rows = list(open_dataset(choice.source, choice.split, choice.max_samples).rows)
    kept = list(pairs(choice.encode(prepared, rows), [row.where for row in rows]))
    return TokenizedDataset([document for document, _ in kept], [where for _, where in kept])


def pairs(results, places: list[str]) -> Iterator[tuple[Document, str]]:
    for result, where in zip(results, places, strict=True):
        for document in result:
            yield document, where


def test_nothing_is_wrong_with_the_tools_that_ship(nano: Tokenizer) -> None:
    parts = [encoded(ChatDataset("tunekit/tools", split=split, max_length=256), nano) for split in ("train", "test")]
    told = run_data_checks(
        *(CheckTarget(name, [one], nano, CheckContext(256, 2048)) for name, one in zip("dv", parts, strict=True))
    )
    assert not [str(one) for one in told if one.severity != "note"]


def talks(count: int, system: bool) -> str:
    """Conversations of one to three turns, in JSON lines."""
    draw, lines = random.Random(3), []
    for row in range(count):
        head = [{"role": "system", "content": "You are brief."}] if system and row % 2 else []
        turns = []
        for _ in range(draw.randint(1, 3)):
            name = draw.choice(NAMES)
            turns.append({"role": "user", "content": f"Where is {name}, please? I looked in room {row}.\n\n- and in 3"})
            turns.append({"role": "assistant", "content": f"{name} went to room {draw.randint(1, 9)}{row}."})
        lines.append(json.dumps({"messages": head + turns}))
    return "\n".join(lines)


def test_nothing_is_wrong_with_chats_as_people_write_them(tmp_path: Path, nano: Tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text(talks(200, system=True))
    rows = encoded(ChatDataset(str(tmp_path / "rows.jsonl"), max_length=256), nano)
    assert not [
        str(one)
        for one in run_data_checks(CheckTarget("data", [rows], nano, CheckContext(256, 2048)))
        if one.severity != "note"
    ]


# What these templates do: GLM ends the last turn with nothing, SmolLM3 marks the prompt as generated, Mistral leaves a
# system message out of some conversations, Zephyr writes no beginning, which its tokenizer puts before texts. Gemma's
# end is named in a generation_config.json that is not here.
ODD = {
    "zephyr": {"bos"},
    "mistral": {"content lost"},
    "glm4": {"terminators"},
    "smollm3": {"prompt learnt"},
    "gemma2": {"stops"},
    "gemma3": {"stops"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_families_are_in_order(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path, name))
    (tmp_path / "rows.jsonl").write_text(talks(40, FAMILIES[name].system))
    rows = encoded(ChatDataset(str(tmp_path / "rows.jsonl"), max_length=4096), tokenizer)
    told = [
        one
        for one in run_data_checks(CheckTarget("data", [rows], tokenizer, CheckContext(4096)))
        if one.severity != "note"
    ]
    assert {one.kind for one in told} == ODD.get(name, set()), [str(one) for one in told]
    assert all(one.severity == "doubtful" for one in told)


def test_a_template_that_ends_no_single_turn_is_wrong(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder(tmp_path, "glm4"))
    said = [[{"role": "user", "content": f"And {n}?"}, {"role": "assistant", "content": f"So {n}."}] for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in said))
    rows = encoded(ChatDataset(str(tmp_path / "rows.jsonl"), max_length=4096), tokenizer)
    (told,) = run_data_checks(CheckTarget("data", [rows], tokenizer, CheckContext(4096)))
    assert (told.kind, told.severity, told.count) == ("terminators", "wrong", 20)
