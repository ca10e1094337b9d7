"""What prepared rows follow from: rows, choice, tokenizer and code. Two keys are equal where the documents are."""

import hashlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess import user_modules
from tunekit.data.readers.row_reader import RowReader
from tunekit.data.tokenizer import Tokenizer

# Modules and packages of tunekit.data that do not change what a row becomes. A new one does, until it is listed here.
UNRELATED = (
    "dataloader/", "inspect/", "preprocess/cache.py", "preprocess/fingerprint.py", "preprocess/preprocess.py",
    "preprocess/worker_pool.py", "row_checks.py", "row_stats.py",
)  # fmt: skip
PACKAGES = ("tokenizers", "jinja2", "numpy")


def fingerprint(rows: DatasetConfig, tokenizer: Tokenizer, table: RowReader) -> str | None:
    """32 hexadecimal digits; None where code has no file whose text could be compared."""
    modules = user_modules.user_modules(rows)
    if not all(module.file for module in modules):
        return None
    parts = {
        "rows": [rows.source, table.digest()],  # the source, because documents tell the file that they are from
        "choice": [type(rows).__qualname__, {name: repr(value) for name, value in rows.fingerprint_keys().items()}],
        "own": [(module.name, module.text) for module in modules],
        "tokenizer": tokenizer.digest,
        "code": code(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def code() -> dict[str, str]:
    """The text of the modules that make rows documents, and the versions of what they use."""
    here = Path(__file__).parent.parent
    texts = {file.relative_to(here).as_posix(): user_modules.hash_file(file) for file in sources()}
    return {**texts, "python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def sources() -> Iterator[Path]:
    here = Path(__file__).parent.parent
    files = (file for file in sorted(here.rglob("*.py")) if file.name != "__init__.py")
    return (file for file in files if not file.relative_to(here).as_posix().startswith(UNRELATED))
