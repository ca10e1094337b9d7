"""The report that a user attaches to an issue: JSON for programs, Markdown for readers. It has no names or paths."""

import getpass
import json
import math
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunekit.hub import redact as discreet
from tunekit.selftest.checklist import SYSTEM
from tunekit.selftest.result import Outcome

VERSION = 1  # of the format
PATH = re.compile(r"(?<![\w./])(?:/[\w.@+~=-]+){2,}")
SHORTEST = 3  # characters of a name that is removed: shorter ones appear inside words
COMMON = {"root", "user", "localhost"}  # names that identify no one
STATUSES = ("passed", "failed", "skipped")


def build_report(outcomes: Sequence[Outcome], options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The report as plain data, without secrets."""
    system = next((outcome.values for outcome in outcomes if outcome.check == SYSTEM), {})
    counts = Counter(outcome.status for outcome in outcomes)
    checks = [asdict(outcome) | {"seconds": round(outcome.seconds, 2)} for outcome in outcomes]
    return {
        "tunekit_selftest": VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "options": dict(options),
        "seconds": round(seconds, 1),
        "counts": {status: counts[status] for status in STATUSES},
        "system": redact_value(system),
        "checks": [redact_value(check | ({"values": {}} if check["check"] == SYSTEM else {})) for check in checks],
    }


def redact_value(value: Any) -> Any:
    """Plain data without secrets, paths, the name of the user and that of the machine. NaN and Inf become null."""
    if isinstance(value, Mapping):
        return {key: redact_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    text = PATH.sub(lambda match: Path(match[0]).name, discreet.redact_text(text))
    for name in personal_names():
        text = re.sub(rf"\b{re.escape(name)}\b", discreet.HIDDEN, text)
    return text


def personal_names() -> list[str]:
    """Names of the user and of the machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        user = ""
    names = {user, platform.node(), platform.node().partition(".")[0]} - COMMON
    return sorted((name for name in names if len(name) >= SHORTEST), key=len, reverse=True)


def write_report(document: Mapping[str, Any], json_file: Path, markdown_file: Path) -> None:
    """Write both files."""
    json_file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    markdown_file.write_text(format_markdown(document), encoding="utf-8")


def format_markdown(document: Mapping[str, Any]) -> str:
    """The same for readers: failures first."""
    counts = ", ".join(f"{count} {status}" for status, count in document["counts"].items())
    parts = [
        f"# tune selftest, {document['date']}\n\n{counts} in {document['seconds']:.0f} s.{options_line(document)}\n"
    ]
    failed = [check for check in document["checks"] if check["status"] == "failed"]
    if failed:
        parts.append("## Failed\n\n" + "\n".join(map(format_failure, failed)) + "\n")
    parts.append("## System\n\n" + format_table(("item", "value"), system_rows(document["system"])))
    groups = dict.fromkeys(c["check"].partition(".")[0] for c in document["checks"] if c["check"] != SYSTEM)
    for group in groups:
        checks = [check for check in document["checks"] if check["check"].startswith(f"{group}.")]
        rows = [(c["check"], c["status"], f"{c['seconds']:.1f}", c["detail"]) for c in checks]
        parts.append(f"## {group.capitalize()}\n\n" + format_table(("check", "status", "seconds", "result"), rows))
    return "\n".join(parts)


def options_line(document: Mapping[str, Any]) -> str:
    options = document["options"]
    words = [f"--device {options['device']}", *(["--quick"] if options["quick"] else [])]
    words += [f"--only {name}" for name in options["only"]]
    return f" Options: {' '.join(words)}."


def format_failure(check: Mapping[str, Any]) -> str:
    """A failed check, with the last lines of its process if it crashed."""
    log = check["values"].get("log", [])
    block = "\n\n```\n" + "\n".join(log) + "\n```\n" if log else ""
    return f"- **{check['check']}**: {check['detail']}{block}"


def system_rows(system: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Versions and hardware as rows. GPUs have a row each."""
    rows = []
    for key, value in system.items():
        if key == "gpus":
            rows += [(f"GPU {i}", ", ".join(f"{k} {v}" for k, v in gpu.items())) for i, gpu in enumerate(value)]
        elif isinstance(value, Mapping):
            rows += [(key, ", ".join(f"{k}={v}" for k, v in value.items() if v is not None))] if value else []
        elif value is not None:
            rows.append((key, str(value)))
    return rows


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
