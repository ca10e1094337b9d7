"""A checkpoint's chat template: untrusted Jinja text, rendered in a sandbox exactly as `transformers` renders it."""

import re
from collections.abc import Mapping
from itertools import accumulate, islice
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError

from tunekit.data.chat_template.sandbox import (
    BUDGET,
    CLOSE,
    OPEN,
    RenderBudget,
    SandboxLimitError,
    StepCounter,
    TemplateSandbox,
)
from tunekit.errors import UserError

GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", OPEN, CLOSE}
TAG = re.compile(r"[<\[][^<>\[\]\s]{1,60}[>\]]")
PRIVATE = tuple(map(chr, range(0xE000, 0xF8FF)))
FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
LONGEST = 200_000  # characters of a template; real ones have up to 30,000


def tags(tree: nodes.Template) -> list[str]:
    """Tags, such as `</think>`, that the template has a word for: it may look for them in what messages say."""
    words = {node.value.strip() for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return sorted(filter(TAG.fullmatch, words), key=len, reverse=True)


def doubted(tree: nodes.Template) -> set[str]:
    """Variables that the template sets itself where nobody did (`x is defined`)."""
    asked = (test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    return {node.name for node in asked if isinstance(node, nodes.Name)}


class SentinelText(str):
    """An empty text that is known again by its identity, and knows how often it was printed."""

    printed = 0

    def __str__(self) -> str:
        self.printed += 1
        return self


class ChatTemplate:
    """A compiled chat template; `name` is the file it came from, for messages."""

    def __init__(self, text: str, name: str) -> None:
        if len(text) > LONGEST:
            raise UserError(f"{name}: a chat template of {len(text):,} characters; want at most {LONGEST:,}")
        sandbox = TemplateSandbox()
        try:
            tree = sandbox.parse(text)
            asked = meta.find_undeclared_variables(tree)
            self.marked = OPEN in asked
            self.unset = sorted((asked | doubted(tree)) - GIVEN - set(sandbox.globals))[:8]
            self.tags = tags(tree)
            self.tagged = re.compile(f"({'|'.join(map(re.escape, self.tags)) or '(?!)'})")
            self.plain = OPEN not in text and CLOSE not in text  # nothing but its blocks asks for the marks
            self.globals = dict(sandbox.globals)
            self.compiled = sandbox.from_string(StepCounter().visit(tree))
        except TemplateSyntaxError as error:
            raise UserError(
                f"{name}: the chat template is no valid Jinja: line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, MemoryError, SyntaxError):
            raise UserError(f"{name}: the chat template is nested too deep") from None
        self.name = name

    def render(self, context: Mapping[str, Any]) -> str:
        """The text of a conversation. UserError if the template refuses it or does what the sandbox forbids."""
        return "".join(self.parts(context))

    def parts(self, context: Mapping[str, Any]) -> list[str]:
        """The text of a conversation, in parts as the template writes them."""
        try:
            names = {**self.globals, **context, BUDGET: RenderBudget(context)}
            return list(self.compiled.root_render_func(self.compiled.new_context(names, shared=True)))
        except SandboxLimitError as error:
            raise UserError(f"{self.name}: the chat template was stopped: {error}") from None
        except SecurityError as error:
            raise UserError(f"{self.name}: the chat template tries to leave its sandbox: {error}") from None
        except FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self.name}: the chat template fails: {reason}") from None

    def written(self, context: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
        """The text of a conversation, and the character spans of its `{% generation %}` bodies.

        None in place of these where not all that marks them goes straight into the text: `generated` finds them then.
        """
        if not (self.marked and self.plain):
            return self.render(context), None if self.marked else []
        opened, closed = SentinelText(), SentinelText()
        parts = self.parts({**context, OPEN: opened, CLOSE: closed})
        bounds = [*accumulate(map(len, parts), initial=0)]
        marks = [
            (part is closed, at) for part, at in zip(parts, bounds, strict=False) if part is opened or part is closed
        ]
        sides, places = [side for side, _ in marks], [at for _, at in marks]
        sound = opened.printed + closed.printed == len(marks) and sides == [False, True] * (len(marks) // 2)
        return "".join(parts), list(zip(places[::2], places[1::2], strict=True)) if sound else None

    def generated(self, text: str, context: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Character spans of `{% generation %}` bodies in `text`, which is what `render` gave for the same context.

        Where they are not known as they are written, the conversation is rendered again with two characters around
        each body that do not occur in the text. Taking them out must give the text back, so a template that trims or
        measures a body cannot shift a span unseen.
        """
        again, spans = self.written(context)
        if spans is not None and again == text:
            return spans
        opened, closed = islice((char for char in PRIVATE if char not in text), 2)
        marked = self.render({**context, OPEN: opened, CLOSE: closed})
        bodies = list(re.finditer(f"{opened}([^{opened}{closed}]*){closed}", marked))
        whole = 2 * len(bodies) == marked.count(opened) + marked.count(closed)
        if not whole or marked.replace(opened, "").replace(closed, "") != text:
            raise UserError(
                f"{self.name}: the chat template nests or rewrites its generation blocks; what is learnt is unclear"
            )
        starts = [body.start() - 2 * index for index, body in enumerate(bodies)]
        return [(start, start + len(body[1])) for start, body in zip(starts, bodies, strict=True)]
