"""Reward of code that passes tests, which run in the sandbox."""

import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from tunekit.environments.sandbox import SandboxConfig, require_sandbox, run_python
from tunekit.errors import UserError, check_range
from tunekit.rewards.answer_rewards import column_value
from tunekit.rewards.base import RewardFunction
from tunekit.rollouts.rollout import Rollout

CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class UnitTests(RewardFunction):
    """1 if the last Python code block of the answer passes the tests in a column; otherwise 0.

    The tests run in the locked-down process of the code, after it; without a code block, the whole answer is the code.
    """

    kind: ClassVar[str] = "unit_tests"
    column_key: ClassVar[str] = "column"
    column: str = "tests"  # Column with the tests: Python text, or a list of statements such as `assert f(2) == 4`
    sandbox: SandboxConfig = SandboxConfig()  # Limits of the process
    num_workers: int = 4  # Processes at the same time

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "num_workers", ge=1)

    def check(self, columns: Collection[str]) -> None:
        """Raise UserError if there is no column with tests, or this system has no sandbox."""
        super().check(columns)
        require_sandbox()

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float | None]:
        tests = [tests_text(column_value(rollout, self.column), rollout, self.column) for rollout in rollouts]
        with ThreadPoolExecutor(self.num_workers) as pool:
            codes = [last_code_block(rollout.completion) for rollout in rollouts]
            return list(pool.map(self.score, codes, tests))

    def score(self, code: str, tests: str) -> float:
        """1 if the code and then the tests have ended without an error.

        The tests reach the process when the code has ended, so that `exit()` or reading its own program do not pass.
        """
        return float(run_python(code, self.sandbox, tests).num_completed == 2)


def last_code_block(answer: str) -> str:
    """Last Python code block of an answer; without one, the answer."""
    blocks = CODE_BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def tests_text(value: Any, rollout: Rollout, column: str) -> str:
    """Tests of a row as one program."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise UserError(f"{rollout.prompt.where}: column {column!r} must have Python text or a list of statements")
    return "\n".join(lines)
