"""Python code as tool, in the sandbox."""

from typing import Any

from tunekit.environments.answers import AnswerEnvironment
from tunekit.environments.sandbox import SandboxConfig, run_python


class PythonTool(AnswerEnvironment):
    """Reward 1 if the final answer has the expected number or text."""

    def __init__(self, limits: SandboxConfig) -> None:
        super().__init__()
        self.limits = limits

    def reset(self, answer: Any = None, **columns: Any) -> None:
        self.expected = answer

    def python(self, code: str) -> str:
        """Run Python code and return what it prints. Each call starts a new program.

        Args:
            code: The code, such as print(2 + 3)

        Returns:
            The output.
        """
        return run_python(code, self.limits).describe(self.limits) or "(no output)"
