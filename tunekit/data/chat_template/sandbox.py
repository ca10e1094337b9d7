"""Jinja sandbox for untrusted templates, without access to Python internals and with limits on time and memory.

Loop iterations, calls, filters, and their arguments are charged to a budget of steps and characters before they run.
There are no timeouts and no signals: a template always stops at the same place, on every machine and in every thread.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

GENERATION_START, GENERATION_END = "generation_opens", "generation_closes"
BUDGET_KEY = " budget"  # not a valid Jinja name, like those of the filters below: templates cannot access it
# Limits of one rendering, which take 1-2 s. Published templates need about 20 steps per message.
MAX_STEPS, MAX_CHARS = 500_000, 50_000_000
INPUT_PASSES = 100  # additional budget, in passes over all inputs of the rendering
MAX_WIDTH, MAX_DEPTH, MAX_INT_BITS = 1000, 100, 4096

REMOVED_FILTERS = {"urlize", "wordwrap", "xmlattr", "pprint", "striptags", "random", "filesizeformat", "forceescape"}
FREE_FILTERS = {"length", "count", "first", "last", "default", "d", "items", "int", "float", "abs", "attr"}
LAZY_FILTERS = {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "list", "reverse"}
WIDTH_FILTERS = {"center", "indent", "truncate", "batch", "slice", "tojson", "round"}
COUNTED_TESTS = {"eq", "==", "equalto", "ne", "!=", "in", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan"}
COUNTED_TESTS |= {"ge", ">=", "lower", "upper"}
SIZED_TYPES = (list, tuple, dict, range, type({}.keys()), type({}.values()), type({}.items()))
STR_METHODS = """capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit
isidentifier islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix
removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
center ljust rjust zfill"""
SAFE_METHODS: dict[type, set[str]] = {
    str: set(STR_METHODS.split()),
    dict: {"get", "items", "keys", "values", "copy"},
    list: {"index", "count", "copy"},
    tuple: {"index", "count"},
}
DICT_ATTRIBUTES = frozenset(dir(dict))  # Jinja looks these up before the keys of a dictionary
LOOP_ATTRIBUTES = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
PLAIN_TYPES = (str, int, bool, type(None), list, dict)  # not callable, and without attributes that are
SEQUENCE_TYPES, CONTAINER_TYPES = (str, list, tuple), (str, list, tuple, dict)  # isinstance is slow with a union
JINJA_KWARGS = {"_loop_vars", "_block_vars"}  # keyword arguments that Jinja adds to calls
BOUND_METHODS = (BuiltinMethodType, MethodType)
WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(\*|\d{4})|:[^{}]*(\{|\d{4})")  # a width of 4 digits, or from an argument


class SandboxLimitError(SecurityError):
    """A template exceeded a limit."""


class RenderBudget:
    """Remaining steps and characters of one rendering. `context` contains its inputs."""

    def __init__(self, context: Any) -> None:
        self.steps, self.chars, self.context = MAX_STEPS, MAX_CHARS, context

    def charge(self, steps: int, chars: int = 0) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0:
            self.add_input_budget()

    def add_input_budget(self) -> None:
        """Add, once, a budget proportional to the size of the inputs. Raise SandboxLimitError if it is not enough."""
        context, self.context = self.context, None
        if context is not None:
            remaining, full = (self.steps, self.chars), 1 << 62
            self.steps = self.chars = full
            self.charge_deep(context)
            self.steps = remaining[0] + INPUT_PASSES * (full - self.steps)
            self.chars = remaining[1] + INPUT_PASSES * (full - self.chars)
        if self.steps < 0 or self.chars < 0:
            raise SandboxLimitError("too many steps or characters")

    def charge_deep(self, value: Any, depth: int = 0) -> int:
        """Charge a value and everything in it, as printing, comparing, and sorting do. Return its nesting depth."""
        if isinstance(value, str):
            self.charge(1, len(value))
            return depth
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise SandboxLimitError(f"integer of more than {MAX_INT_BITS} bits")
        self.charge(1)
        if isinstance(value, dict):
            return self.charge_items([*value, *value.values()], depth)
        if isinstance(value, SIZED_TYPES):
            return self.charge_items(value, depth)
        return depth

    def charge_items(self, values: Any, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise SandboxLimitError(f"values nested more than {MAX_DEPTH} levels deep")
        if isinstance(values, range):
            self.charge(len(values))
            return depth + 1
        return max((self.charge_deep(item, depth + 1) for item in values), default=depth)

    def charge_shallow(self, value: Any) -> Any:
        """Charge a shallow copy of a value: its length."""
        if isinstance(value, str):
            self.charge(1, len(value))
        elif isinstance(value, SIZED_TYPES):
            self.charge(1 + len(value))
        else:
            self.charge(1)
        return value


def get_budget(context: Context) -> RenderBudget:
    return context.parent[BUDGET_KEY]


@pass_context
def count_step(context: Context, chars: int) -> bool:
    """Charge one loop iteration or macro call, including the literal text in it."""
    get_budget(context).charge(1, chars)
    return True


@pass_context
def count_deep(context: Context, value: Any) -> Any:
    """Charge a value that is printed, compared, or joined. Called for each expression, mostly with a string."""
    if type(value) is str:
        context.parent[BUDGET_KEY].charge(1, len(value))
    else:
        get_budget(context).charge_deep(value)
    return value


@pass_context
def count_shallow(context: Context, value: Any) -> Any:
    return get_budget(context).charge_shallow(value)


class StepCounter(NodeTransformer):
    """Inserts charges into the syntax tree of a template where Jinja has no hook for them."""

    def step_filter(self, body: list[nodes.Node], line: int) -> nodes.Filter:
        chars = sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))
        return nodes.Filter(nodes.Const(chars), " step", [], [], None, None, lineno=line)

    def add_step(self, node: Any) -> Any:
        step = self.step_filter(node.body, node.lineno)
        node = self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = add_step  # noqa: N815

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        test = node.test
        node = self.add_step(node)
        if test is not None:
            assert node.test is not None
            node.test = nodes.And(self.step_filter([test], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self.add_filter(" deep", operand) for operand in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self.add_filter(" shallow", node.node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Charge comparisons, except with a constant, and searches in a string or list."""
        self.generic_visit(node)
        is_search = [operand.op in ("in", "notin") for operand in node.ops]
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        has_constant = any(isinstance(operand, nodes.Const) for operand in operands)
        for operand, searches in zip(node.ops, is_search, strict=True):
            if searches or not has_constant:
                operand.expr = self.add_filter(" deep", operand.expr)
        if not has_constant:
            node.expr = self.add_filter(" deep", node.expr)
        return node

    def add_filter(self, name: str, node: nodes.Expr) -> nodes.Expr:
        return node if is_constant(node) else nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def is_constant(node: nodes.Node) -> bool:
    """Whether a node is a constant, or a list or tuple of constants."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def with_budget(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test so that it charges its arguments before it runs, and its result."""
    pass_arg = _PassArg.from_obj(function)
    jinja_args = {
        "context": lambda c: (c,),
        "eval_context": lambda c: (c.eval_ctx,),
        "environment": lambda c: (c.environment,),
    }
    leading_args = jinja_args[pass_arg.name] if pass_arg is not None else lambda c: ()
    # Without arguments, these filters return a string that is not much longer than their input.
    keeps_length = pass_arg is None and name not in LAZY_FILTERS | {"indent", "format"}

    @pass_context
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        budget = get_budget(context)
        if keeps_length and type(value) is str and not args and not kwargs:
            budget.charge(1, len(value))
            return budget.charge_shallow(function(value))
        if isinstance(value, GeneratorType) and name not in LAZY_FILTERS:
            value = list(value)
        if name in LAZY_FILTERS:
            budget.charge_shallow(value)
            budget.charge(100)  # limits nested generators, which need Python's stack
        arguments = (*args, *kwargs.values())
        depth = 0 if name in LAZY_FILTERS else budget.charge_deep(value)
        for argument in arguments:
            budget.charge_deep(argument)
        charge_output(budget, name, value, arguments, depth)
        result = function(*leading_args(context), value, *args, **kwargs)
        return result if isinstance(result, GeneratorType) else budget.charge_shallow(result)

    return run


