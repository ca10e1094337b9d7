"""Tasks by name: the bundled ones, and those of lm-evaluation-harness, which is imported only if it is needed.

The bundled tasks are questions as in the training text of the bundled model, and tool calls. Some facts also occur in
the training text; stories, texts to copy, and tool calls do not.
"""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tunekit import assets
from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError, check_range, did_you_mean
from tunekit.evaluation.evaluation_rows import EvaluationRow, add_prompts
from tunekit.evaluation.generation_eval import GenerationEvaluator
from tunekit.evaluation.results import TaskResult

ALL_BUNDLED = "nano"
BUNDLED_MAX_LENGTH = 1024  # tokens of a row; the context length of the bundled model


@dataclass(frozen=True)
class TaskSelection:
    """Names of tasks, and options for evaluating them."""

    names: tuple[str, ...] = ()
    num_fewshot: int | None = None  # few-shot examples per question; None: as the task defines
    include_path: str | None = None  # directory with lm-evaluation-harness tasks of the user
    limit: int | None = None  # first rows of each task
    apply_chat_template: bool = False  # format harness questions with the chat template of the model

    def __post_init__(self) -> None:
        check_range(self, "num_fewshot", ge=0)
        check_range(self, "limit", ge=1)
        if len(set(self.names)) < len(self.names):
            raise FieldError("tasks", "contains a task twice")
        options = {
            "num_fewshot": self.num_fewshot is not None,
            "include_path": self.include_path is not None,
            "apply_chat_template": self.apply_chat_template,
        }
        if (unused := [name for name, is_set in options.items() if is_set]) and not self.harness_tasks:
            raise FieldError(unused[0], "applies to tasks of lm-evaluation-harness, and `tasks` contains none")

    @property
    def bundled(self) -> list[str]:
        """Selected bundled tasks; `nano` selects all."""
        return [task for task in assets.TASKS if task in self.names or ALL_BUNDLED in self.names]

    @property
    def harness_tasks(self) -> list[str]:
        """Selected tasks that are not bundled."""
        return [name for name in self.names if name != ALL_BUNDLED and name not in assets.TASKS]

    def check(self) -> None:
        """Raise UserError if a task does not exist or lm-evaluation-harness is required but not installed."""
        for name in self.harness_tasks:
            if name.startswith(f"{ALL_BUNDLED}/"):
                hint = did_you_mean(name, assets.TASKS, f"Did you mean '{ALL_BUNDLED}'?")
                raise UserError(f"tasks: unknown task '{name}'.{hint}")
        if self.harness_tasks:
            import_adapter(self.harness_tasks).check_tasks(self.harness_tasks, self.include_path)

    def load(self) -> Any:
        """Harness tasks with their rows, which may be downloaded; None without harness tasks."""
        if not self.harness_tasks:
            return None
        return import_adapter(self.harness_tasks).load_tasks(self.harness_tasks, self.num_fewshot, self.include_path)

    def evaluate(self, evaluator: GenerationEvaluator, model_name: str, loaded_tasks: Any) -> list[TaskResult]:
        """Results of all selected tasks. `loaded_tasks` is the result of `load`."""
        results = []
        for task in self.bundled:
            documents = task_documents(task, evaluator.tokenizer, self.limit)
            results.append(evaluator(task, documents)[1])
        if self.harness_tasks:
            module = import_adapter(self.harness_tasks)
            adapter = module.LMEvalAdapter(
                evaluator.model, evaluator.tokenizer, evaluator.batch_size, evaluator.dist, model_name
            )
            results += module.evaluate_tasks(
                adapter, self.harness_tasks, loaded_tasks, self.limit, self.apply_chat_template
            )
        return results


def task_documents(task: str, tokenizer: Tokenizer, limit: int | None) -> list[EvaluationRow]:
    """The first `limit` rows of a task in the chat template of the model, or all of them."""
    with assets.TASKS[task].open(encoding="utf-8") as file:
        rows = [
            Row(f"{task} row {number}", json.loads(line)) for number, line in enumerate(islice(file, limit), start=1)
        ]
    dataset = ChatDataset(task, max_length=BUNDLED_MAX_LENGTH)
    tokenizer, located = dataset.prepare_tokenizer(tokenizer), list[EvaluationRow]()
    for row, documents in zip(rows, dataset.encode_rows(tokenizer, rows), strict=True):
        if not isinstance(documents, list):
            raise UserError(f"tasks: {task} cannot be evaluated: {documents}")
        located += [EvaluationRow(row.where, document) for document in documents]
    return add_prompts(located, rows, dataset, tokenizer)


def import_adapter(tasks: Sequence[str]) -> Any:
    """The module that requires the package lm_eval."""
    try:
        return importlib.import_module("tunekit.evaluation.lm_eval_adapter")
    except ImportError as error:
        missing = error.name or "lm_eval"
        problem = "is too old" if missing.startswith("lm_eval.") else "is not installed"
        message = f"'{tasks[0]}' requires lm-evaluation-harness, and {missing.partition('.')[0]} {problem}"
        raise UserError(f"tasks: {message}. Run: pip install 'tunekit[harness]'") from error
