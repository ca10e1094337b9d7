"""What prepared rows follow from: rows, choice, tokenizer and code. Two keys are equal where the documents are."""

import hashlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tunekit.data.prepared import own
from tunekit.data.rows import Rows
from tunekit.data.sources.table import Table
from tunekit.data.tokenizer import Tokenizer

# Modules and folders of tunekit.data that have no part in what a row becomes. A new one has, until it is named here.
ASIDE = frozenset({"steps", "cache", "checks", "key", "measure", "pool", "prepare"})
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
    here = Path(__file__).parent.parent
    texts = {file.relative_to(here).as_posix(): own.text(file) for file in sources()}
    return {**texts, "python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def sources() -> Iterator[Path]:
    here = Path(__file__).parent.parent
    files = (file for file in sorted(here.rglob("*.py")) if file.name != "__init__.py")
    return (file for file in files if not ASIDE & set(file.relative_to(here).with_suffix("").parts))
