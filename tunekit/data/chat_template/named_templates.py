"""Chat templates that ship with the package, files of users, and values of template variables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.data.chat_template.template import STANDARD_VARIABLES
from tunekit.errors import FieldError, UserError

TEMPLATES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
TemplateKwargs = dict[str, str | int | float | bool | tuple[str | int | float | bool, ...]]


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
