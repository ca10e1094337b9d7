"""Cache key of a preprocessed dataset: hash of its rows, config, tokenizer, and code."""

import functools
import hashlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tunekit import assets
from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess import user_modules
from tunekit.data.readers.row_reader import RowReader
from tunekit.data.tokenizer import Tokenizer

# Modules and packages of tunekit.data that do not affect the documents of a row. All others are part of the key.
UNRELATED = (
    "check_target.py", "column_checks.py", "dataloader/", "flag_findings.py", "inspect/", "label_checks.py",
    "preprocess/cache.py", "preprocess/fingerprint.py", "preprocess/preprocess.py", "preprocess/worker_pool.py",
    "row_checks.py", "row_stats.py",
)  # fmt: skip
PACKAGES = ("tokenizers", "jinja2", "numpy")


def fingerprint(config: DatasetConfig, tokenizer: Tokenizer, reader: RowReader) -> str | None:
    """32 hexadecimal digits; None if a class has no source file, as in a notebook."""
    modules = user_modules.user_modules(config)
    if not all(module.file for module in modules):
        return None
    source = str(assets.DATA.get(config.source) or config.source)
    content = {
        "rows": [source, reader.digest()],  # the source, because documents store the names of their files
        "choice": [type(config).__qualname__, {name: repr(value) for name, value in config.fingerprint_keys().items()}],
        "own": [(module.name, module.text_hash) for module in modules],
        "tokenizer": tokenizer.digest,
        "code": code_hashes(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def code_hashes() -> dict[str, str]:
    """Hashes of the modules that turn rows into documents, and versions of the packages that they use.

    Read once per process: code that changes later is not what the process runs.
    """
    root = Path(__file__).parent.parent
    hashes = {path.relative_to(root).as_posix(): user_modules.hash_file(path) for path in code_files()}
    return {**hashes, "python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def code_files() -> Iterator[Path]:
    """Files of the modules that turn rows into documents."""
    root = Path(__file__).parent.parent
    paths = (path for path in sorted(root.rglob("*.py")) if path.name != "__init__.py")
    return (path for path in paths if not path.relative_to(root).as_posix().startswith(UNRELATED))
