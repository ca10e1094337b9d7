"""Data checks on labels: of one class only, of classes that no row has, or values that the loss cannot use."""

from collections.abc import Iterator

import numpy as np

from tunekit.data.check_target import MAX_LISTED, CheckTarget, Finding, LabelRule, Severity, format_percent
from tunekit.data.document import DocFlags
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset

MIN_LABELS = 10  # of which 95% are the same by more than chance


def count_labels(target: CheckTarget) -> tuple[np.ndarray, np.ndarray]:
    """Distinct labels of the rows or of their steps, ascending, and their counts."""
    if target.context.reward_target is None or target.context.reward_target.kind != "labels":
        return np.empty(0), np.empty(0, int)
    labels = np.concatenate([np.asarray(dataset.values) for dataset in target.datasets])
    return np.unique(labels, return_counts=True)


def find_constant_labels(target: CheckTarget) -> Iterator[Finding]:
    values, counts = count_labels(target)
    if counts.sum() > 1:
        yield from report_majority(target, f"{values[counts.argmax()]:g}", int(counts.max()), int(counts.sum()))


def find_one_sided_preferences(target: CheckTarget) -> Iterator[Finding]:
    """Answers that are all desirable, or all undesirable. Pairs have as many of both."""
    counts = [int((target.doc_flags & flag > 0).sum()) for flag in (DocFlags.DESIRABLE, DocFlags.UNDESIRABLE)]
    if sum(counts) > 1:
        yield from report_majority(target, "true" if counts[0] > counts[1] else "false", max(counts), sum(counts))


def report_majority(target: CheckTarget, label: str, count: int, total: int) -> Iterator[Finding]:
    """Yield a finding if `count` of `total` labels are the same one. Few held-out rows may be of one class."""
    fraction = count / total
    if fraction == 1 or (fraction >= 0.95 and total >= MIN_LABELS):
        is_wrong = fraction == 1 and (target.config_key == "data" or total >= MIN_LABELS)
        severity: Severity = "wrong" if is_wrong else "doubtful"
        message = f"{format_percent(fraction)} of the labels are {label}"
        yield target.report(
            severity, "constant labels", message, "Add rows with other labels, without which there is nothing to learn"
        )


def find_invalid_labels(target: CheckTarget) -> Iterator[Finding]:
    """Labels that the loss cannot use."""
    rule, mask, first = target.context.label_rule, np.zeros(len(target.lengths), bool), None
    if rule is None:
        return
    for dataset, start in zip(target.datasets, target.documents.starts, strict=False):
        documents, values = invalid_labels(dataset, rule)
        mask[start + documents] = True
        first = values[0] if first is None and len(values) else first
    if first is not None:
        message = f"{{rows}} {{have}} a label that the loss cannot use: {rule.reason(float(first))}"
        yield from target.report_rows("labels", mask, message, "Correct them, or set another loss", wrong=0.0)


def invalid_labels(dataset: TokenizedDataset, rule: LabelRule) -> tuple[np.ndarray, np.ndarray]:
    """Documents of a dataset with a label that a loss cannot use, and these labels."""
    values = np.asarray(dataset.values)
    if dataset.value_ends is None:
        return np.empty(0, int), values
    indices = np.flatnonzero(rule.is_invalid(values))
    return np.searchsorted(dataset.value_ends, indices, side="right"), values[indices]


def find_absent_classes(target: CheckTarget) -> Iterator[Finding]:
    num_labels = (target.context.reward_target and target.context.reward_target.num_labels) or 0
    values, _ = count_labels(target)
    absent = np.setdiff1d(np.arange(num_labels), values).astype(int).tolist()
    if absent and len(values) > 1:  # a single label is reported by `find_constant_labels`
        required = max(int(values.max()) + 1, 2)
        labels = ", ".join(map(str, absent[:MAX_LISTED])) + ", .." * (len(absent) > MAX_LISTED)
        message = f"no row has the label {labels}: {len(absent)} of {num_labels} classes (`loss.num_labels`) are unused"
        hint = "Check that this is intended" + ("" if required > absent[-1] else f", or set loss.num_labels={required}")
        yield target.report("doubtful", "absent classes", message, hint)
