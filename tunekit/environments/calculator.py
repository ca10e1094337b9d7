"""Arithmetic with a calculator as tool."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from tunekit.environments.answers import AnswerEnvironment

MAX_LENGTH, MAX_BITS = 500, 4096  # of an expression, and of the integers in it
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
MAX_DIGITS = 308  # of the second argument of `round`: its time grows with the number


def round_number(value: float, digits: int = 0) -> float:
    """Round a number. Raises ValueError for more digits than a float has."""
    if abs(digits) > MAX_DIGITS:
        raise ValueError(f"round: digits must be from -{MAX_DIGITS} to {MAX_DIGITS}")
    return round(value, digits) if digits else round(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round_number,
    "sqrt": math.sqrt,
}


class Calculator(AnswerEnvironment):
    """Reward 1 if the last number of the final answer is the expected one."""

    def reset(self, answer: Any = None, **columns: Any) -> None:
        self.expected = answer

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: The expression, such as (3 + 4) * 5

        Returns:
            The value.
        """
        value = evaluate_expression(expression)
        return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def evaluate_expression(expression: str) -> int | float:
    """Value of an arithmetic expression. Raises ValueError or ArithmeticError; never runs code."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        return compute_node(tree.body)
    except (SyntaxError, RecursionError, MemoryError, TypeError):
        raise ValueError(f"not an arithmetic expression: {expression}") from None


def compute_node(node: ast.AST) -> int | float:
    """Value of a node of a parsed expression."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return limit_value(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = compute_node(node.left), compute_node(node.right)
        if isinstance(node.op, ast.Pow):
            check_power(left, right)
        return limit_value(BINARY[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](compute_node(node.operand))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        return limit_value(FUNCTIONS[node.func.id](*map(compute_node, node.args)))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def check_power(base: float, exponent: float) -> None:
    """Raise ValueError for powers that are too large to compute."""
    if isinstance(base, int) and exponent * base.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")


def limit_value(value: Any) -> int | float:
    """The value, if it is a number that can be computed with. Powers of negative numbers may be complex."""
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise ValueError("the result is no real number, or too large")
    return value
