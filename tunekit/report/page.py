"""Web page of one or several runs: one file without network access."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from tunekit.checkpoint.atomic import write_text_atomic
from tunekit.checkpoint.run_dir import REPORT
from tunekit.config.dump import to_yaml
from tunekit.config.secrets import escape_control, hide_secrets, map_strings
from tunekit.report import facts
from tunekit.report.curves import make_charts
from tunekit.report.run_files import RunFiles, read_run
from tunekit.rollouts.episode_page import EPISODE_KEYS, describe_episode
from tunekit.templates.render import render_template

MAX_SAMPLES, MAX_TEXT = 12, 2000  # prompts of a run, and characters of a text
MAX_EPISODES, MAX_EPISODE_TOKENS = 4, 2500  # of a run; a token has 150 bytes


def write_run_report(directory: Path) -> Path:
    """Write `report.html` into a run directory and return it."""
    return write_report([read_run(directory)], directory / REPORT)


def write_report(runs: Sequence[RunFiles], file: Path) -> Path:
    """Write the page of some runs and return the file."""
    write_text_atomic(file, render_report(runs))
    return file


def render_report(runs: Sequence[RunFiles], reload_seconds: int = 0) -> str:
    """Page of some runs, side by side. With `reload_seconds`, an open page loads itself again."""
    names = unique_names(runs)
    groups = make_charts(runs)
    charts = [chart.to_dict() for _, members in groups for chart in members]
    data = {"runs": [escape_control(name) for name in names], "charts": charts, "reload": reload_seconds}
    return render_template(
        "report.html.j2",
        title=", ".join(names),
        names=names,
        groups=[(title, [chart.metric for chart in members]) for title, members in groups],
        data=htmlsafe_json_dumps(data, json.dumps, separators=(",", ":"), allow_nan=False),
        facts=facts.facts_rows(runs),
        results=facts.result_rows(runs),
        config=facts.config_rows(runs),
        sections=[describe_run(name, run) for name, run in zip(names, runs, strict=True)],
    )


def unique_names(runs: Sequence[RunFiles]) -> list[str]:
    """Names of the run directories, or their paths if two have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def describe_run(name: str, run: RunFiles) -> dict[str, Any]:
    """The parts of the page that are about one run."""
    return {
        "name": name,
        "data": facts.data_rows(run),
        "findings": run.info.get("findings", []),
        "events": facts.run_events(run),
        "samples": list(find_samples(run)),
        "episodes": list(find_episodes(run)),
        "command": facts.repeat_command(run),
        "config": to_yaml(map_strings(dict(run.config), hide_secrets)),
    }


def find_samples(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Answers to the prompts of `generation_eval`: the first and the last one of each prompt."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for line in run.completions:
        by_prompt.setdefault(str(line.get("prompt", "")), []).append(line)
    for prompt, lines in list(by_prompt.items())[:MAX_SAMPLES]:
        shown = {line["step"]: line for line in (lines[-1], lines[0])}  # one if all are of the same step
        answers = [(step, format_completion(shown[step].get("completion"))) for step in sorted(shown)]
        expected = lines[0].get("expected")
        yield {"prompt": shorten(prompt), "answers": answers, "expected": expected and shorten(str(expected))}


def find_episodes(run: RunFiles) -> Iterator[dict[str, Any]]:
    """The first episodes of the last step that has some, up to a number of tokens."""
    episodes = [record for record in run.episodes if record.keys() >= EPISODE_KEYS]
    last = episodes[-1]["step"] if episodes else None
    records = [record for record in episodes if record["step"] == last][:MAX_EPISODES]
    largest = max((abs(value) for record in records for value in record["advantages"] or ()), default=0.0)
    num_tokens = 0
    for number, record in enumerate(records, 1):
        num_tokens += len(record["tokens"])
        if num_tokens > MAX_EPISODE_TOKENS and number > 1:
            return
        yield describe_episode(record, number, largest) | {"step": last}


def format_completion(value: object) -> str:
    """An answer: a text, or the messages of an episode as JSON."""
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
