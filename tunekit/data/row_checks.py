"""Data checks on tokenized rows: each check looks at all rows of a dataset and yields findings.

Severities: `wrong` stops a run before training, because training on the rows is useless; `doubtful` is rarely intended;
`note` is for information.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from tunekit.data.chat_template.chat_format import (
    advise_on_markers,
    describe_unread_kwargs,
    find_doubtful_markers,
    find_end_of_turn,
    find_split_markers,
)
from tunekit.data.check_target import SEVERITIES, CheckTarget, Finding, Severity, format_message, format_percent
from tunekit.data.column_checks import find_columns
from tunekit.data.document import DocFlags
from tunekit.data.flag_findings import FLAG_FINDINGS
from tunekit.data.label_checks import (
    find_absent_classes,
    find_constant_labels,
    find_invalid_labels,
    find_one_sided_preferences,
)
from tunekit.data.tokenize import bos_ids

TRUNCATION_HINT = "Raise `max_length`, or set `excess_length_strategy: drop`"
DUPLICATE_HINT = "Remove them: repeated rows have a higher weight. {} is a copy of {}"


def find_rows_without_targets(target: CheckTarget) -> Iterator[Finding]:
    mask, message = target.stats.targets == 0, "{rows} {have} no target tokens"
    yield from target.report_rows("no target tokens", mask, message, "Change `train_on`, or remove them", wrong=1.0)


def find_tokens_beyond_vocab(target: CheckTarget) -> Iterator[Finding]:
    vocab_size = target.context.vocab_size
    if vocab_size is not None:
        max_token = int(target.stats.max_token.max())
        message = f"{{rows}} {{contain}} tokens without an embedding: token id {max_token}, vocabulary of {vocab_size}"
        mask = target.stats.max_token >= vocab_size
        yield from target.report_rows("vocabulary", mask, message, "Use the tokenizer of this model", wrong=0.0)


def find_missing_end_tokens(target: CheckTarget) -> Iterator[Finding]:
    """Answers whose end token is not a target. Ignores plain text, truncated answers, and segments before the last."""
    stats, is_segments = target.stats, target.is_segments
    num_turns = np.where(is_segments, (stats.complete_turns > 0) & ~stats.end_missing, stats.complete_turns)
    last_has_end = np.isin(stats.last_token, list(target.tokenizer.special_ids))
    num_with_end = np.where(is_segments, last_has_end & ~stats.end_missing, stats.turns_with_end)
    is_missing = (num_with_end < num_turns) | (target.doc_flags & DocFlags.MISSING_END_TOKEN > 0)
    all_missing = bool(num_turns.any()) and not num_with_end.any()
    message = "no answer has an end token as target" if all_missing else "answers of {rows} have no end token as target"
    message += ": the model is not trained to stop"
    hint = "End turns with a special token, in the rows or with another `chat_template`"
    hint = "End the last target with a special token" if is_segments.all() else hint
    mask, wrong = is_missing & ((num_turns > 0) | (stats.targets > 0)), 0.0 if all_missing else math.inf
    yield from target.report_rows("terminators", mask, message, hint, wrong=wrong)


def find_unknown_stop_tokens(target: CheckTarget) -> Iterator[Finding]:
    """Last answers whose end token does not stop generation."""
    last_token, tokenizer = target.stats.last_token, target.tokenizer
    is_special = np.isin(last_token, list(tokenizer.special_ids))
    mask = (last_token >= 0) & is_special & ~np.isin(last_token, list(tokenizer.stops))
    if mask.mean() >= 0.5:
        special_ids = tokenizer.special_ids
        ends = " and ".join(special_ids[token] for token in sorted(set(last_token[mask].tolist()))[:3])
        stops = ", ".join(sorted(special_ids[token] for token in tokenizer.stops if token in special_ids))
        message = f"answers of {{rows}} end with {ends}, but generation stops only at {stops or 'no token'}"
        hint = "Add its id to `eos_token_id` in generation_config.json"
        yield from target.report_rows("stops", mask, message, hint)


def find_empty_answers(target: CheckTarget) -> Iterator[Finding]:
    kind = None if target.context.reward_target is None else target.context.reward_target.kind
    if kind == "labels":
        return  # a labeled text need not be an answer
    is_merged = (target.doc_flags & DocFlags.FIRST_TOKEN_MERGED) > 0  # the answer is not empty, its targets are
    is_end_only = (target.stats.targets == 1) & (target.stats.turns_with_end == 1) & ~is_merged
    mask = target.starts_row & is_end_only | (target.doc_flags & DocFlags.EMPTY_TURN > 0)
    has_preferences = bool((target.doc_flags & (DocFlags.DESIRABLE | DocFlags.UNDESIRABLE)).any())
    is_preference = kind == "pairs" or has_preferences
    effect = "the model may only learn to prefer or avoid them" if is_preference else "the model learns to stop at once"
    message = f"{{rows}} {{have}} an empty answer: {effect}"
    yield from target.report_rows("empty answers", mask, message, "Remove them")


def find_template_problems(target: CheckTarget) -> Iterator[Finding]:
    """Values that the chat template does not read, and markers that are several tokens each."""
    tokenizer = target.tokenizer
    if message := describe_unread_kwargs(tokenizer):
        hint = "Remove them, or use a template that reads them"
        yield target.report("doubtful", "template variables", message, hint)
    if markers := find_split_markers(tokenizer):
        is_doubtful = bool(find_doubtful_markers(tokenizer, markers)) or not find_end_of_turn(tokenizer)
        severity: Severity = "doubtful" if is_doubtful else "note"
        message = f"the chat template writes {' and '.join(markers)}, which this tokenizer splits into several tokens"
        hint = f"{advise_on_markers(tokenizer, markers)}, or use a template whose markers are tokens"
        yield target.report(severity, "template markers", message, hint)


def find_truncated_answers(target: CheckTarget) -> Iterator[Finding]:
    mask, message = target.stats.end_missing & target.is_truncated, "answers of {rows} are truncated to {limit}"
    yield from target.report_rows(
        "truncated answers", mask, f"{message}, without their end token", TRUNCATION_HINT, doubtful=0.01
    )


def find_dropped_rows(target: CheckTarget) -> Iterator[Finding]:
    for summary in (dataset.summary for dataset in target.datasets):
        num_rows = summary.rows - summary.filtered - summary.skipped
        if summary.dropped and summary.dropped >= 0.1 * num_rows:
            limit = f"{target.context.max_length:,} tokens"
            message = f"{{rows}} {{are}} longer than {limit} and dropped (`excess_length_strategy`)"
            text = format_message(message, summary.dropped, num_rows)
            hint = "Raise `max_length`, or set `excess_length_strategy: truncate`"
            fraction = summary.dropped / num_rows
            yield Finding("doubtful", "dropped rows", target.config_key, text, hint, summary.dropped, fraction)


def find_rows_beyond_context(target: CheckTarget) -> Iterator[Finding]:
    """Documents longer than the positions that the model was trained on."""
    context = target.tokenizer.max_position_embeddings
    if context is not None:
        message = f"{{rows}} {{are}} longer than the {context:,} positions of the model (`max_position_embeddings`)"
        hint = f"Lower `max_length` to {context}, or use a model with a longer context"
        yield from target.report_rows("context length", target.lengths > context, message, hint)


def find_low_target_fraction(target: CheckTarget) -> Iterator[Finding]:
    fraction = float(target.stats.targets.sum()) / max(int(target.lengths.sum()), 1)
    if 0 < fraction < 0.01:
        message = f"only {fraction:.2%} of all tokens are target tokens"
        yield target.report(
            "doubtful", "target fraction", message, "Shorten the prompts: they take most of the compute"
        )


def find_duplicates(target: CheckTarget) -> Iterator[Finding]:
    """Duplicate rows; separately those that are truncated, whose full texts may differ."""
    _, firsts, inverse = np.unique(target.row_hashes, return_index=True, return_inverse=True)
    is_duplicate = (target.row_ids != target.row_ids[:, firsts[inverse]]).any(axis=0)
    is_truncated = target.reduce_over_rows(np.logical_or, target.is_truncated)
    truncated_message = "{rows} {are} equal to earlier ones when truncated to {limit}"
    truncated_hint = "Raise `max_length`: {} begins like {}"
    for kind, mask, message, hint in (
        ("duplicates", is_duplicate & ~is_truncated, "{rows} {are} {copies} of earlier ones", DUPLICATE_HINT),
        ("truncated duplicates", is_duplicate & is_truncated, truncated_message, truncated_hint),
    ):
        if mask.any():
            document = int(mask.argmax())
            locations = map(target.documents.row_location, (document, int(firsts[inverse[document]])))
            yield from target.report_rows(kind, mask, message, hint.format(*locations), doubtful=0.05)


def find_constant_answers(target: CheckTarget) -> Iterator[Finding]:
    has_answer = ~target.stats.all_targets & (target.stats.targets > 1) & ~target.stats.end_missing
    if has_answer.sum() >= 10:
        hashes, counts = np.unique(target.stats.answer_hash[has_answer], return_counts=True)
        fraction = counts.max() / has_answer.sum()
        mask = has_answer & (target.stats.answer_hash == hashes[counts.argmax()]) & (fraction >= 0.5)
        message, doubtful = "{rows} {have} the same answer", 0.0 if fraction >= 0.8 else math.inf
        yield from target.report_rows("constant answers", mask, message, "Check that this is intended", doubtful)


def find_truncated_rows(target: CheckTarget) -> Iterator[Finding]:
    message = "{rows} {are} truncated to {limit} and scored without their end"
    yield from target.report_rows("truncated rows", target.is_truncated, message, TRUNCATION_HINT, doubtful=0.01)


def find_short_rows(target: CheckTarget) -> Iterator[Finding]:
    mask = target.starts_row & (target.lengths <= 2)
    yield from target.report_rows("short", mask, "{rows} {have} only one or two tokens", "Remove them")


def find_bos_problems(target: CheckTarget) -> Iterator[Finding]:
    """Rows with two BOS tokens, and a dataset without the BOS token that the tokenizer adds to texts."""
    is_double, bos_text = target.stats.double_bos, target.tokenizer.names.get("bos_token", "")
    message = f"{{rows}} {{begin}} with {bos_text} twice: the text contains it, and the tokenizer adds it"
    yield from target.report_rows("bos", is_double, message, "Remove it from the text or the chat template", wrong=0.5)
    bos = bos_ids(target.tokenizer)
    is_missing = target.starts_row & ~np.isin(target.stats.first_token, bos[:1])
    if len(bos) and is_missing.sum() >= 0.5 * target.starts_row.sum():
        token = target.tokenizer.model.id_to_token(int(bos[0]))
        message = f"{{rows}} {{do}} not begin with {token}, which this tokenizer adds to the start of texts"
        hint = f"Start the first segment with {token}" if target.is_segments.all() else "Add it to the chat template"
        yield from target.report_rows("bos", is_missing, message, hint)


def find_unknown_tokens(target: CheckTarget) -> Iterator[Finding]:
    fraction = float(target.stats.num_unknown.sum()) / max(int(target.lengths.sum()), 1)
    doubtful = 0.0 if fraction >= 0.001 else math.inf
    message = f"{{rows}} {{contain}} text that the tokenizer cannot encode: {format_percent(fraction)} unknown tokens"
    hint = "Check that the tokenizer supports this language"
    yield from target.report_rows("unknown tokens", target.stats.num_unknown > 0, message, hint, doubtful)


def find_flagged_rows(target: CheckTarget) -> Iterator[Finding]:
    for flag, (kind, message, hint) in FLAG_FINDINGS.items():
        doubtful = math.inf if flag is DocFlags.REASONING_DROPPED else 0.0
        is_wrong = flag is DocFlags.NEGATIVES_UNUSED and not target.context.has_num_negatives
        wrong = 0.0 if is_wrong else math.inf
        yield from target.report_rows(kind, (target.doc_flags & flag) > 0, message, hint, doubtful, wrong)


def find_poor_packing(target: CheckTarget) -> Iterator[Finding]:
    num_docs = target.context.docs_per_packed_row
    if num_docs is not None:
        single_fraction = float((num_docs == 1).mean())
        fill_ratio = float(target.lengths.sum()) / (len(num_docs) * target.context.max_length)
        if single_fraction >= 0.9 and fill_ratio < 0.9:
            single, fill = format_percent(single_fraction), format_percent(fill_ratio)
            message = f"{single} of the packed rows have one document, and only {fill} of their tokens are used"
            yield target.report("note", "packing", message, "Raise `max_length` so that documents can share rows")


def find_long_warmup(target: CheckTarget) -> Iterator[Finding]:
    num_steps, warmup_steps = target.context.num_steps, target.context.warmup_steps
    if num_steps is not None and warmup_steps is not None and warmup_steps >= num_steps:
        hint = f"Lower `lr_scheduler.warmup_steps`, or raise `{target.context.length_key}`"
        message = f"the warmup of {warmup_steps:,} steps does not end before the last step ({num_steps:,})"
        yield target.report("doubtful", "warm-up", message, hint)


def find_missing_special_tokens(target: CheckTarget) -> Iterator[Finding]:
    tokenizer = target.tokenizer
    if not tokenizer.stops:
        message = "the tokenizer has no token that ends an answer"
        yield target.report("doubtful", "no end token", message, "Set `eos_token` in tokenizer_config.json")
    if tokenizer.special_token("pad_token") is None and tokenizer.eos is None:
        message = f"the tokenizer has no padding token: {tokenizer.model.id_to_token(0)!r} is used"
        yield target.report("note", "no pad token", message, "No action is needed: padding is not part of the loss")


def find_overlap(train: CheckTarget, held_out: CheckTarget) -> Iterator[Finding]:
    """Held-out rows that are in the training data, and those whose prompt is.

    Whole rows are compared: queries with different documents may share a negative, and pairs of texts one of them.
    """
    is_same = np.isin(held_out.row_hashes, train.row_hashes)
    is_truncated = held_out.reduce_over_rows(np.logical_or, held_out.is_truncated)
    message = "{rows} {are} also in `data`: their loss does not measure generalization"
    hint = "Remove them from one of both, or use separate slices of a `split`"
    yield from held_out.report_rows("overlap", is_same & ~is_truncated, message, hint, wrong=0.5)
    message = "{rows} {are} equal to rows of `data` when truncated to {limit}: their loss may not be meaningful"
    hint = "Raise `max_length`, or remove them from one of both"
    yield from held_out.report_rows("truncated overlap", is_same & is_truncated, message, hint)
    prompts, counts = np.unique(train.stats.prompt_hash[train.stats.first_target > 0], return_counts=True)
    rare_prompts = prompts[counts <= max(10, len(train) // 200)]  # common prompts, such as instructions, are no overlap
    has_prompt = ~held_out.stats.all_targets & (held_out.stats.first_target > 0)
    is_known = np.isin(held_out.hashes, train.hashes)
    same_prompt = ~is_known & has_prompt & np.isin(held_out.stats.prompt_hash, rare_prompts)
    message = "{rows} {have} the prompt of a row of `data`, with another answer"
    hint = "Remove them from one of both if evaluation needs new prompts"
    yield from held_out.report_rows("same prompts", same_prompt, message, hint, doubtful=0.05)


Check = Callable[[CheckTarget], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    find_rows_without_targets,
    find_tokens_beyond_vocab,
    find_missing_end_tokens,
    find_bos_problems,
    find_flagged_rows,
    find_unknown_stop_tokens,
    find_template_problems,
    find_truncated_answers,
    find_dropped_rows,
    find_columns,
    find_one_sided_preferences,
    find_rows_beyond_context,
    find_empty_answers,
    find_constant_answers,
    find_duplicates,
    find_short_rows,
    find_low_target_fraction,
    find_unknown_tokens,
    find_poor_packing,
    find_long_warmup,
)
# Checks that only apply to models that generate text.
GENERATION_CHECKS = {
    find_missing_end_tokens,
    find_unknown_stop_tokens,
    find_truncated_answers,
    find_constant_answers,
    find_low_target_fraction,
    find_missing_special_tokens,
}
REWARD_CHECKS: tuple[Check, ...] = (find_truncated_rows, find_constant_labels, find_invalid_labels)


def run_checks(target: CheckTarget, *extra_checks: Check) -> Iterator[Finding]:
    """Findings of all checks that apply to the use of the rows."""
    is_reward = target.context.reward_target is not None
    for check in (*CHECKS, *extra_checks, *(REWARD_CHECKS if is_reward else ())):
        if not (is_reward and check in GENERATION_CHECKS):
            yield from check(target)


def run_data_checks(train: CheckTarget, held_out: CheckTarget | None = None) -> list[Finding]:
    """All findings, the most severe first."""
    findings = [*run_checks(train, find_missing_special_tokens, find_absent_classes)]
    if held_out is not None:
        findings += [*run_checks(held_out), *find_overlap(train, held_out)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
