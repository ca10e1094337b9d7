"""What prepared rows follow from: rows, choice, tokenizer and code. Two keys are equal where the documents are."""

import hashlib
import json
import platform
from collections.abc import Iterator
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from tunekit.data import own
from tunekit.data.rows import Rows
from tunekit.data.table import Table
from tunekit.data.tokenizer import Tokenizer

# Modules beside this one that have no part in what a row becomes. A new one has, until it is named here.
ASIDE = frozenset("ahead batch cache checks key loader measure mix order packing pool prepare report stream".split())
PACKAGES = ("tokenizers", "jinja2", "numpy")
CLOCK = "strftime_now"  # what a template that prints the date asks for


def key(rows: Rows, tokenizer: Tokenizer, table: Table) -> str | None:
    """32 hexadecimal digits; None where code has no file whose text could be compared."""
    modules = own.modules(rows)
    if not all(module.file for module in modules):
        return None
    parts = {
        "rows": [rows.source, table.digest()],  # the source, because documents tell the file that they are from
        "choice": [type(rows).__qualname__, {name: repr(value) for name, value in rows.code().items()}],
        "own": [(module.name, module.text) for module in modules],
        "tokenizer": words(tokenizer),
        "code": code(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def words(tokenizer: Tokenizer) -> dict[str, Any]:
    """All by which a tokenizer writes a conversation and makes it tokens."""
    texts = {name: text for name, (text, _) in tokenizer.templates.items()}
    dated = any(CLOCK in text for text in texts.values())
    ends = None if tokenizer.ends is None else tokenizer.ends.__getstate__().decode()
    return {
        "model": hashlib.sha256(tokenizer.model.to_str().encode()).hexdigest(),
        "ends": ends,
        "names": tokenizer.names,
        "templates": texts,
        "stops": sorted(tokenizer.stops),
        "vocab": tokenizer.vocab,
        "day": str(tokenizer.today or date.today()) if dated else None,
    }


def code() -> dict[str, str]:
    """The text of the modules that make rows documents, and the versions of what they use."""
    texts = {file.stem: own.text(file) for file in sources()}
    return {**texts, "python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def sources() -> Iterator[Path]:
    here = Path(__file__).parent
    return (file for file in sorted(here.glob("*.py")) if file.stem not in ASIDE)
