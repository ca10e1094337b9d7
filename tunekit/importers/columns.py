"""The key of `data` that names columns, in one place."""

from typing import Any

DEFAULTS: dict[str, dict[str, str]] = {  # columns by role that need not be named
    "chat": {"messages": "messages"},
    "sharegpt": {"conversations": "conversations"},
    "instruct": {"prompt": "instruction", "input": "input", "completion": "output"},
    "completion": {"prompt": "prompt", "completion": "completion"},
    "text": {"text": "text"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "unpaired_preference": {"prompt": "prompt", "completion": "completion", "label": "label"},
    "prompt": {"prompt": "prompt"},
}
UNNAMED = "prompt"  # the only kind of recipes that sample answers, which is not written


def set_columns(data: dict[str, Any], **columns: str | None) -> None:
    """Set the columns of a dataset that differ from the defaults of its kind. None: the rows have no such column."""
    defaults = DEFAULTS[data.get("kind", UNNAMED)]
    changed = {role: name for role, name in columns.items() if name != defaults[role]}
    if changed:
        data["columns"] = {**data.get("columns", {}), **changed}
