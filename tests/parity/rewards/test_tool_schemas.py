"""Schemas of tools are those of transformers."""

from collections.abc import Callable

import pytest
from transformers.utils import get_json_schema

from tests.unit.environments.test_environments import complex_types, no_arguments, simple
from tunekit.environments.base import get_tools
from tunekit.environments.calculator import Calculator
from tunekit.environments.key_value_lookup import KeyValueLookup
from tunekit.environments.python_tool import PythonTool
from tunekit.environments.sandbox import SandboxConfig
from tunekit.environments.tool_schema import tool_schema

BUILT_IN = [
    tool for env in (Calculator(), KeyValueLookup(), PythonTool(SandboxConfig())) for tool in get_tools(env).values()
]


@pytest.mark.parametrize("function", [simple, complex_types, no_arguments, *BUILT_IN], ids=lambda f: f.__name__)
def test_schema_is_that_of_transformers(function: Callable[..., object]) -> None:
    assert tool_schema(function) == get_json_schema(function)
