"""Faults that tokenised rows show: each check looks at all rows by numpy and tells what it finds in a line.

`wrong`: nothing useful can come of training on it, so it does not begin. `doubtful`: seldom meant. `note`: it may be
good to know.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.row_stats import RowStats, measure_rows
from tunekit.data.tokenizer import Tokenizer

Severity = Literal["wrong", "doubtful", "note"]
SEVERITIES: tuple[Severity, ...] = ("wrong", "doubtful", "note")
SHOWN = 3  # rows that a finding names
# What is said of several rows, and of one.
ONE = {"are": "is", "ask": "asks", "begin": "begins", "do": "does", "have": "has", "hold": "holds", "say": "says"}
ONE |= {"copies": "a copy"}
COPY = "take them out, or they weigh more than others: {} is {} again"


@dataclass(frozen=True)
class Finding:
    """One fault: how bad it is, a word for programs, what was found where, and how to mend it."""

    severity: Severity
    kind: str
    config_key: str  # the config's key: data, validation
    message: str
    hint: str
    count: int = 0
    fraction: float = 0.0
    documents: tuple[int, ...] = ()  # the first documents
    row_locations: tuple[str, ...] = ()

    def __str__(self) -> str:
        places = (
            f" ({', '.join(self.row_locations)}{', ..' if self.count > len(self.row_locations) else ''})"
            if self.row_locations
            else ""
        )
        return f"{self.config_key}: {self.message}{places}; {self.hint}"


@dataclass(frozen=True)
class RewardTarget:
    """What a head learns that scores, and no words: pairs or labels, which may be so many classes."""

    kind: Literal["pairs", "labels"]
    num_labels: int | None = None  # that the config names by their number


@dataclass(frozen=True)
class CheckContext:
    """What is done with rows. `limit`: the most tokens of one; `packed` (rows,): how many documents share each row;
    `scored`: by a head that does, or else words are learnt."""

    max_length: int
    vocab_size: int | None = None
    docs_per_packed_row: np.ndarray | None = None
    num_steps: int | None = None
    warmup_steps: int | None = None
    reward_target: RewardTarget | None = None


class CheckTarget:
    """All documents that one key of a config stands for, measured; several `parts` if it is a mix."""

    def __init__(self, part: str, parts: Sequence[TokenizedDataset], tokenizer: Tokenizer, use: CheckContext) -> None:
        self.part, self.parts, self.tokenizer, self.use = part, parts, tokenizer, use
        self.measured: RowStats = measure_rows(parts, tokenizer, use.max_length)
        self.lengths, self.whole, self.signs = (
            np.concatenate([vars(documents)[name] for documents in parts]) for name in ("lengths", "whole", "signs")
        )
        self.cut = self.lengths < self.whole
        self.prints = self.measured.token_hash + self.cut  # what is cut is none of those that end there
        self.firsts = np.cumsum([0, *map(len, parts)])
        # A row may go on in further documents, which do not begin as rows do, and a stream may pass it again.
        self.places = np.concatenate([places(documents, part) for part, documents in enumerate(parts)], axis=1)
        self.begins = np.append(True, (self.places[:, 1:] != self.places[:, :-1]).any(axis=0))
        self.row_of = np.cumsum(self.begins) - 1  # of each document

    def __len__(self) -> int:
        """Rows, each of one document or of several that follow each other."""
        return int(self.row_of[-1]) + 1

    def locate(self, row: int) -> tuple[TokenizedDataset, int]:
        """The documents that hold a row, and its number there."""
        part = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return self.parts[part], row - int(self.firsts[part])

    def row_location(self, row: int) -> str:
        documents, number = self.locate(row)
        return documents.row_location(number)

    def check_rows(self, severity: Severity, kind: str, rows: np.ndarray, says: str, mend: str) -> Iterator[Finding]:
        """One, if the mask `rows` (documents,) holds any; for `{rows}` in what it says, see `worded`."""
        documents = np.flatnonzero(rows)
        if len(documents):
            _, firsts = np.unique(self.row_of[documents], return_index=True)
            count, first = len(firsts), tuple(documents[firsts[:SHOWN]].tolist())
            told, places = worded(says, count, len(self)), tuple(self.row_location(row) for row in first)
            yield Finding(severity, kind, self.part, told, mend, count, count / len(self), first, places)

    def finding(self, severity: Severity, kind: str, says: str, mend: str) -> Finding:
        """About all rows."""
        return Finding(severity, kind, self.part, says, mend)


def places(documents: TokenizedDataset, part: int) -> np.ndarray:
    """Numbers that are equal for documents of one row (3, documents)."""
    names, numbers = (documents.flat.columns[name].astype(np.int64) for name in ("names", "numbers"))
    return np.stack([np.full(len(names), part), names, numbers])


def worded(says: str, count: int, total: int) -> str:
    """A sentence with how many `{rows}` it is about, and `{have}` or another of `ONE` as it is said of so many."""
    for several, one in ONE.items():
        says = says.replace(f"{{{several}}}", one if count == 1 else several)
    return says.replace("{rows}", amount(count, total))


def amount(count: int, total: int) -> str:
    """How many rows of all."""
    if count == total:
        return "the only row" if total == 1 else f"all {total:,} rows"
    return f"{count:,} of {total:,} rows ({format_percent(count / total)})"


def format_percent(share: float) -> str:
    """A share with two digits that tell, never rounded to nothing or to all."""
    return f"{share:.0%}" if 0.1 <= share < 0.995 or share in (0, 1) else f"{share:.1%}" if share > 0.001 else "< 0.1%"


def nothing_learnt(of: CheckTarget) -> Iterator[Finding]:
    rows = of.measured.targets == 0
    if rows.all():
        yield from of.check_rows("wrong", "nothing learnt", rows, "nothing is learnt in {rows}", "see `train_on`")
    yield from of.check_rows(
        "doubtful",
        "nothing learnt",
        rows & ~rows.all(),
        "nothing is learnt in {rows}",
        "take them out, or see `train_on`",
    )


def beyond_vocabulary(of: CheckTarget) -> Iterator[Finding]:
    if of.use.vocab_size is not None:
        highest = int(of.measured.max_token.max())
        text = f"{{rows}} {{hold}} tokens that the model has no embedding for: {highest}, it knows {of.use.vocab_size}"
        rows = of.measured.max_token >= of.use.vocab_size
        yield from of.check_rows("wrong", "vocabulary", rows, text, "this tokenizer is another model's")


def terminators(of: CheckTarget) -> Iterator[Finding]:
    """Answers whose end is not learnt. Of text, and of what is cut, nothing can be said."""
    seen, turns = of.measured, of.measured.complete_turns > 0
    unended = (seen.turns_with_end < seen.complete_turns) | (of.signs & DocFlags.MISSING_END_TOKEN > 0)
    never = bool(turns.any()) and not seen.turns_with_end.any()
    says = "the end of no answer is learnt" if never else "answers of {rows} are learnt without their end"
    says += ": the model is not taught to stop"
    mend = "end turns with a special token in the chat template, or name another `chat_template`"
    yield from of.check_rows(
        "wrong" if never else "doubtful", "terminators", unended & (turns | (seen.targets > 0)), says, mend
    )


def stops(of: CheckTarget) -> Iterator[Finding]:
    """Last answers that end with a token at which generation does not stop."""
    last, tokenizer = of.measured.last_token, of.tokenizer
    rows = (last >= 0) & np.isin(last, list(tokenizer.special_ids)) & ~np.isin(last, list(tokenizer.stops))
    if rows.mean() >= 0.5:
        ends = " and ".join(tokenizer.special_ids[token] for token in sorted(set(last[rows].tolist()))[:3])
        stop = ", ".join(
            sorted(tokenizer.special_ids[token] for token in tokenizer.stops if token in tokenizer.special_ids)
        )
        says = f"answers of {{rows}} end with {ends}, and generation stops only at {stop or 'no token'}"
        mend = "add its id to `eos_token_id` in generation_config.json"
        yield from of.check_rows("doubtful", "stops", rows, says, mend)


def empty_answers(of: CheckTarget) -> Iterator[Finding]:
    scored = None if of.use.reward_target is None else of.use.reward_target.kind
    if scored == "labels":
        return  # a text may be one that answers nothing
    rows = of.begins & (of.measured.targets == 1) & (of.measured.turns_with_end == 1) | (
        of.signs & DocFlags.EMPTY_TURN > 0
    )
    judged = scored == "pairs" or bool((of.signs & (DocFlags.DESIRABLE | DocFlags.UNDESIRABLE)).any())
    taught = "that one is empty may be all that is learnt" if judged else "the model is taught to end at once"
    says = f"{{rows}} {{have}} an empty answer: {taught}"
    yield from of.check_rows("doubtful", "empty answers", rows, says, "take them out")


def cut_answers(of: CheckTarget) -> Iterator[Finding]:
    rows = of.measured.end_missing & (of.lengths < of.whole)
    severity: Severity = "doubtful" if rows.mean() >= 0.01 else "note"
    says = f"answers of {{rows}} are cut at {of.use.max_length:,} tokens, and their end is not learnt"
    yield from of.check_rows(
        severity, "cut answers", rows, says, "raise `max_length`, or `excess_length_strategy: drop`"
    )


def dropped_rows(of: CheckTarget) -> Iterator[Finding]:
    for made in (documents.prepared for documents in of.parts):
        rows = made.rows - made.filtered - made.skipped
        if made.dropped and made.dropped >= 0.1 * rows:
            says = f"{{rows}} {{are}} longer than {of.use.max_length:,} tokens, and dropped as `excess_length_strategy` says"
            told, mend = worded(says, made.dropped, rows), "raise `max_length`, or `excess_length_strategy: truncate`"
            yield Finding("doubtful", "dropped rows", of.part, told, mend, made.dropped, made.dropped / rows)


def learnt_share(of: CheckTarget) -> Iterator[Finding]:
    share = float(of.measured.targets.sum()) / max(int(of.lengths.sum()), 1)
    if 0 < share < 0.01:
        says = f"only {share:.2%} of all tokens are learnt"
        yield of.finding("doubtful", "learnt share", says, "most of the time goes into reading: shorten the context")


def duplicates(of: CheckTarget) -> Iterator[Finding]:
    """Rows that are there again, apart from those that are cut: nobody knows here what these were."""
    _, firsts, which = np.unique(of.prints, return_index=True, return_inverse=True)
    again, begins = (of.places != of.places[:, firsts[which]]).any(axis=0), np.flatnonzero(of.begins)
    rows = np.logical_and.reduceat(again, begins)[of.row_of]  # all documents of a row, or none
    cut = np.logical_or.reduceat(of.cut, begins)[of.row_of]
    alike = f"{{rows}} {{are}} like earlier ones once cut at {of.use.max_length:,} tokens"
    for kind, found, says, mend in (
        ("duplicates", rows & ~cut, "{rows} {are} {copies} of earlier ones", COPY),
        ("alike once cut", rows & cut, alike, "raise `max_length`: {} begins as {} does"),
    ):
        if found.any():
            severity: Severity = "doubtful" if found.mean() >= 0.05 else "note"
            row = int(found.argmax())
            mend = mend.format(of.row_location(row), of.row_location(int(firsts[which[row]])))
            yield from of.check_rows(severity, kind, found, says, mend)


def constant_answers(of: CheckTarget) -> Iterator[Finding]:
    answered = ~of.measured.all_targets & (of.measured.targets > 1) & ~of.measured.end_missing
    if answered.sum() >= 10:
        prints, counts = np.unique(of.measured.answer_hash[answered], return_counts=True)
        share = counts.max() / answered.sum()
        rows = answered & (of.measured.answer_hash == prints[counts.argmax()]) & (share >= 0.5)
        severity: Severity = "doubtful" if share >= 0.8 else "note"
        yield from of.check_rows(severity, "constant answers", rows, "{rows} {have} the same answer", "is that meant?")


def labels(of: CheckTarget) -> tuple[np.ndarray, np.ndarray]:
    """The labels of rows or of their steps, ascending, and how often each stands there."""
    if of.use.reward_target is None or of.use.reward_target.kind != "labels":
        return np.empty(0), np.empty(0, int)
    return np.unique(np.concatenate([np.asarray(documents.values) for documents in of.parts]), return_counts=True)


def constant_labels(of: CheckTarget) -> Iterator[Finding]:
    values, counts = labels(of)
    if counts.sum() >= 10:
        share = float(counts.max() / counts.sum())
        if share >= 0.95:
            severity: Severity = "wrong" if share == 1 else "doubtful"
            says = (
                f"{format_percent(share)} of the labels are {values[counts.argmax()]:g}: there is little to tell apart"
            )
            yield of.finding(severity, "constant labels", says, "is that meant?")


def absent_classes(of: CheckTarget) -> Iterator[Finding]:
    classes = (of.use.reward_target and of.use.reward_target.num_labels) or 0
    values, _ = labels(of)
    absent = np.setdiff1d(np.arange(classes), values).astype(int).tolist()
    if absent and len(values) > 1:  # the same label everywhere is told as that
        enough = max(int(values.max()) + 1, 2)
        names = ", ".join(map(str, absent[:SHOWN])) + ", .." * (len(absent) > SHOWN)
        says = f"no row has the label {names}: {len(absent)} of {classes} classes (`loss.num_labels`) cannot be learnt"
        mend = "is that meant?" if enough > absent[-1] else f"is that meant? loss.num_labels={enough} would do"
        yield of.finding("doubtful", "absent classes", says, mend)


def cut_rows(of: CheckTarget) -> Iterator[Finding]:
    rows = of.lengths < of.whole
    severity: Severity = "doubtful" if rows.mean() >= 0.01 else "note"
    says = f"{{rows}} {{are}} cut at {of.use.max_length:,} tokens, and scored without their end"
    yield from of.check_rows(severity, "cut rows", rows, says, "raise `max_length`, or `excess_length_strategy: drop`")


def short_rows(of: CheckTarget) -> Iterator[Finding]:
    rows = of.begins & (of.lengths <= 2)
    yield from of.check_rows("doubtful", "short", rows, "{rows} {have} only one or two tokens", "take them out")


def beginning(of: CheckTarget) -> Iterator[Finding]:
    """Whether the token that the tokenizer puts before texts is there, once."""
    twice, mark = of.measured.double_bos, of.tokenizer.names.get("bos_token", "")
    says = f"{{rows}} {{begin}} with {mark} twice: the text holds it, and it is added"
    mend = "take it out of the text or the chat template"
    yield from of.check_rows("wrong" if twice.mean() >= 0.5 else "doubtful", "bos", twice, says, mend)
    bare, lead = (of.tokenizer.encode_texts(["a"], special)[0][:1] for special in (False, True))
    missing = of.begins & (of.measured.first_token != lead[0])
    if lead != bare and missing.sum() >= 0.5 * of.begins.sum():
        text = of.tokenizer.model.id_to_token(lead[0])
        says = f"{{rows}} {{do}} not begin with {text}, which this tokenizer puts before a text"
        yield from of.check_rows("doubtful", "bos", missing, says, "let the chat template write it")


def unknown(of: CheckTarget) -> Iterator[Finding]:
    rows, share = of.measured.num_unknown > 0, float(of.measured.num_unknown.sum()) / max(int(of.lengths.sum()), 1)
    severity: Severity = "doubtful" if share >= 0.001 else "note"
    says = f"{{rows}} {{hold}} what the tokenizer cannot write: {format_percent(share)} of all tokens are unknown"
    yield from of.check_rows(severity, "unknown tokens", rows, says, "is it the tokenizer for this language?")


SIGNS: dict[DocFlags, tuple[Severity, str, str, str]] = {
    DocFlags.SPECIAL_IN_TEXT: (
        "doubtful",
        "special tokens",
        "what is said in {rows} holds the text of a special token, which becomes that token",
        "take it out of the text",
    ),
    DocFlags.PROMPT_TRAINED: (
        "doubtful",
        "prompt learnt",
        "the prompt of the answer is learnt in {rows}",
        "begin the {% generation %} block of the template behind it",
    ),
    DocFlags.TOOLS_NOT_RENDERED: (
        "doubtful",
        "tools unused",
        "{rows} {have} tools or calls that the chat template does not write",
        "name a `chat_template` that does, or take them out",
    ),
    DocFlags.REASONING_DROPPED: (
        "note",
        "reasoning dropped",
        "the chat template leaves out reasoning of {rows}",
        "if it is to be learnt, name a `chat_template` that writes it",
    ),
    DocFlags.CONTENT_LOST: (
        "doubtful",
        "content lost",
        "the chat template does not write all that {rows} {say}",
        "name a `chat_template` that does",
    ),
}


def signs(of: CheckTarget) -> Iterator[Finding]:
    for sign, (severity, kind, says, mend) in SIGNS.items():
        yield from of.check_rows(severity, kind, (of.signs & sign) > 0, says, mend)


def packing(of: CheckTarget) -> Iterator[Finding]:
    packed = of.use.docs_per_packed_row
    if packed is not None:
        alone, filled = float((packed == 1).mean()), float(of.lengths.sum()) / (len(packed) * of.use.max_length)
        if alone >= 0.9 and filled < 0.9:
            rows, tokens = format_percent(alone), format_percent(filled)
            says = f"{rows} of the packed rows hold one document, and {tokens} of them is filled"
            yield of.finding("note", "packing", says, "most documents are too long to share: raise `max_length`")


def warm_up(of: CheckTarget) -> Iterator[Finding]:
    steps, warmup = of.use.num_steps, of.use.warmup_steps
    if steps is not None and warmup is not None and warmup >= steps:
        says = f"the run ends with step {steps:,}, before its warm-up of {warmup:,} steps"
        yield of.finding("doubtful", "warm-up", says, "lower `lr_scheduler.warmup_steps`, or raise `epochs`")


def tokens_named(of: CheckTarget) -> Iterator[Finding]:
    if not of.tokenizer.stops:
        says = "the tokenizer names no token that ends an answer"
        yield of.finding("doubtful", "no end token", says, "name `eos_token` in tokenizer_config.json")
    if of.tokenizer.special_token("pad_token") is None and of.tokenizer.eos is None:
        says = f"the tokenizer names no token to pad with: {of.tokenizer.model.id_to_token(0)!r} is taken"
        yield of.finding("note", "no pad token", says, "nothing of it is learnt or seen")


def overlap(data: CheckTarget, held: CheckTarget) -> Iterator[Finding]:
    """Held-out rows that are learnt, and those whose prompt is."""
    same = np.isin(held.prints, data.prints)
    severity: Severity = "wrong" if (same & ~held.cut).mean() >= 0.5 else "doubtful"
    says = "{rows} {are} in `data` too: what is measured on them says little"
    mend = "take them out of one, or cut a `split` off"
    yield from held.check_rows(severity, "overlap", same & ~held.cut, says, mend)
    says = (
        f"{{rows}} {{are}} like rows of `data` once cut at {held.use.max_length:,} tokens: what is measured says little"
    )
    mend = "raise `max_length`, or take them out of one"
    yield from held.check_rows("doubtful", "overlap once cut", same & held.cut, says, mend)
    prompts, counts = np.unique(data.measured.prompt_hash[data.measured.first_target > 0], return_counts=True)
    own = prompts[counts <= max(10, len(data) // 200)]  # a prompt that begins many rows is not theirs
    known = (
        ~same & ~held.measured.all_targets & (held.measured.first_target > 0) & np.isin(held.measured.prompt_hash, own)
    )
    severity = "doubtful" if known.mean() >= 0.05 else "note"
    says = "{rows} {ask} what a row of `data` asks, with another answer"
    yield from held.check_rows(severity, "same prompts", known, says, "take them out of one, if answers are to be new")


Check = Callable[[CheckTarget], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    nothing_learnt,
    beyond_vocabulary,
    terminators,
    beginning,
    signs,
    stops,
    cut_answers,
    dropped_rows,
    empty_answers,
    constant_answers,
    duplicates,
    short_rows,
    learnt_share,
    unknown,
    packing,
    warm_up,
)
# Of a model that writes nothing.
WRITING = {terminators, stops, cut_answers, constant_answers, learnt_share, tokens_named}
SCORING: tuple[Check, ...] = (cut_rows, constant_labels)


def checks(of: CheckTarget, *more: Check) -> Iterator[Finding]:
    """What all checks find that ask for what is done with these rows."""
    scored = of.use.reward_target is not None
    wanted = [*(one for one in (*CHECKS, *more) if not scored or one not in WRITING), *(SCORING if scored else ())]
    return chain.from_iterable(check(of) for check in wanted)


def run_data_checks(data: CheckTarget, held: CheckTarget | None = None) -> list[Finding]:
    """All that is found, the worst first."""
    found = [*checks(data, tokens_named, absent_classes)]
    if held is not None:
        found += [*checks(held), *overlap(data, held)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
