"""Preprocessing of conversations by torchtune 0.6.1, in an environment that has it.

python torchtune_preprocessing.py ROWS TOKENIZER_DIR OUTPUT

`chat_dataset` with `packed=True`, as its recipes preprocess rows before training; unpacked rows are tokenized
during training. Uses its Llama 3 tokenizer with the vocabulary of the others.
"""

import json
import sys
import time
from pathlib import Path

import torchtune
from torchtune.datasets import chat_dataset
from torchtune.models.llama3 import llama3_tokenizer

IGNORE = -100


def main() -> None:
    rows, tokenizer_dir, output = map(Path, sys.argv[1:4])
    tokenizer = llama3_tokenizer(str(tokenizer_dir.parent / "vocab.tiktoken"), max_seq_len=2048)
    start = time.perf_counter()
    dataset = chat_dataset(
        tokenizer,
        source="json",
        data_files=str(rows),
        conversation_column="messages",
        conversation_style="openai",
        packed=True,
    )
    measurements = {
        "seconds": time.perf_counter() - start,
        "rows": len(rows.read_text().splitlines()),
        "num_tokens": sum(int((pack["tokens"] != tokenizer.pad_id).sum()) for pack in dataset.packs),
        "num_target_tokens": sum(int((pack["labels"] != IGNORE).sum()) for pack in dataset.packs),
        "versions": {"torchtune": torchtune.__version__},
    }
    output.write_text(json.dumps(measurements))


if __name__ == "__main__":
    main()
