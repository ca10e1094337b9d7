"""The transform that writes columns from templates, such as the prompt of Alpaca, and the union of all transforms."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jinja2 import TemplateSyntaxError, Undefined, meta
from jinja2.exceptions import SecurityError

from tunekit.data.chat_template.sandbox import BUDGET_KEY, RenderBudget, StepCounter, TemplateSandbox
from tunekit.data.chat_template.template import RENDER_ERRORS
from tunekit.data.transforms import Fields, Filter, RemoveColumns, RenameColumns, RowTransform, replace_column
from tunekit.errors import FieldError, UserError


class MissingColumn(Undefined):
    """A column that a row lacks: false in a condition, and an error if it is printed."""

    __slots__ = ()

    def __str__(self) -> str:
        raise UserError(f"the row has no column {self._undefined_name!r}")


class ColumnTemplate:
    """A compiled template of a column. Its text is kept as it is written, with all line breaks."""

    def __init__(self, text: str) -> None:
        sandbox = TemplateSandbox()
        sandbox.trim_blocks = sandbox.lstrip_blocks = False
        sandbox.keep_trailing_newline = True
        sandbox.undefined = MissingColumn
        tree = sandbox.parse(text)
        self.columns = sorted(meta.find_undeclared_variables(tree) - set(sandbox.globals))
        self.globals = dict(sandbox.globals)
        self.compiled = sandbox.from_string(StepCounter().visit(tree))

    def render(self, fields: Fields) -> str:
        """The text for a row. Null columns count as missing."""
        values = {name: value for name in self.columns if (value := fields.get(name)) is not None}
        variables = {**self.globals, **values, BUDGET_KEY: RenderBudget(values)}
        try:
            return "".join(self.compiled.root_render_func(self.compiled.new_context(variables, shared=True)))
        except SecurityError as error:
            raise UserError(f"the template violates the sandbox: {error}") from None
        except RENDER_ERRORS as error:
            raise UserError(f"the template fails: {' '.join(str(error).split()) or type(error).__name__}") from None


@functools.lru_cache(maxsize=64)
def compile_column_template(text: str) -> ColumnTemplate:
    """Compile a template. Raise UserError for invalid Jinja."""
    try:
        return ColumnTemplate(text)
    except TemplateSyntaxError as error:
        raise UserError(f"invalid Jinja in line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, SyntaxError):
        raise UserError("the template is nested too deeply") from None


@dataclass(frozen=True)
class RenderColumns(RowTransform):
    """Write columns from Jinja templates: `columns: {prompt: "Question: {{ question }}\\nAnswer:"}`.

    Templates read the columns of the row by name: `{{ question }}`, or `{% if context %}...{% endif %}` for a column
    that may be missing, null or empty. An existing column is replaced.
    """

    kind: ClassVar[str] = "render_columns"
    columns: dict[str, str] = field(hash=False)  # New or replaced column to its template

    def __post_init__(self) -> None:
        for name, text in self.columns.items():
            try:
                compile_column_template(text)
            except UserError as error:
                raise FieldError(f"columns.{name}", str(error)) from None

    def __call__(self, fields: Fields) -> Fields | None:
        result: Mapping[str, Any] = fields
        for name, text in self.columns.items():
            try:
                result = replace_column(result, name, compile_column_template(text).render(fields))
            except UserError as error:
                raise UserError(f"render_columns.{name}: {error}") from None
        return dict(result)


Transform = RenameColumns | Filter | RemoveColumns | RenderColumns  # all kinds of `transforms`
