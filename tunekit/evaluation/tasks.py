"""The tasks that have names: those of the nano, and all of lm-evaluation-harness, which is loaded when one is asked."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunekit.config.suggestions import closest_match
from tunekit.errors import FieldError, UserError
from tunekit.evaluation import bundled_tasks
from tunekit.evaluation.generation_eval import GenerationEvaluator
from tunekit.evaluation.results import TaskResult

ALL = "nano"  # stands for all tasks of the nano


@dataclass(frozen=True)
class TaskSelection:
    """Tasks by name, and how they are asked."""

    names: tuple[str, ...] = ()
    shots: int | None = None  # examples in front of a question; None: as many as the task itself says
    include: str | None = None  # a folder with tasks of one's own, as the harness reads them
    limit: int | None = None  # take the first rows of each only
    chat: bool = False  # write the harness' questions with the model's chat template

    def __post_init__(self) -> None:
        if self.shots is not None and self.shots < 0:
            raise FieldError("shots", f"must not be below 0, not {self.shots}")
        if self.limit is not None and self.limit < 1:
            raise FieldError("limit", f"must be 1 or more rows, not {self.limit}")
        if len(set(self.names)) < len(self.names):
            raise FieldError("tasks", "one of them stands there twice")
        said = {"shots": self.shots is not None, "include": self.include is not None, "chat": self.chat}
        if (idle := [name for name, here in said.items() if here]) and not self.others:
            raise FieldError(idle[0], "is for tasks of lm-evaluation-harness, and `tasks` names none")

    @property
    def own(self) -> list[str]:
        """Tasks of the nano, of which `nano` means all."""
        return [task for task in bundled_tasks.TASKS if task in self.names or ALL in self.names]

    @property
    def others(self) -> list[str]:
        """Tasks that only the harness can know."""
        return [name for name in self.names if name != ALL and name not in bundled_tasks.TASKS]

    def check(self) -> None:
        """UserError if there is no such task, or if what knows it is not installed."""
        for name in self.others:
            if name.startswith(f"{ALL}/"):
                meant = closest_match(name, bundled_tasks.TASKS) or ALL
                raise UserError(f"tasks: there is no task '{name}'; did you mean '{meant}'?")
        if self.others:
            harness(self.others).check(self.others, self.include)

    def opened(self) -> Any:
        """The harness' tasks with their rows, which may have to be fetched; None if it is not asked."""
        return harness(self.others).loaded(self.others, self.shots, self.include) if self.others else None

    def ask(self, asker: GenerationEvaluator, name: str, opened: Any) -> list[TaskResult]:
        """What a model of that name makes of them."""
        found = []
        for task in self.own:
            found.append(asker(task, bundled_tasks.task_documents(task, asker.tokenizer, self.limit))[1])
        if self.others:
            module = harness(self.others)
            asked = module.LMEvalAdapter(asker.model, asker.tokenizer, asker.batch, asker.run, name)
            found += module.measured(asked, self.others, opened, self.limit, self.chat)
        return found


def harness(tasks: Sequence[str]) -> Any:
    """The module that needs the package lm_eval, which is imported only here."""
    try:
        return importlib.import_module("tunekit.evaluation.lm_eval_adapter")
    except ImportError as error:
        missing = error.name or "lm_eval"
        lack = "older than what is needed" if missing.startswith("lm_eval.") else "not installed"
        told = f"'{tasks[0]}' is for lm-evaluation-harness, and {missing.partition('.')[0]} is {lack}"
        raise UserError(f"tasks: {told}: pip install 'tunekit[harness]'") from error
