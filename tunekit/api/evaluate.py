"""Evaluation from Python: recipe `evaluate`, also of a model in memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tunekit import devices
from tunekit.api.model import Model, inference
from tunekit.api.result import Run
from tunekit.api.rows import Rows, read_rows
from tunekit.api.session import api_call, free_memory, isolated_torch
from tunekit.api.tables import make_table
from tunekit.api.values import PlainValues
from tunekit.cli import recipe_loader
from tunekit.config.overrides import KeywordValues
from tunekit.distributed.context import DistributedContext
from tunekit.evaluation.results import ModelResult
from tunekit.evaluation.significance import paired_differences
from tunekit.evaluation.table import results_table
from tunekit.recipes import evaluate as recipe

if TYPE_CHECKING:
    from pandas import DataFrame


def evaluate(
    model: Model | Run | str | os.PathLike[str],
    rows: Rows | None = None,
    *,
    tasks: Sequence[str] = (),
    baseline: Run | str | os.PathLike[str] | None = None,
    **keys: Any,
) -> "DataFrame":
    """Evaluate a model on held-out rows or tasks, as recipe `evaluate`, and return a table of its metrics.

    The table has a row for each model and task. `tasks`: "nano", or tasks of lm-evaluation-harness. `baseline`: a
    second model to compare with. A `Model` is evaluated as it is in memory. Other keys are those of the recipe.
    """
    where = "evaluate(...)"
    with api_call(where), rows_source(rows, f"{where}: rows") as source:
        values: dict[str, Any] = {"num_completions_to_print": 0, "tasks": list(tasks), **source, **keys}
        for name, item in {"model": model, "baseline": baseline}.items():
            if item is not None:
                values[name] = str(item.directory) if isinstance(item, Run) else item
        if isinstance(model, Model):
            values |= {"model": model.name, "device": model.device.type}
        cfg = recipe_loader.load_recipe_config(recipe, None, (), (), KeywordValues(where, PlainValues(where)(values)))
        recipe.check(cfg)
        has_rows_in_memory = rows is not None and not isinstance(rows, str | os.PathLike)
        is_in_memory = isinstance(model, Model) or has_rows_in_memory
        with isolated_torch(device := devices.select_device(cfg.device)):
            results = evaluate_in_memory(model, cfg) if is_in_memory else recipe.main(cfg)
        free_memory(device)
    return make_results_table(results)


@contextmanager
def rows_source(rows: Rows | None, where: str, key: str = "data.source") -> Iterator[dict[str, Any]]:
    """The config key with the source of rows, which are in a temporary file if they are in memory."""
    source = None if rows is None else read_rows(rows, where)
    if source is None or isinstance(source, str):
        yield {} if source is None else {key: source}
        return
    with TemporaryDirectory(prefix="tunekit-") as directory:
        file = Path(directory) / "rows.jsonl"
        source.write(file)
        yield {key: str(file)}


def evaluate_in_memory(model: object, cfg: recipe.EvaluateConfig) -> list[ModelResult]:
    """Results of the baseline and of a model, with a model or rows in memory: the model card does not get them."""
    with DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel) as dist:
        names = [name for name in (cfg.baseline, None if isinstance(model, Model) else cfg.model) if name is not None]
        results = [recipe.evaluate_model(name, cfg, dist)[1] for name in names]
        if isinstance(model, Model):
            with inference(model):
                loaded = model.name, model.decoder, model.tokenizer, cfg.named.load()
                results.append(recipe.evaluate_loaded(*loaded, cfg, dist)[1])
    results = [rename_tasks(result) for result in results]
    changed = [] if cfg.baseline is None else paired_differences(results[0], results[-1], cfg.sampling.seed)
    if changed:
        print(results_table(results, changed))
    recipe.write_results(cfg, results, changed)
    return results


def make_results_table(results: Sequence[ModelResult]) -> "DataFrame":
    """A table with a row for each model and task, and a column for each metric."""
    rows: list[Mapping[str, Any]] = [
        {"model": result.model, "task": task.task} | {metric.name: metric.value for metric in task.metrics}
        for result in results
        for task in result.tasks
    ]
    return make_table(rows, ["model", "task"])


def rename_tasks(result: ModelResult) -> ModelResult:
    """The result with readable names of tasks."""
    return replace(result, tasks=tuple(replace(task, task=task_name(task.task)) for task in result.tasks))


def task_name(task: str) -> str:
    """Name of a task; of rows in memory, without their temporary file."""
    path = Path(task.removesuffix(" (train)"))
    return "rows" if path.name == "rows.jsonl" and path.parent.name.startswith("tunekit-") else task
