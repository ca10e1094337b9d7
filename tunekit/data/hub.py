"""Rows of a data set on the Hugging Face Hub. A module of its own because `datasets` is slow to import."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from tunekit.data.arrow import ColumnChunk, pieces
from tunekit.data.table import ROWS, Chunk, Part, Place
from tunekit.errors import UserError


@dataclass(frozen=True)
class HubSet:
    """A split as `datasets` has fetched it, in Arrow files of this machine. Places count rows."""

    name: str
    data: datasets.Dataset

    def count(self, most: int | None) -> int:
        return len(self.data)

    def chunks(self, place: Place) -> Iterator[Chunk]:
        columns = self.data.with_format("arrow")
        for start in range(place.offset, len(columns), ROWS):
            rows: Any = columns[start : start + ROWS]
            for batch in pieces(rows.combine_chunks().to_batches(), 0):
                yield ColumnChunk(self.name, place, batch)
                place = ColumnChunk.behind(place, batch.num_rows)

    def digest(self, whole: bool) -> bytes:
        """Of the name, the commit and the split that `datasets` took it from."""
        return self.data._fingerprint.encode()


def hub_set(name: str, split: str) -> Part:
    """The rows of one split. `owner/name:part` names one of the data set's configurations."""
    path, _, part = name.partition(":")
    try:
        rows = datasets.load_dataset(path, part or None, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: no such file or folder, and no split {split!r} from the Hub: {reason}") from None
    assert isinstance(rows, datasets.Dataset)
    return HubSet(f"{name} {split}", rows)
