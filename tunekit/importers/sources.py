"""Sources of rows, as `datasets.load_dataset` names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE_BUILDERS = ("json", "csv", "parquet", "arrow", "text")  # names of `datasets` for local files


def join_source(source: str, subset: Any = None, revision: str | None = None) -> str:
    """A source with its subset and revision: owner/name:subset@revision."""
    return source + (f":{subset}" if subset else "") + (f"@{revision}" if revision else "")


def local_sources(source: str, files: Any, directory: str | None, split: str) -> tuple[str | None, str]:
    """File, pattern or directory of the rows, and the split in it; None for a dataset of the Hub.

    Files that are named by split have only the split `train` here.
    """
    name, _, part = split.partition("[")
    if isinstance(files, Mapping):
        files, split = files.get(name, next(iter(files.values()), None)), f"train[{part}" if part else "train"
    if isinstance(files, list):
        files = join_files([str(file) for file in files])
    if files is not None and (source in FILE_BUILDERS or Path(source).exists()):
        base = directory or (source if source not in FILE_BUILDERS else None)
        return str(Path(base) / files) if base else str(files), split
    if files is not None:
        return f"hf://datasets/{source}/{files}", split
    if directory is not None and source in FILE_BUILDERS:
        return directory, split
    return None, split


def join_files(files: list[str]) -> str:
    """One file, or a pattern that matches a list of files: their directory and suffix."""
    if len(files) == 1:
        return files[0]
    parents, suffixes = {Path(file).parent for file in files}, {Path(file).suffix for file in files}
    parent = parents.pop() if len(parents) == 1 else Path("**")
    return str(parent / f"*{suffixes.pop() if len(suffixes) == 1 else ''}")