def charge_output(budget: RenderBudget, name: str, value: Any, arguments: tuple[Any, ...], depth: int) -> None:
    """Charge or reject results that can be much longer than the arguments."""
    width = max((to_width(item) for item in arguments), default=0)
    if name in WIDTH_FILTERS and width > MAX_WIDTH:
        raise SandboxLimitError(f"{name} with width {width}, at most {MAX_WIDTH} is allowed")
    if name == "sum" and any(isinstance(item, list | tuple) for item in arguments):
        raise SandboxLimitError("sum of lists")
    if name == "tojson" and width:
        steps_before = budget.steps
        budget.charge_deep(value)
        budget.charge(0, (steps_before - budget.steps) * width * (depth + 1))
    elif name == "indent" and isinstance(value, str):
        budget.charge(0, max(width, 4) * (value.count("\n") + 1))
    elif name == "replace" and len(arguments) > 1:
        charge_replace(budget, str(value), str(arguments[0]), str(arguments[1]))
    elif name == "join" and arguments and isinstance(value, (str, *SIZED_TYPES)):
        budget.charge(0, len(str(arguments[0])) * len(value))
    elif name == "format":
        charge_format(budget, str(value), arguments)


def to_width(value: Any) -> int:
    return len(value) if isinstance(value, str) else value if isinstance(value, int) else 0


def charge_replace(budget: RenderBudget, text: str, old: str, new: str) -> None:
    budget.charge(0, text.count(old) * len(new))


def charge_format(budget: RenderBudget, form: str, values: Any) -> None:
    if WIDE_FORMAT.search(form):
        raise SandboxLimitError(f"format string with a width of {MAX_WIDTH} or more")
    chars_before = budget.chars
    budget.charge_deep(values)
    budget.charge(0, (form.count("%") + form.count("{")) * (chars_before - budget.chars + MAX_WIDTH))


