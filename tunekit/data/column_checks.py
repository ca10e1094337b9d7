"""Data checks on columns: those that no key reads, and text that is a serialized conversation."""

from collections.abc import Iterator, Sequence

from tunekit.data.check_target import NO_READERS, CheckTarget, ColumnReaders, Finding, Severity, format_row_count
from tunekit.data.column_usage import IN_MESSAGE, ColumnReport, merge_reports

UNUSED = "unused columns"  # kind of a finding that runs log even as a note
REMOVE_HINT = "To ignore {it}, add {{kind: remove_columns, columns: [{names}]}} to `transforms`"
CONTEXT_HINT = "Name {it} in `columns`, or rename {it} with `transforms`. " + REMOVE_HINT
MESSAGE_HINT = "Remove {it} from the messages, or write {it} in the chat template"
READER_HINT = "Only rewards or the environment get {it}. " + REMOVE_HINT
SERIALIZED_HINT = "Store messages as a list, or as a JSON string with only the list; or set data_checks=warn"


def find_columns(target: CheckTarget) -> Iterator[Finding]:
    """Columns that the format does not read, and text that is a conversation."""
    reports = merge_reports(*(dataset.summary.columns for dataset in target.datasets))
    summaries = [dataset.summary for dataset in target.datasets]
    num_rows = sum(summary.rows - summary.filtered - summary.skipped for summary in summaries)
    yield from column_findings(target.config_key, reports, num_rows or len(target), target.context.column_readers)


def column_findings(
    config_key: str, reports: Sequence[ColumnReport], num_rows: int, readers: ColumnReaders = NO_READERS
) -> Iterator[Finding]:
    """Findings about the columns of `num_rows` rows.

    A column that models usually read is an error, because the model does not see it. It is doubtful if a reward
    function or an environment that takes any keyword gets it. A few serialized conversations may be meant as text.
    """
    unused = [report for report in reports if report.name not in readers.names]
    for in_message in (False, True):
        group = [report for report in unused if (IN_MESSAGE in report.name) == in_message]
        context = [report for report in group if report.usage == "context"]
        unread = [report for report in group if report.usage == "unread"]
        severity: Severity = "doubtful" if readers.get_all else "wrong"
        if context:
            message = "the model does not see {names}, which {have} text in {rows}"
            hint = MESSAGE_HINT if in_message else READER_HINT if readers.get_all else CONTEXT_HINT
            yield make_finding(config_key, severity, "unused context", context, num_rows, message, hint)
        if unread and not readers.get_all:
            hint = MESSAGE_HINT if in_message else REMOVE_HINT
            yield make_finding(config_key, "note", UNUSED, unread, num_rows, "{names} {are} not used in {rows}", hint)
    for report in reports:
        if report.usage == "serialized":
            severity = "wrong" if report.num_rows >= 0.5 * num_rows else "doubtful"
            message = "{names} {have} messages as JSON or Python text in {rows}, and is trained on as it is"
            yield make_finding(
                config_key, severity, "serialized messages", [report], num_rows, message, SERIALIZED_HINT
            )


def make_finding(
    config_key: str,
    severity: Severity,
    kind: str,
    columns: Sequence[ColumnReport],
    num_rows: int,
    message: str,
    hint: str,
) -> Finding:
    """Finding about columns. Templates contain `{names}`, `{rows}`, `{it}`, `{are}` and `{have}`."""
    first = max(columns, key=lambda report: report.num_rows)
    total, names = max(first.num_rows, num_rows), ", ".join(report.name for report in columns)
    listed = ", ".join(repr(report.name) for report in columns)
    if len(columns) == 1:
        words = {"it": "it", "are": "is", "have": "has", "names": f"column {listed}"}
    else:
        words = {"it": "them", "are": "are", "have": "have", "names": f"columns {listed}"}
    text = message.format(rows=format_row_count(first.num_rows, total), **words)
    hint = hint.format(**words | {"names": names})
    return Finding(
        severity, kind, config_key, text, hint, first.num_rows, first.num_rows / total, row_locations=first.locations
    )
