"""Tasks that ship with the package: questions as in the training text of the bundled model, and tool calls.

Some facts also occur in the training text; stories, texts to copy, and tool calls do not.
"""

import json
from itertools import islice

from tunekit import assets
from tunekit.data.datasets import ChatDataset
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.evaluation.generation_eval import LocatedDocument

MAX_LENGTH = 1024  # tokens of a row; the context length of the bundled model


def task_documents(task: str, tokenizer: Tokenizer, limit: int | None) -> list[LocatedDocument]:
    """The first `limit` rows of a task in the chat template of the model, or all of them."""
    with assets.TASKS[task].open(encoding="utf-8") as file:
        rows = [
            Row(f"{task} row {number}", json.loads(line)) for number, line in enumerate(islice(file, limit), start=1)
        ]
    dataset = ChatDataset(task, max_length=MAX_LENGTH)
    located: list[LocatedDocument] = []
    for row, documents in zip(rows, dataset.encode_rows(dataset.prepare_tokenizer(tokenizer), rows), strict=True):
        if not isinstance(documents, list):
            raise UserError(f"tasks: {task} cannot be evaluated: {documents}")
        located += [(row.where, document) for document in documents]
    return located
