"""Tools, their schemas and calls, and the built-in environments."""

import json
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from tests.helpers.wait import TIMEOUT_SECONDS
from tunekit.environments.answers import is_expected
from tunekit.environments.base import Environment, get_tools
from tunekit.environments.calculator import Calculator, evaluate_expression
from tunekit.environments.config import (
    CalculatorConfig,
    CustomEnvironmentConfig,
    EnvironmentChoice,
    GridWorldConfig,
    JsonAnswerConfig,
    PythonConfig,
)
from tunekit.environments.grid_world import GridWorld
from tunekit.environments.key_value_lookup import KeyValueLookup
from tunekit.environments.python_tool import PythonTool
from tunekit.environments.sandbox import SandboxConfig
from tunekit.environments.tool_calls import ToolResult, run_tool
from tunekit.environments.tool_schema import tool_schema
from tunekit.errors import FieldError, UserError


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "0", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_are_the_public_methods() -> None:
    class Shop(Environment):
        def buy(self, item: str) -> str:
            """Buy.

            Args:
                item: What.
            """
            return f"bought {item}"

        def _secret(self) -> None: ...

        def get_reward(self) -> float:
            return 1.0

    tools = get_tools(Shop())
    assert [*tools] == ["buy"] and run_tool(tools, call("buy", item="tea"), 1) == ToolResult("bought tea")


def test_wrong_calls_are_results() -> None:
    tools = get_tools(Calculator())
    for wrong in (
        call("buy"),
        call("calculate"),
        call("calculate", expression="1", other=2),
        call("calculate", expression=3),
    ):
        result = run_tool(tools, wrong, 1)
        assert result.is_error and json.loads(result.content)["error"]
    may_end = threading.Event()
    assert run_tool({"sleep": time.sleep}, call("sleep"), 1).is_error
    slow = {"hang": lambda: may_end.wait(TIMEOUT_SECONDS), "exit": lambda: exit(3)}
    assert "0.1 seconds" in run_tool(slow, call("hang"), 0.1).content
    may_end.set()
    assert run_tool(slow, call("exit"), 1).is_error


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3 + 4 * 5", 23), ("(3 + 4) * 5", 35), ("7 / 2", 3.5), ("7 // 2 % 2", 1), ("-2 ** 2", -4), ("2^10", 1024),
     ("max(3, abs(-5))", 5), ("sqrt(16)", 4)],
)  # fmt: skip
def test_calculator(expression: str, value: float) -> None:
    assert evaluate_expression(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os').system('x')", "open('x')", "a", "1 +", "(1).real", "'a' * 3", "9**9**9", "2**100000", "[1]",
     "(-1)**0.5", "1 if 1 else 2", "lambda: 1", "abs", "1" * 1000, "((((" * 100, "max(key=1)", "10**400 * 1.0", ""],
)  # fmt: skip
def test_calculator_refuses_other_code(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        evaluate_expression(expression)


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    [("It is 1,200.", 1200, True), ("1200", "1200", True), ("12 or 13", 12, False), ("The blue house", "blue", True),
     ("blueish", "blue", False), ("none", 3, False)],
)  # fmt: skip
def test_expected_answers(answer: str, expected: Any, is_right: bool) -> None:
    assert is_expected(answer, expected) == is_right


def test_lookups_form_a_chain() -> None:
    environment = KeyValueLookup()
    environment.reset({"a": "b", "b": "c", "x": None}, "c")
    assert environment.lookup("a") == "b" and environment.lookup("b") == "c"
    for key in ("c", "x"):
        with pytest.raises(KeyError):
            environment.lookup(key)
    environment.step("b")
    assert environment.get_reward() == 0
    environment.step("It is c.")
    assert environment.get_reward() == 1


def test_walk_on_a_grid() -> None:
    environment = GridWorld()
    assert environment.reset("S.\n#G").endswith("A.\n#G")
    assert environment.step("down") == "There is a wall.\nA.\n#G" and environment.get_reward() == 0
    assert environment.step("Left? No: right.") == ".A\n#G"
    assert environment.step("down") is None and environment.get_reward() == 1
    with pytest.raises(ValueError, match="one G"):
        environment.reset("S.")


def test_observations_of_a_grid_in_words() -> None:
    environment = GridWorldConfig(observation="text").create()
    assert str(environment.reset("S..\n#.G\n...")).endswith("\nGoal: 1 down, 2 right. Walls: up, down, left.")
    assert environment.step("up") == "There is a wall.\nGoal: 1 down, 2 right. Walls: up, down, left."
    assert environment.step("right") == "Goal: 1 down, 1 right. Walls: up."
    assert environment.step("down") == "Goal: 1 right. Walls: left."
    assert environment.step("down") == "Goal: 1 up, 1 right. Walls: down."
    assert environment.step("right") == "Goal: 1 up. Walls: down, right."
    assert environment.step("up") is None and environment.get_reward() == 1
    environment.reset("...\n.S.\n..G")
    assert environment.step("left") == "Goal: 1 down, 2 right. Walls: left."
    assert environment.step("right") == "Goal: 1 down, 1 right. Walls: none."


