"""A checkpoint's chat template: untrusted Jinja text, rendered in a sandbox exactly as `transformers` renders it."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tunekit.errors import UserError

OPEN, CLOSE = "generation_opens", "generation_closes"
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", OPEN, CLOSE}
TAG = re.compile(r"[<\[][^<>\[\]\s]{1,60}[>\]]")
PRIVATE = tuple(map(chr, range(0xE000, 0xF8FF)))
FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: its body between two variables, which print nothing unless given."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (nodes.Output([nodes.Name(name, "load")]) for name in (OPEN, CLOSE))
        return [part.set_lineno(line) for part in (opened, nodes.Scope(body), closed)]


class Space(Namespace):
    """Jinja's `namespace`, but names such as `__class__` cannot be put there to deceive the sandbox."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, values = args[0], dict(*args[1:], **fields)
        for name in values:
            refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        Namespace.__setitem__(self, name, value)


def refuse_private(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r} is no name for a template")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja without Python's internals: reaching for them is an error, where Jinja would print nothing."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.filters["tojson"] = to_json
        self.globals.update(
            raise_exception=raise_exception,
            strftime_now=lambda form: datetime.now().strftime(form),
            namespace=Space,
            dict=lambda *values, **fields: dict(*values, **fields),  # not the class: its methods change what they get
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def tags(tree: nodes.Template) -> re.Pattern[str]:
    """Tags, such as `</think>`, that the template has a word for: it may look for them in what messages say."""
    words = {node.value.strip() for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    found = sorted(filter(TAG.fullmatch, words), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, found)) or '(?!)'})")


def doubted(tree: nodes.Template) -> set[str]:
    """Variables that the template sets itself where nobody did (`x is defined`)."""
    asked = (test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    return {node.name for node in asked if isinstance(node, nodes.Name)}


class Template:
    """A compiled chat template; `name` is the file it came from, for messages."""

    def __init__(self, text: str, name: str) -> None:
        sandbox = Sandbox()
        try:
            tree = sandbox.parse(text)
            asked = meta.find_undeclared_variables(tree)
            self.marked = OPEN in asked
            self.unset = sorted((asked | doubted(tree)) - GIVEN - set(sandbox.globals))[:8]
            self.tags = tags(tree)
            self.compiled = sandbox.from_string(text)
        except TemplateSyntaxError as error:
            raise UserError(
                f"{name}: the chat template is no valid Jinja: line {error.lineno}: {error.message}"
            ) from None
        self.name = name

    def render(self, context: Mapping[str, Any]) -> str:
        """The text of a conversation. UserError if the template refuses it or does what the sandbox forbids."""
        try:
            return self.compiled.render(context)
        except SecurityError as error:
            raise UserError(f"{self.name}: the chat template tries to leave its sandbox: {error}") from None
        except FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self.name}: the chat template fails: {reason}") from None

    def generated(self, text: str, context: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Character spans of `{% generation %}` bodies in `text`, which is what `render` gave for the same context.

        The conversation is rendered again with two characters around each body that do not occur in the text. Taking
        them out must give the text back, so a template that trims or measures a body cannot shift a span unseen.
        """
        opened, closed = [char for char in PRIVATE if char not in text][:2]
        marked = self.render({**context, OPEN: opened, CLOSE: closed})
        bodies = list(re.finditer(f"{opened}([^{opened}{closed}]*){closed}", marked))
        whole = 2 * len(bodies) == marked.count(opened) + marked.count(closed)
        if not whole or marked.replace(opened, "").replace(closed, "") != text:
            raise UserError(
                f"{self.name}: the chat template nests or rewrites its generation blocks; what is learnt is unclear"
            )
        starts = [body.start() - 2 * index for index, body in enumerate(bodies)]
        return [(start, start + len(body[1])) for start, body in zip(starts, bodies, strict=True)]
