"""Jinja for templates of strangers: no way to Python's internals, and an end to what a render may do.

All that takes time or memory is counted, in steps and in characters, before it is done: rounds of loops, calls, filters
and what they are given. No clock and no signal: the same template stops at the same place everywhere, in any thread.
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

OPEN, CLOSE = "generation_opens", "generation_closes"
BUDGET = " budget"  # no template can write this name, nor those of the filters below
STEPS, CHARS = 500_000, 50_000_000  # of one render: a second or two; real templates take about 20 steps a message
PASSES = 100  # how often a render may, beyond that, go through all that it is given
WIDEST, DEEPEST, BITS = 1000, 100, 4096

GONE = {"urlize", "wordwrap", "xmlattr", "pprint", "striptags", "random", "filesizeformat", "forceescape"}
FREE = {"length", "count", "first", "last", "default", "d", "items", "int", "float", "abs", "attr"}
LAZY = {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "list", "reverse"}
WIDE = {"center", "indent", "truncate", "batch", "slice", "tojson", "round"}
COMPARING = {"eq", "==", "equalto", "ne", "!=", "in", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge"}
COMPARING |= {">=", "lower", "upper"}
SIZED = (list, tuple, dict, range, type({}.keys()), type({}.values()), type({}.items()))
TEXT = """capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier
islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace
rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper center ljust rjust zfill"""
METHODS: dict[type, set[str]] = {
    str: set(TEXT.split()),
    dict: {"get", "items", "keys", "values", "copy"},
    list: {"index", "count", "copy"},
    tuple: {"index", "count"},
}
OWN = frozenset(dir(dict))  # what goes before the keys of a dictionary where Jinja looks for an attribute
LOOP = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
PLAIN = (str, int, bool, type(None), list, dict)  # no callable, and nothing that leads to one
SEQUENCES, HOLDERS = (str, list, tuple), (str, list, tuple, dict)  # isinstance is slow with a union
FRAME = {"_loop_vars", "_block_vars"}  # what Jinja gives a call beside its arguments
BOUND = (BuiltinMethodType, MethodType)
HUGE = re.compile(r"%[^%a-zA-Z]*(\*|\d{4})|:[^{}]*(\{|\d{4})")  # a width in a format, or one that is a value


class SandboxLimitError(SecurityError):
    """A template that does too much."""


class RenderBudget:
    """What a render may still do."""

    def __init__(self, context: Any) -> None:
        self.steps, self.chars, self.context = STEPS, CHARS, context

    def spend(self, steps: int, chars: int = 0) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0:
            self.refill()

    def refill(self) -> None:
        """Once, what belongs to the size of what the render is given."""
        given, self.context = self.context, None
        if given is not None:
            left, full = (self.steps, self.chars), 1 << 62
            self.steps = self.chars = full
            self.weigh(given)
            self.steps = left[0] + PASSES * (full - self.steps)
            self.chars = left[1] + PASSES * (full - self.chars)
        if self.steps < 0 or self.chars < 0:
            raise SandboxLimitError("it does not come to an end, or writes without end")

    def weigh(self, value: Any, depth: int = 0) -> int:
        """Count a value with all that is in it; how deep it is. Whoever prints, compares or sorts it does as much."""
        if isinstance(value, str):
            self.spend(1, len(value))
            return depth
        if isinstance(value, int) and value.bit_length() > BITS:
            raise SandboxLimitError("a number without end")
        self.spend(1)
        if isinstance(value, dict):
            return self.weigh_all([*value, *value.values()], depth)
        if isinstance(value, SIZED):
            return self.weigh_all(value, depth)
        return depth

    def weigh_all(self, values: Any, depth: int) -> int:
        if depth > DEEPEST:
            raise SandboxLimitError(f"values nested more than {DEEPEST} deep")
        if isinstance(values, range):
            self.spend(len(values))
            return depth + 1
        return max((self.weigh(item, depth + 1) for item in values), default=depth)

    def glance(self, value: Any) -> Any:
        """Count what a copy of a value costs: its own length."""
        if isinstance(value, str):
            self.spend(1, len(value))
        elif isinstance(value, SIZED):
            self.spend(1 + len(value))
        else:
            self.spend(1)
        return value


def budget(context: Context) -> RenderBudget:
    return context.parent[BUDGET]


@pass_context
def tick(context: Context, chars: int) -> bool:
    """A round of a loop or a call of a macro, with the literal text in it."""
    budget(context).spend(1, chars)
    return True


@pass_context
def weighed(context: Context, value: Any) -> Any:
    """What is printed, compared or joined. It is done for each expression of a template, mostly with a text."""
    if type(value) is str:
        context.parent[BUDGET].spend(1, len(value))
    else:
        budget(context).weigh(value)
    return value


@pass_context
def glanced(context: Context, value: Any) -> Any:
    return budget(context).glance(value)


class StepCounter(NodeTransformer):
    """Puts the counting into a template where Jinja has no hook for it."""

    def tick(self, body: list[nodes.Node], line: int) -> nodes.Filter:
        chars = sum(len(data.data) for node in body for data in find(node, nodes.TemplateData))
        return nodes.Filter(nodes.Const(chars), " tick", [], [], None, None, lineno=line)

    def counted(self, node: Any) -> Any:
        count = self.tick(node.body, node.lineno)
        node = self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = counted  # noqa: N815

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        test = node.test
        node = self.counted(node)
        if test is not None:
            assert node.test is not None
            node.test = nodes.And(self.tick([test], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self.through(" weighed", part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self.through(" glanced", node.node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """To compare with a constant costs nothing; to look into a long text or list does."""
        self.generic_visit(node)
        among = [operand.op in ("in", "notin") for operand in node.ops]
        constant = isinstance(node.expr, nodes.Const) or any(isinstance(part.expr, nodes.Const) for part in node.ops)
        for operand, inside in zip(node.ops, among, strict=True):
            if inside or not constant:
                operand.expr = self.through(" weighed", operand.expr)
        if not constant:
            node.expr = self.through(" weighed", node.expr)
        return node

    def through(self, name: str, node: nodes.Expr) -> nodes.Expr:
        return node if constant(node) else nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def find(node: nodes.Node, kind: type) -> list[Any]:
    return [*([node] if isinstance(node, kind) else []), *node.find_all(kind)]


def constant(node: nodes.Node) -> bool:
    """Whether a node is a constant, or a list of such."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that counts what it is given, before it works on it, and what it gives."""
    wants = _PassArg.from_obj(function)
    first = {
        "context": lambda c: (c,),
        "eval_context": lambda c: (c.eval_ctx,),
        "environment": lambda c: (c.environment,),
    }
    more = first[wants.name] if wants is not None else lambda c: ()
    simple = wants is None and name not in LAZY | {"indent", "format"}  # a text alone makes nothing longer

    @pass_context
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        spent = budget(context)
        if simple and type(value) is str and not args and not kwargs:
            spent.spend(1, len(value))
            return spent.glance(function(value))
        if isinstance(value, GeneratorType) and name not in LAZY:
            value = list(value)
        if name in LAZY:
            spent.glance(value)
            spent.spend(100)  # generators in generators: Python has an end of these too
        given = (*args, *kwargs.values())
        depth = 0 if name in LAZY else spent.weigh(value)
        for item in given:
            spent.weigh(item)
        beforehand(spent, name, value, given, depth)
        result = function(*more(context), value, *args, **kwargs)
        return result if isinstance(result, GeneratorType) else spent.glance(result)

    return run