class SafeNamespace(Namespace):
    """Jinja's `namespace` without names such as `__class__`, which could bypass the sandbox."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, values = args[0], dict(*args[1:], **fields)
        for name in values:
            reject_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        reject_private(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def reject_private(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"name {name!r} starts with an underscore")


class GenerationExtension(Extension):
    """`{% generation %}…{% endgeneration %}`: prints two variables around its body, which are undefined by default."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.Name(name, "load")]) for name in (GENERATION_START, GENERATION_END))
        return [node.set_lineno(line) for node in (start, nodes.Scope(body), end)]


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja without access to Python internals. Accessing them is an error; Jinja would print nothing."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, loopcontrols], finalize=count_deep
        )
        filters = {**FILTERS, "tojson": to_json}
        self.filters = {
            name: function if name in FREE_FILTERS else with_budget(name, function)
            for name, function in filters.items()
            if name not in REMOVED_FILTERS
        }
        self.filters.update({" step": count_step, " deep": count_deep, " shallow": count_shallow})
        self.tests = {
            name: with_budget(name, function) if name in COUNTED_TESTS else function for name, function in TESTS.items()
        }
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=raise_exception,
            strftime_now=lambda form: datetime.now().strftime(form),
            namespace=SafeNamespace,
            dict=lambda *values, **fields: dict(*values, **fields),  # not the class, whose methods modify arguments
        )

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up an attribute, with a fast path for keys of dictionaries, loop variables, and namespaces."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in DICT_ATTRIBUTES:
                return obj[attribute]
        elif (kind is LoopContext and attribute in LOOP_ATTRIBUTES) or (
            kind is SafeNamespace and not attribute.startswith("_")
        ):
            with suppress(AttributeError):
                value = getattr(obj, attribute)
                if type(value) in PLAIN_TYPES:
                    return value
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(value, BuiltinMethodType) or (isinstance(obj, str) and not isinstance(value, str)):
            kinds = [kind for kind in SAFE_METHODS if isinstance(obj, kind)]
            return any(attr in SAFE_METHODS[kind] for kind in kinds)
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        """Wrap `str.format` so that it charges its arguments, which `call` does not see."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @pass_context
        def run(context: Context, *args: Any, **kwargs: Any) -> str:
            charge_format(get_budget(context), value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return run

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        budget = get_budget(__context)
        budget.charge(1 if isinstance(__obj, Macro) else 5)
        if isinstance(__obj, BOUND_METHODS) and isinstance(__obj.__self__, CONTAINER_TYPES):
            args = tuple(list(value) if isinstance(value, GeneratorType) else value for value in args)
            charge_method(budget, __obj, args)
            if type(__obj.__self__) is str:
                return __obj(*args, **{name: value for name, value in kwargs.items() if name not in JINJA_KWARGS})
        elif not isinstance(__obj, Macro):
            for value in (*args, *kwargs.values()):
                budget.charge_deep(value)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = get_budget(context)
        if operator == "+" or not isinstance(left, SEQUENCE_TYPES):
            if operator == "*" and isinstance(right, SEQUENCE_TYPES):
                left, right = right, left
                charge_repeat(budget, left, right)
            elif operator == "**":
                check_power(left, right)
            else:
                budget.charge_shallow(left)
                budget.charge_shallow(right)
        elif operator == "*":
            charge_repeat(budget, left, right)
        elif operator == "%" and isinstance(left, str):
            charge_format(budget, left, right)
        result = self.binop_table[operator](left, right)
        if isinstance(result, int) and result.bit_length() > MAX_INT_BITS:
            raise SandboxLimitError(f"integer of more than {MAX_INT_BITS} bits")
        return result


def charge_repeat(budget: RenderBudget, value: Any, times: Any) -> None:
    size = len(value) * max(0, times if isinstance(times, int) else 0)
    budget.charge(1, size) if isinstance(value, str) else budget.charge(1 + size)


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
        raise SandboxLimitError(f"integer of more than {MAX_INT_BITS} bits")


def charge_method(budget: RenderBudget, method: BuiltinMethodType | MethodType, args: tuple[Any, ...]) -> None:
    """Charge a call of a method of a string or list."""
    receiver, name = cast(Any, method.__self__), method.__name__
    if isinstance(receiver, str):
        budget.charge(0, len(receiver))
    elif isinstance(receiver, (list, tuple)):
        budget.charge_deep(receiver)
    for value in args:
        budget.charge_deep(value)
    if name in ("center", "ljust", "rjust", "zfill") and max(map(to_width, args), default=0) > MAX_WIDTH:
        raise SandboxLimitError(f"{name} with a width of more than {MAX_WIDTH}")
    if name == "replace" and len(args) > 1:
        charge_replace(budget, str(receiver), str(args[0]), str(args[1]))
    elif name == "join" and args and isinstance(args[0], (str, *SIZED_TYPES)):
        budget.charge(0, len(receiver) * len(args[0]))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format a value as JSON. Jinja's `tojson` escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(str(message)[:1000])
