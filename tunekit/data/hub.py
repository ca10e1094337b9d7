"""Rows of a data set on the Hugging Face Hub. A module of its own because `datasets` is slow to import."""

import datasets
from datasets.exceptions import DatasetsError

from tunekit.data.table import Row, Table
from tunekit.errors import UserError


def hub_set(name: str, split: str) -> Table:
    """The rows of one split. `owner/name:part` names one of the data set's configurations."""
    path, _, part = name.partition(":")
    try:
        rows = datasets.load_dataset(path, part or None, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: no such file or folder, and no split {split!r} from the Hub: {reason}") from None
    assert isinstance(rows, datasets.Dataset)
    numbered = enumerate(rows, 1)
    return Table(len(rows), (Row(f"{name} {split} row {number}", dict(fields)) for number, fields in numbered))