def beforehand(spent: RenderBudget, name: str, value: Any, given: tuple[Any, ...], depth: int) -> None:
    """Refuse or count what would be much longer than what goes in."""
    width = max((width_of(item) for item in given), default=0)
    if name in WIDE and width > WIDEST:
        raise SandboxLimitError(f"{name} of a width of {width}")
    if name == "sum" and any(isinstance(item, list | tuple) for item in given):
        raise SandboxLimitError("a sum of lists")
    if name == "tojson" and width:
        before = spent.steps
        spent.weigh(value)
        spent.spend(0, (before - spent.steps) * width * (depth + 1))
    elif name == "indent" and isinstance(value, str):
        spent.spend(0, max(width, 4) * (value.count("\n") + 1))
    elif name == "replace" and len(given) > 1:
        replaced(spent, str(value), str(given[0]), str(given[1]))
    elif name == "join" and given and isinstance(value, (str, *SIZED)):
        spent.spend(0, len(str(given[0])) * len(value))
    elif name == "format":
        formatted(spent, str(value), given)


def width_of(value: Any) -> int:
    return len(value) if isinstance(value, str) else value if isinstance(value, int) else 0


def replaced(spent: RenderBudget, text: str, old: str, new: str) -> None:
    spent.spend(0, text.count(old) * len(new))


def formatted(spent: RenderBudget, form: str, values: Any) -> None:
    if HUGE.search(form):
        raise SandboxLimitError("a format of such a width")
    before = spent.chars
    spent.weigh(values)
    spent.spend(0, (form.count("%") + form.count("{")) * (before - spent.chars + WIDEST))


