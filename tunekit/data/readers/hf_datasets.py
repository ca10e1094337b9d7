"""Reader of datasets on the Hugging Face Hub. A separate module because `datasets` is slow to import."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import datasets
from datasets.exceptions import DatasetGenerationError

from tunekit.data.readers.arrow_reader import iter_batches, iter_chunks
from tunekit.data.readers.data_files import file_format
from tunekit.data.readers.library_errors import LibraryErrors
from tunekit.data.readers.remote_files import RemoteFile, open_filesystem
from tunekit.data.readers.row_reader import CHUNK_ROWS, FileOffset, FileShard, RowChunk
from tunekit.errors import UserError
from tunekit.hub import errors
from tunekit.hub.foreign_hints import drop_hints

Result = TypeVar("Result")
COMMIT_IN_URL = re.compile(r"@[0-9a-f]{40}/")  # removed in error messages


@dataclass(frozen=True)
class HubDataset(FileShard):
    """A split that `datasets` has downloaded to local Arrow files. Offsets are rows."""

    name: str
    data: datasets.Dataset

    def count(self, limit: int | None) -> int:
        return len(self.data)

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        columns: Any = self.data.with_format("arrow")
        starts = range(position.offset, len(columns), CHUNK_ROWS)
        tables = (columns[start : start + CHUNK_ROWS].combine_chunks() for start in starts)
        batches = (batch for table in tables for batch in iter_batches(table.to_batches(), 0))
        return iter_chunks(self.name, batches, position)

    def digest(self, full: bool) -> bytes:
        """Fingerprint of `datasets`, which depends on name, commit, and split."""
        return self.data._fingerprint.encode()


def open_hub_dataset(name: str, split: str) -> FileShard:
    """Download one split. See `load_from_hub` for names."""
    rows = load_from_hub(name, split, lambda *args: datasets.load_dataset(*args[:2], split=split, revision=args[2]))
    assert isinstance(rows, datasets.Dataset)
    return HubDataset(f"{name} {split}", rows)


def list_hub_files(name: str, split: str) -> list[RemoteFile]:
    """Return the files of one split on the Hub, which are streamed and not cached."""
    builder = load_from_hub(name, split, lambda *args: datasets.load_dataset_builder(*args[:2], revision=args[2]))
    files = builder.config.data_files or {}
    if split not in files:
        splits = ", ".join(sorted(map(str, files))) or "none"
        raise UserError(f"{name}: no split {split!r} on the Hub. Available splits: {splits}.")
    for url in files[split]:
        if not file_format(url):
            file = url.rpartition("/")[2]
            raise UserError(f"{name}: {file} cannot be streamed. Set `streaming` to false.")
    return [RemoteFile(COMMIT_IN_URL.sub("/", url), open_filesystem(url), url) for url in files[split]]


def load_from_hub(name: str, split: str, load: Callable[[str, str | None, str | None], Result]) -> Result:
    """Call `load(path, config, revision)` for `owner/name:config@revision` and convert its errors to UserErrors."""
    path_and_config, _, revision = name.partition("@")
    path, _, config = path_and_config.partition(":")
    problem = f"no such file or directory, and cannot load split {split!r} from the Hub"
    with LibraryErrors(lambda error: f"{name}: {problem}: {explain_error(error, path)}"):
        return errors.retry_call(lambda: load(path, config or None, revision or None), name)


def explain_error(error: BaseException, path: str) -> str:
    """Message of an error of `datasets`, which wraps errors of its formats in one without a reason."""
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        return explain_error(error.__cause__, path)
    hint = f". Set `source` to {path}:NAME" if "Config name is missing" in str(error) else ""
    return drop_hints(error).rstrip(".") + hint
