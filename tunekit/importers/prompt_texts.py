"""Texts around the columns of a row that trainers build in, as templates of the transform `render_columns`."""

import json
import re
from collections.abc import Mapping

from tunekit.errors import UserError

FIELD = re.compile(r"\{(\w+)\}")


def column(name: str) -> str:
    """Expression that prints a column. Raise UserError for a name that templates cannot read."""
    if not name.isidentifier():
        raise UserError(f"{name!r}: templates cannot read a column of this name. Rename it in the rows.")
    return f"{{{{ {name} }}}}"


def from_format(text: str, columns: Mapping[str, str]) -> str:
    """Template of a Python format string. `columns` are those of its fields; `{{` and `}}` are braces."""
    braces = {"{{": "{", "}}": "}"}
    rendered = []
    for part in re.split(r"(\{\{|\}\}|\{\w+\})", text):
        match = FIELD.fullmatch(part)
        is_field = match is not None and match[1] in columns
        rendered.append(column(columns[match[1]]) if match and is_field else escape(braces.get(part, part)))
    return "".join(rendered)


def escape(text: str) -> str:
    """Text in a template that is printed as it is."""
    return re.sub(r"\{[{%#]", lambda match: f'{{{{ "{match[0]}" }}}}', text)


def branch_on(condition: str, with_column: str, without: str) -> str:
    """Template that depends on whether a column has a text."""
    if with_column == without:
        return without
    if not without:
        return f"{{% if {condition} %}}{with_column}{{% endif %}}"
    return f"{{% if {condition} %}}{with_column}{{% else %}}{without}{{% endif %}}"


def alpaca_prompt(instruction: str = "instruction", context: str = "input") -> str:
    """Template of the prompt of Stanford Alpaca, up to the answer."""
    return (
        "Below is an instruction that describes a task"
        f"{{% if {context} %}}, paired with an input that provides further context{{% endif %}}. "
        "Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{column(instruction)}"
        f"{{% if {context} %}}\n\n### Input:\n{column(context)}{{% endif %}}\n\n### Response:\n"
    )


def message(role: str, name: str, before: str = "", after: str = "") -> str:
    """Template of a list with one message, as JSON: a column with texts around it."""
    column(name)  # checks the name
    parts = [json.dumps(before, ensure_ascii=False)] if before else []
    parts += [name, *([json.dumps(after, ensure_ascii=False)] if after else [])]
    content = f"({' ~ '.join(parts)}) | tojson" if len(parts) > 1 else f"{name} | tojson"
    return f'[{{"role": "{role}", "content": {{{{ {content} }}}}}}]'


def render_messages(expression: str, role_key: str, content_key: str, roles: Mapping[str, str]) -> str:
    """Template of messages with other keys or roles as role and content, in JSON. `roles`: theirs to ours."""
    pairs = ", ".join(f'"{source}": "{target}"' for source, target in roles.items())
    role = f'{{{pairs}}}[message["{role_key}"]]'
    item = f'{{"role": {{{{ {role} | tojson }}}}, "content": {{{{ message["{content_key}"] | tojson }}}}}}'
    return f"[{{% for message in {expression} %}}{item}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]"
