"""Table of results: a line per metric, a column per model, and the change."""

from collections.abc import Sequence

from tunekit.evaluation.results import Metric, ModelResult, perplexity
from tunekit.evaluation.significance import PairedDifference

VERDICTS = {True: "better", False: "worse", None: "no clear change"}
NOT_COMPARED = "not compared: other rows or tokens"  # tokenizers differ in the number of tokens of a row


def results_table(results: Sequence[ModelResult], changes: Sequence[PairedDifference]) -> str:
    """All metrics of all models, and the changes from the first model to the second."""
    formatted = {(change.task, change.name): format_difference(change) for change in changes}
    rows = [["", "", *(result.model for result in results), "change" if len(results) > 1 else ""]]
    previous_task = ""
    for key in results[-1].metrics:
        cells = [format_metric(result.metrics[key]) if key in result.metrics else "-" for result in results]
        has_rows = len(results) > 1 and all(key in result.metrics and result.metrics[key].values for result in results)
        change = formatted.get(key, NOT_COMPARED if has_rows else "")
        task, name = key
        rows.append(["" if task == previous_task else task, name, *cells, change])
        previous_task = task
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def format_metric(metric: Metric) -> str:
    """Share and number of correct rows, a loss with its perplexity, or a number."""
    if metric.is_binary:
        return f"{metric.value:.1%} ({metric.num_correct} of {len(metric.values)})"
    number = f"{metric.value:.4f}" if abs(metric.value) < 1000 else f"{metric.value:.4g}"
    return f"{number} (perplexity {perplexity(metric.value):.4g})" if metric.name == "loss" else number


def format_difference(change: PairedDifference) -> str:
    """Difference with its interval, the numbers of rows won and lost, and the verdict."""
    scale, spec = (1, "+.4f") if change.won is None else (100, "+.1f")
    difference, low, high = (format(value * scale, spec) for value in (change.difference, change.low, change.high))
    text = f"{difference} [{low}, {high}]"
    if change.won is not None and change.lost is not None:
        text += f" {len(change.won)} won, {len(change.lost)} lost"
    return f"{text}: {VERDICTS[change.better]}"
