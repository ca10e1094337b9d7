"""Rows of a data set on the Hugging Face Hub. A module of its own because `datasets` is slow to import."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import datasets
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

from tunekit.data.readers.arrow_reader import ColumnChunk, iter_batches
from tunekit.data.readers.data_files import file_format
from tunekit.data.readers.remote_files import RemoteFile, open_remote
from tunekit.data.readers.row_reader import ROWS, FileOffset, FileShard, RowChunk
from tunekit.errors import UserError

Found = TypeVar("Found")
COMMIT = re.compile(r"@[0-9a-f]{40}/")  # in an address; nobody wants it in every message


@dataclass(frozen=True)
class HubDataset:
    """A split as `datasets` has fetched it, in Arrow files of this machine. Places count rows."""

    name: str
    data: datasets.Dataset

    def count(self, most: int | None) -> int:
        return len(self.data)

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        columns = self.data.with_format("arrow")
        for start in range(place.offset, len(columns), ROWS):
            rows: Any = columns[start : start + ROWS]
            for batch in iter_batches(rows.combine_chunks().to_batches(), 0):
                yield ColumnChunk(self.name, place, batch)
                place = ColumnChunk.behind(place, batch.num_rows)

    def digest(self, whole: bool) -> bytes:
        """Of the name, the commit and the split that `datasets` took it from."""
        return self.data._fingerprint.encode()


def hub_set(name: str, split: str) -> FileShard:
    """The rows of one split, fetched whole. See `asked` for names."""
    rows = asked(name, split, lambda *words: datasets.load_dataset(*words[:2], split=split, revision=words[2]))
    assert isinstance(rows, datasets.Dataset)
    return HubDataset(f"{name} {split}", rows)


def hub_files(name: str, split: str) -> list[RemoteFile]:
    """The files of one split, as they lie on the Hub: they are read as they come, and nothing is kept of them."""
    found = asked(name, split, lambda *words: datasets.load_dataset_builder(*words[:2], revision=words[2]))
    files = found.config.data_files or {}
    if split not in files:
        raise UserError(f"{name}: no split {split!r} on the Hub; it has {', '.join(sorted(map(str, files))) or 'none'}")
    for url in files[split]:
        if not file_format(url):
            raise UserError(f"{name}: files such as {url.rpartition('/')[2]} cannot be streamed; leave out `streaming`")
    return [open_remote(url, COMMIT.sub("/", url)) for url in files[split]]


def asked(name: str, split: str, ask: Callable[[str, str | None, str | None], Found]) -> Found:
    """An answer about `owner/name:part@revision`; `part` is one of the data set's configurations."""
    rest, _, revision = name.partition("@")
    path, _, part = rest.partition(":")
    try:
        return ask(path, part or None, revision or None)
    except (DatasetsError, HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: no such file or folder, and no split {split!r} from the Hub: {reason}") from None
