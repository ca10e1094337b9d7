"""Chat templates: untrusted Jinja text of checkpoints, files or this package, and the values of template variables.

They are rendered in a sandbox exactly as `transformers` renders them.
"""

import copy
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError

from tunekit.data.chat_template.sandbox import (
    BUDGET_KEY,
    GENERATION_END,
    GENERATION_START,
    RenderBudget,
    SandboxLimitError,
    StepCounter,
    TemplateSandbox,
)
from tunekit.errors import FieldError, UserError

STANDARD_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
STANDARD_VARIABLES |= {GENERATION_START, GENERATION_END}
TAG = re.compile(r"[<\[][^<>\[\]\s]{1,60}[>\]]")
PRIVATE_USE_CHARS = tuple(map(chr, range(0xE000, 0xF8FF)))
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
MAX_TEMPLATE_CHARS = 200_000  # published templates have up to 30,000
TEMPLATES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}  # bundled
TemplateKwargs = dict[str, str | int | float | bool | tuple[str | int | float | bool, ...]]  # values of variables


def find_tags(tree: nodes.Template) -> list[str]:
    """Return tags such as `</think>` that occur as constants: the template may search for them in messages."""
    constants = {node.value.strip() for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return sorted(filter(TAG.fullmatch, constants), key=len, reverse=True)


def optional_variables(tree: nodes.Template) -> set[str]:
    """Return the variables that the template tests with `is defined`."""
    tested = (test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    return {node.name for node in tested if isinstance(node, nodes.Name)}


class SentinelText(str):
    """An empty string that is identified by `is` and counts how often it is printed."""

    num_printed = 0

    def __str__(self) -> str:
        self.num_printed += 1
        return self


class ChatTemplate:
    """A compiled chat template. `name` is its file, for error messages."""

    def __init__(self, text: str, name: str) -> None:
        if len(text) > MAX_TEMPLATE_CHARS:
            size = f"{len(text):,} characters"
            raise UserError(f"{name}: chat template must have at most {MAX_TEMPLATE_CHARS:,} characters, got {size}")
        sandbox = TemplateSandbox()
        try:
            tree = sandbox.parse(text)
            variables = meta.find_undeclared_variables(tree)
            self.has_generation_blocks = GENERATION_START in variables
            variables |= optional_variables(tree)
            self.variables = variables
            self.unset_variables = sorted(variables - STANDARD_VARIABLES - set(sandbox.globals))[:8]
            self.tags = find_tags(tree)
            self.tag_pattern = re.compile(f"({'|'.join(map(re.escape, self.tags)) or '(?!)'})")
            # Whether the template reads the boundary variables only through its {% generation %} blocks.
            self.boundaries_only_in_blocks = GENERATION_START not in text and GENERATION_END not in text
            self.globals = dict(sandbox.globals)
            self.compiled = sandbox.from_string(StepCounter().visit(tree))
        except TemplateSyntaxError as error:
            where = f"line {error.lineno} of the chat template"  # which may be a string in a JSON file
            raise UserError(f"{name}: invalid Jinja in {where}: {error.message}") from None
        except (RecursionError, MemoryError, SyntaxError):
            raise UserError(f"{name}: chat template is nested too deeply") from None
        self.name = name

    def render(self, context: Mapping[str, Any]) -> str:
        """Render a conversation. Raise UserError if the template fails or violates the sandbox."""
        return "".join(self.render_chunks(context))

    def render_chunks(self, context: Mapping[str, Any]) -> list[str]:
        """Render a conversation as the list of strings that the template emits."""
        try:
            variables = {**self.globals, **context, BUDGET_KEY: RenderBudget(context)}
            return list(self.compiled.root_render_func(self.compiled.new_context(variables, shared=True)))
        except SandboxLimitError as error:
            raise UserError(f"{self.name}: chat template exceeds a sandbox limit: {error}") from None
        except SecurityError as error:
            raise UserError(f"{self.name}: chat template violates the sandbox: {error}") from None
        except RENDER_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self.name}: chat template fails: {reason}") from None

    def render_with_spans(self, context: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
        """Render a conversation and return the character spans of its `{% generation %}` bodies.

        The spans are None if a boundary is not printed directly; `generation_spans` finds them then.
        """
        if not (self.has_generation_blocks and self.boundaries_only_in_blocks):
            return self.render(context), None if self.has_generation_blocks else []
        start, end = SentinelText(), SentinelText()
        chunks = self.render_chunks({**context, GENERATION_START: start, GENERATION_END: end})
        offsets = [*accumulate(map(len, chunks), initial=0)]
        pairs = zip(chunks, offsets, strict=False)
        sentinels = [(chunk is end, offset) for chunk, offset in pairs if chunk is start or chunk is end]
        ends, bounds = [is_end for is_end, _ in sentinels], [offset for _, offset in sentinels]
        all_found = start.num_printed + end.num_printed == len(sentinels)
        is_valid = all_found and ends == [False, True] * (len(sentinels) // 2)
        return "".join(chunks), list(zip(bounds[::2], bounds[1::2], strict=True)) if is_valid else None

    def generation_spans(self, text: str, context: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return the character spans of `{% generation %}` bodies in `text`, the rendering of the same context.

        If the boundaries are not printed directly, the conversation is rendered again with two unused characters around
        each body. Removing them must restore the text, so a template that trims or measures a body is detected.
        """
        rendered, spans = self.render_with_spans(context)
        if spans is not None and rendered == text:
            return spans
        start_char, end_char = islice((char for char in PRIVATE_USE_CHARS if char not in text), 2)
        marked = self.render({**context, GENERATION_START: start_char, GENERATION_END: end_char})
        bodies = list(re.finditer(f"{start_char}([^{start_char}{end_char}]*){end_char}", marked))
        is_balanced = 2 * len(bodies) == marked.count(start_char) + marked.count(end_char)
        if not is_balanced or marked.replace(start_char, "").replace(end_char, "") != text:
            raise UserError(
                f"{self.name}: ambiguous loss mask: the chat template nests or modifies its generation blocks"
            )
        starts = [body.start() - 2 * index for index, body in enumerate(bodies)]
        return [(start, start + len(body[1])) for start, body in zip(starts, bodies, strict=True)]


@dataclass(frozen=True)
class TemplateText:
    """Text of a chat template. The same text in different files is equal."""

    text: str
    name: str = field(compare=False)


def compile_template(text: str, name: str) -> ChatTemplate:
    """Compile a chat template. A text that was compiled recently is not compiled again."""
    template = copy.copy(compile_text(TemplateText(text, name)))
    template.name = name
    return template


@functools.lru_cache(maxsize=8)
def compile_text(template: TemplateText) -> ChatTemplate:
    return ChatTemplate(template.text, template.name)


def find_template(name: str) -> Path:
    """File of a chat template, given by its name or path."""
    path = TEMPLATES.get(name) or Path(name).expanduser()
    if not path.is_file():
        names = ", ".join(TEMPLATES)
        raise UserError(
            f"chat_template: {name!r} is not a file or a bundled template. Set a Jinja file or one of {names}."
        )
    return path


def read_template(path: Path) -> str:
    """Text of a Jinja file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the chat template: {error}") from None


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise FieldError for a name that a template cannot read, or that is set for each conversation."""
    for name in kwargs:
        if not name.isidentifier():
            raise FieldError("chat_template_kwargs", f"{name!r} is not the name of a template variable")
        if name in STANDARD_VARIABLES:
            raise FieldError(f"chat_template_kwargs.{name}", "is set by the conversation or the tokenizer. Remove it.")


def with_defaults(text: str, kwargs: Mapping[str, Any]) -> str:
    """Template text that uses `kwargs` as the defaults of its variables, in any program that renders it."""
    lines = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}{{%- endif %}}"
        for name, value in kwargs.items()
    )
    return f"{lines}\n{text}" if kwargs else text  # Jinja removes the line break after a block