class OutputLimit(Namespace):
    """Jinja's `namespace`, but names such as `__class__` cannot be put there to deceive the sandbox."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, values = args[0], dict(*args[1:], **fields)
        for name in values:
            refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def refuse_private(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r} is no name for a template")


class GenerationExtension(Extension):
    """`{% generation %}…{% endgeneration %}`: its body between two variables, which print nothing unless given."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (nodes.Output([nodes.Name(name, "load")]) for name in (OPEN, CLOSE))
        return [part.set_lineno(line) for part in (opened, nodes.Scope(body), closed)]


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja without Python's internals: reaching for them is an error, where Jinja would print nothing."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, loopcontrols], finalize=weighed
        )
        filters = {**FILTERS, "tojson": to_json}
        self.filters = {
            name: function if name in FREE else counting(name, function)
            for name, function in filters.items()
            if name not in GONE
        }
        self.filters.update({" tick": tick, " weighed": weighed, " glanced": glanced})
        self.tests = {
            name: counting(name, function) if name in COMPARING else function for name, function in TESTS.items()
        }
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=raise_exception,
            strftime_now=lambda form: datetime.now().strftime(form),
            namespace=OutputLimit,
            dict=lambda *values, **fields: dict(*values, **fields),  # not the class: its methods change what they get
        )

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What templates ask for most, by the short way: keys, the state of a loop, variables."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in OWN:
                return obj[attribute]
        elif (kind is LoopContext and attribute in LOOP) or (kind is OutputLimit and not attribute.startswith("_")):
            with suppress(AttributeError):
                value = getattr(obj, attribute)
                if type(value) in PLAIN:
                    return value
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(value, BuiltinMethodType) or (isinstance(obj, str) and not isinstance(value, str)):
            kinds = [kind for kind in METHODS if isinstance(obj, kind)]
            return any(attr in METHODS[kind] for kind in kinds)
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        """The method of a text that formats: here, for what it is given is not seen where it is called."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @pass_context
        def run(context: Context, *args: Any, **kwargs: Any) -> str:
            formatted(budget(context), value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return run

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        spent = budget(__context)
        spent.spend(1 if isinstance(__obj, Macro) else 5)
        if isinstance(__obj, BOUND) and isinstance(__obj.__self__, HOLDERS):
            args = tuple(list(value) if isinstance(value, GeneratorType) else value for value in args)
            called(spent, __obj, args)
            if type(__obj.__self__) is str:
                return __obj(*args, **{name: value for name, value in kwargs.items() if name not in FRAME})
        elif not isinstance(__obj, Macro):
            for value in (*args, *kwargs.values()):
                spent.weigh(value)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spent = budget(context)
        if operator == "+" or not isinstance(left, SEQUENCES):
            if operator == "*" and isinstance(right, SEQUENCES):
                left, right = right, left
                multiplied(spent, left, right)
            elif operator == "**":
                powered(left, right)
            else:
                spent.glance(left)
                spent.glance(right)
        elif operator == "*":
            multiplied(spent, left, right)
        elif operator == "%" and isinstance(left, str):
            formatted(spent, left, right)
        result = self.binop_table[operator](left, right)
        if isinstance(result, int) and result.bit_length() > BITS:
            raise SandboxLimitError("a number without end")
        return result


def multiplied(spent: RenderBudget, value: Any, times: Any) -> None:
    size = len(value) * max(0, times if isinstance(times, int) else 0)
    spent.spend(1, size) if isinstance(value, str) else spent.spend(1 + size)


def powered(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > BITS:
        raise SandboxLimitError("a number without end")


def called(spent: RenderBudget, method: BuiltinMethodType | MethodType, args: tuple[Any, ...]) -> None:
    """Count what a method of a text or a list works on."""
    own, name = cast(Any, method.__self__), method.__name__
    if isinstance(own, str):
        spent.spend(0, len(own))
    elif isinstance(own, (list, tuple)):
        spent.weigh(own)
    for value in args:
        spent.weigh(value)
    if name in ("center", "ljust", "rjust", "zfill") and max(map(width_of, args), default=0) > WIDEST:
        raise SandboxLimitError(f"{name} of such a width")
    if name == "replace" and len(args) > 1:
        replaced(spent, str(own), str(args[0]), str(args[1]))
    elif name == "join" and args and isinstance(args[0], (str, *SIZED)):
        spent.spend(0, len(own) * len(args[0]))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(str(message)[:1000])
