"""Report of an import: keys that could not be mapped, those with another meaning, and those that are not needed."""

from collections.abc import Iterator, Sequence

from tunekit.importers.draft import Effect, Finding, to_single_line

HEADINGS: dict[Effect, str] = {
    "not mapped": "not mapped",
    "differs": "mapped with a difference",
    "not needed": "not needed here",
}


def format_findings(findings: Sequence[Finding]) -> str:
    """Findings by effect. Keys with the same note share a line; an empty text without findings."""
    return "\n".join(line for effect in HEADINGS for line in format_effect(effect, findings))


def format_effect(effect: Effect, findings: Sequence[Finding]) -> Iterator[str]:
    by_note: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.effect == effect:
            by_note.setdefault(finding.note, []).append(finding)
    if by_note:
        yield f"{HEADINGS[effect]}:"
    for note, group in by_note.items():
        keys = to_single_line(", ".join(dict.fromkeys(finding.key for finding in group)))
        shown = str(group[0]).partition(" - ")[0] if len(group) == 1 and effect != "not needed" else keys
        yield f"  {shown}: {to_single_line(note.removeprefix('not needed: '))}"
