"""What prepared rows follow from: rows, choice, tokenizer and code. Two keys are equal where the documents are."""

import hashlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tunekit.data import own
from tunekit.data.rows import Rows
from tunekit.data.table import Table
from tunekit.data.tokenizer import Tokenizer

# Modules beside this one that have no part in what a row becomes. A new one has, until it is named here.
ASIDE = frozenset(
    {"ahead", "batch", "cache", "checks", "key", "loader", "mapped", "measure", "mix", "order", "packing", "pool"}
    | {"prepare", "report", "served", "stream", "streamed"}
)
PACKAGES = ("tokenizers", "jinja2", "numpy")


def key(rows: Rows, tokenizer: Tokenizer, table: Table) -> str | None:
    """32 hexadecimal digits; None where code has no file whose text could be compared."""
    modules = own.modules(rows)
    if not all(module.file for module in modules):
        return None
    parts = {
        "rows": [rows.source, table.digest()],  # the source, because documents tell the file that they are from
        "choice": [type(rows).__qualname__, {name: repr(value) for name, value in rows.code().items()}],
        "own": [(module.name, module.text) for module in modules],
        "tokenizer": tokenizer.digest,
        "code": code(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def code() -> dict[str, str]:
    """The text of the modules that make rows documents, and the versions of what they use."""
    texts = {file.stem: own.text(file) for file in sources()}
    return {**texts, "python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def sources() -> Iterator[Path]:
    here = Path(__file__).parent
    return (file for file in sorted(here.glob("*.py")) if file.stem not in ASIDE)
