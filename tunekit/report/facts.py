"""Facts of a report as text: settings, size, time and results of runs, their data, and how their configs differ."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from tunekit import system
from tunekit.config.dump import diff_configs, format_option
from tunekit.config.secrets import hide_secrets, map_strings
from tunekit.loggers import divergence
from tunekit.report.run_files import RunFiles

Row = tuple[str, Sequence[str]]  # title, and a text for each run
MAX_VALUE = 200  # characters of a config value
UNCOMPARED = "output_dir"  # differs between any two runs


def facts_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Rows of the table of facts. Facts that no run has are left out."""
    columns = [dict(run_facts(run)) for run in runs]
    titles = dict.fromkeys(title for column in columns for title in column)
    rows = [(title, [column.get(title, "") for column in columns]) for title in titles]
    return [row for row in rows if any(row[1])]


def run_facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    config, info = run.config, run.info
    yield "state", describe_state(run)
    yield "recipe", run.recipe
    yield "model", str(config.get("model", ""))
    for key in ("adapter", "quantization", "loss", "optimizer", "lr_scheduler", "precision"):
        yield key.replace("_", " "), format_option(config[key]) if config.get(key) is not None else ""
    yield "trained parameters", describe_parameters(info)
    yield "batch size", describe_batch_size(config)
    yield "hardware", describe_hardware(info)
    yield "dtype of computation", str(info.get("compute_dtype", ""))
    yield from progress_facts(run)
    yield "verification", describe_verification(run.verification)
    yield "versions", ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())


def describe_state(run: RunFiles) -> str:
    total = f" of {run.num_steps:,}" if run.num_steps else ""
    if run.is_finished:
        is_short = run.num_steps is not None and 0 < run.last_step < run.num_steps
        return f"finished after step {run.last_step:,}{total}{', by early stopping' if is_short else ''}"
    state = "running" if run.is_running else "not finished; the same command resumes it"
    return f"step {run.last_step:,}{total}, {state}"


def describe_parameters(info: Mapping[str, Any]) -> str:
    if "num_trained_parameters" not in info:
        return ""
    trained, total = info["num_trained_parameters"], info["num_parameters"]
    return f"{trained:,} ({trained / max(total, 1):.2%} of {total:,})"


def describe_batch_size(config: Mapping[str, Any]) -> str:
    size, micro = config.get("global_batch_size"), config.get("micro_batch_size")
    return "" if size is None else f"{size}, in micro-batches of {micro}"


def describe_hardware(info: Mapping[str, Any]) -> str:
    if "hardware" not in info:
        return ""
    count, nodes = info["num_processes"], info["num_nodes"]
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return info["hardware"] + (f", {count} processes{where}" if count > 1 else "")


def progress_facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Tokens, time, throughput and memory of the steps so far."""
    steps = [line for line in run.lines if "loss" in line and "step_time" in line]
    if not steps:
        return
    tokens, targets = (max(line.get(key) or 0 for line in steps) for key in ("num_tokens", "num_target_tokens"))
    yield "tokens", f"{tokens:,}, of which {targets:,} are target tokens" if tokens else ""
    starts = [0, *(line["step"] for line in steps)]
    seconds = sum(line["step_time"] * (line["step"] - start) for start, line in zip(starts, steps, strict=False))
    yield "time of training steps", str(timedelta(seconds=round(seconds)))
    yield "tokens per second", f"{tokens / seconds:,.0f}" if seconds and tokens else ""
    peak = max((line.get("peak_memory") or 0 for line in steps), default=0)
    yield "peak memory", system.format_bytes(peak) if peak else ""


def describe_verification(verification: Mapping[str, Any]) -> str:
    if "passed" not in verification:
        return ""
    verdict = "passed: the saved files were loaded and compared with the model in memory"
    if not verification["passed"]:
        verdict = "FAILED: the saved files differ from the model in memory"
    largest = verification.get("largest")
    return verdict + ("" if largest is None else f"; largest difference {largest:.2g} standard deviations")


def result_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Metrics of held-out rows: before training, if known, and at the end."""
    columns = [dict(run_results(run)) for run in runs]
    titles = dict.fromkeys(title for column in columns for title in column)
    return [(title, [column.get(title, "") for column in columns]) for title in titles]


