"""Rendering of the templates in this directory."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tunekit.config.secrets import escape_control


def render_template(template: str, /, **values: Any) -> str:
    """Text of a template. In `.html.j2` files, values are escaped; in all, control characters are made visible."""
    return _environment().get_template(template).render(**values)


def read_verbatim(file: str) -> Markup:
    """Text of a file in this directory that is no template, such as a library."""
    return Markup((Path(__file__).parent / file).read_text("utf-8"))


def hash_for_csp(script: str) -> str:
    """Source expression of a Content-Security-Policy that allows this inline script only."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tunekit"),  # reads tunekit/templates
        autoescape=jinja2.select_autoescape(["html.j2"]),
        finalize=_show_control_characters,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["zip"] = zip
    environment.globals["verbatim"] = read_verbatim
    environment.filters["csp_hash"] = hash_for_csp
    return environment


def _show_control_characters(value: object) -> object:
    return escape_control(value) if isinstance(value, str) and not isinstance(value, Markup) else value
