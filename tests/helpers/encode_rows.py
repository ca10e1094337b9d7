"""Documents of one row."""

from tunekit.data.datasets import DatasetConfig
from tunekit.data.document import Document
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.tokenizer import Tokenizer


def encode_row(dataset: DatasetConfig, tokenizer: Tokenizer, fields: dict) -> list[Document] | BadRow | None:
    """Result of a row: documents, a BadRow, or None if it is removed."""
    (result,) = dataset.encode_rows(dataset.prepare_tokenizer(tokenizer), [Row("rows.jsonl:1", fields)])
    return result


def encode_document(dataset: DatasetConfig, tokenizer: Tokenizer, fields: dict) -> Document:
    """The only document of a valid row."""
    result = encode_row(dataset, tokenizer, fields)
    assert isinstance(result, list), result
    (document,) = result
    return document