def run_results(run: RunFiles) -> Iterator[tuple[str, str]]:
    names = dict.fromkeys(name for line in run.lines for name in line if name.startswith("eval/"))
    for name in names:
        points = [(line["step"], line[name]) for line in run.lines if line.get(name) is not None]
        if points:
            first, (step, last) = points[0], points[-1]
            before = f"{first[1]:.5g} → " if first[0] == 0 and step > 0 else ""
            yield name, f"{before}{last:.5g}"
    for result in run.evaluation.get("results", []):
        where = f"{result['model']} on {run.evaluation.get('data', '')}"
        if result.get("loss") is not None:
            yield f"evaluate: loss of {where}", f"{result['loss']:.5g}"
        if result.get("questions"):
            correct, total = result["correct"], result["questions"]
            yield f"evaluate: exact_match of {where}", f"{correct / total:.1%} ({correct} of {total})"


def config_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Keys whose values differ: between the runs, or for one run from the defaults, with the default first."""
    if len(runs) == 1:
        changes = [change for change in runs[0].info.get("changed_keys", []) if change[0] != UNCOMPARED]
        return [(key, [format_value(default), format_value(value)]) for key, default, value in changes]
    keys = {}
    for run in runs[1:]:
        keys |= {key: None for key, *_ in diff_configs(runs[0].config, run.config) if key != UNCOMPARED}
    return [(key, [format_value(find_value(run.config, key)) for run in runs]) for key in keys]


def find_value(config: Any, key: str) -> Any:
    """Value of a dotted key, whose parts may be positions in a list; None if there is none."""
    for part in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(part)
        elif isinstance(config, list) and part.isdecimal() and int(part) < len(config):
            config = config[int(part)]
        else:
            return None
    return config


def format_value(value: Any) -> str:
    """A config value as JSON, without quotes around text; a section in one line."""
    value = map_strings(value, hide_secrets)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def data_rows(run: RunFiles) -> list[Sequence[str]]:
    """Rows of the table of the data: config key, name, rows, tokens, target tokens."""
    rows = []
    for key, loader in run.info.get("data", {}).items():
        for data in loader["datasets"]:
            tokens, targets = data["tokens"], data["num_target_tokens"]
            counts = [f"{data['rows']:,} {data['noun']}s", f"{tokens:,}", ""]
            if targets and tokens:
                counts[2] = f"{targets:,} ({targets / tokens:.0%})"
            counts = ["a stream", "", ""] if loader["is_streaming"] else counts
            rows.append([key, data["name"], *counts])
    return rows


def run_events(run: RunFiles) -> list[tuple[str, str]]:
    """(kind of a finding, text) of resumed starts, early stopping, and a loss that diverged."""
    events = []
    for start in run.info.get("starts", [])[1:]:
        events.append(("note", f"resumed from step {start['step']:,} at {start['time']}"))
    last = run.lines[-1]["step"] if run.lines else 0
    if run.is_finished and last < run.last_step:
        events.append(("note", f"the result has the weights after step {last:,}, the best evaluation"))
    losses = [line["loss"] for line in run.lines if is_finite(line.get("loss"))]
    missing = sum("loss" in line and line["loss"] is None for line in run.lines)
    if missing:
        events.append(("wrong", f"{missing:,} steps have a loss that is not finite"))
    if losses and (problem := divergence.describe_divergence(losses[0], losses[1:])):
        events.append(("wrong", problem))
    return events


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def repeat_command(run: RunFiles) -> str:
    """Command that repeats a run in another directory."""
    directory = str(run.directory)
    words = ["tune", "run", run.recipe, f"{directory}/config.yaml", f"output_dir={directory}-repeated"]
    return shlex.join(filter(None, words))