def test_json_answers_can_be_repaired(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}))
    config = JsonAnswerConfig(str(file), max_attempts=3)
    config.check()
    environment = config.create()
    assert '"integer"' in str(environment.reset(answer='{"n": 2}'))
    assert "Not valid JSON" in str(environment.step("n=2"))
    assert "$.n" in str(environment.step('{"n": "2"}'))
    assert environment.step('{"n": 2}') is None and environment.get_reward() == 1
    environment = config.create()
    environment.reset(answer={"n": 3})
    assert environment.step('{"n": 2}') is None and environment.get_reward() == 0
    file.write_text("[")
    with pytest.raises(UserError, match="schema"):
        JsonAnswerConfig(str(file)).check()


def test_python_tool() -> None:
    environment = PythonTool(SandboxConfig())
    environment.reset(answer=5)
    assert environment.python("print(2 + 3)") == "5" and environment.python("x = 1") == "(no output)"
    assert "ZeroDivisionError" in environment.python("1 / 0")
    environment.step("5")
    assert environment.get_reward() == 1
    PythonConfig().check()


def test_classes_for_trl_need_no_base_class(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "class Counter:\n    def reset(self, **kwargs) -> None:\n        self.n = 0\n"
        "    def add(self, n: int) -> int:\n        '''Add.\n\n        Args:\n            n: Number.\n        '''\n"
        "        self.n += n\n        return self.n\n"
        "class Bad:\n    def reset(self): pass\n    def tool(self, x): pass\n"
        "class Init:\n    def __init__(self, size): pass\n"
        "class Exit:\n    def __init__(self): raise SystemExit(3)\n"
    )
    config = CustomEnvironmentConfig(f"{tmp_path / 'env.py'}:Counter")
    config.check()
    first, second = config.create(), config.create()
    first.reset()
    second.reset()
    assert run_tool(get_tools(first), call("add", n=2), 1).content == "2"
    assert run_tool(get_tools(second), call("add", n=3), 1).content == "3" and first.get_reward() is None
    with pytest.raises(UserError, match="environment: Counter has no method get_reward"):
        config.check(needs_reward=True)
    CalculatorConfig().check(needs_reward=True)
    for name, problem in (
        ("Bad", "tool"),
        ("Missing", "Missing"),
        ("Init", "'size'"),
        ("Exit", r"env\.py:\d+: System"),
    ):
        with pytest.raises(UserError, match=f"environment.*{problem}"):
            CustomEnvironmentConfig(f"{tmp_path / 'env.py'}:{name}").check()


def test_limits_are_checked() -> None:
    for values in ({"max_turns": 0}, {"tool_timeout_seconds": 0}, {"max_tool_calling_iterations": -1}):
        with pytest.raises(FieldError):
            CalculatorConfig(**values)
    assert GridWorldConfig in EnvironmentChoice.__args__


class Color(Enum):
    RED = "red"
    BLUE = "blue"


def simple(city: str, days: int = 3, exact: bool = False, factor: float = 1.0) -> str:
    """Get the weather.

    A second paragraph: with a colon.

    Args:
        city: The city, such as Rome
        days: Number of days,
            on several lines
        exact: Whether to be exact (choices: [true, false])

        factor: A factor: of what?

    Returns:
        The weather.
    """
    return ""


def complex_types(  # noqa: PLR0913
    a: list[str],
    b: dict[str, int],
    c: int | None,
    d: Optional[list[float]],  # noqa: UP045
    e: Literal["x", "y", 1],
    f: int | str,
    g: list[int] | str,
    h: tuple[int, str],
    i: Color,
    j: Any,
    k: dict,
    l: list,  # noqa: E741
) -> dict[str, list[int]]:
    """Many types.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G (choices: ["a", "b"])
        h: H
        i: I
        j: J
        k: K
        l: L
    Raises:
        ValueError: never
    """
    return {}


def no_arguments() -> None:
    """Do nothing."""


def test_schemas_need_hints_and_descriptions() -> None:
    def no_doc(x: int) -> None: ...

    def no_hint(x) -> None:  # noqa: ANN001
        """Do.

        Args:
            x: X
        """

    def no_description(x: int) -> None:
        """Do."""

    def bad_type(x: Path) -> None:
        """Do.

        Args:
            x: X
        """

    for function in (no_doc, no_hint, no_description, bad_type):
        with pytest.raises(UserError, match=function.__name__):
            tool_schema(function)
