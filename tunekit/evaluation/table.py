"""What was found, for people: a line for each figure, a column for each model, and what has changed."""

from collections.abc import Sequence

from tunekit.evaluation.results import Metric, ModelResult, perplexity
from tunekit.evaluation.significance import PairedDifference

VERDICTS = {True: "better", False: "worse", None: "no clear change"}
OTHER = "not compared: other rows or tokens"  # a row has as many tokens as a model's own tokenizer makes of it


def results_table(results: Sequence[ModelResult], changes: Sequence[PairedDifference]) -> str:
    """All figures of all models; the change is from the first model to the second."""
    told = {(change.task, change.name): difference(change) for change in changes}
    rows = [["", "", *(result.model for result in results), "change" if len(results) > 1 else ""]]
    before = ""
    for name in results[-1].figures:
        cells = [shown(result.figures[name]) if name in result.figures else "-" for result in results]
        apart = len(results) > 1 and all(name in one.figures and one.figures[name].values for one in results)
        change = told.get(name, OTHER if apart else "")
        rows.append(["" if name[0] == before else name[0], name[1], *cells, change])
        before = name[0]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def shown(figure: Metric) -> str:
    """Rows that are right with their number, and a loss with its perplexity."""
    if figure.counted:
        return f"{figure.value:.1%} ({figure.right} of {len(figure.values)})"
    number = f"{figure.value:.4f}" if abs(figure.value) < 1000 else f"{figure.value:.4g}"
    return f"{number} (perplexity {perplexity(figure.value):.4g})" if figure.name == "loss" else number


def difference(change: PairedDifference) -> str:
    """With its bounds and, of rows that are right or wrong, how many changed sides."""
    of, form = (1, "+.4f") if change.won is None else (100, "+.1f")
    gap, low, high = (format(value * of, form) for value in (change.difference, change.low, change.high))
    text = f"{gap} [{low}, {high}]"
    if change.won is not None and change.lost is not None:
        text += f" {len(change.won)} won, {len(change.lost)} lost"
    return f"{text}: {VERDICTS[change.better]}"
