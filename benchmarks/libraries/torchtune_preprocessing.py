"""torchtune 0.6.1: python torchtune_preparation.py ROWS TOKENIZER OUT, in an environment that has it.

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

IGNORED = -100


def main() -> None:
    rows, folder, out = map(Path, sys.argv[1:4])
    tokenizer = llama3_tokenizer(str(folder.parent / "words.tiktoken"), max_seq_len=2048)
    start = time.perf_counter()
    dataset = chat_dataset(
        tokenizer,
        source="json",
        data_files=str(rows),
        conversation_column="messages",
        conversation_style="openai",
        packed=True,
    )
    seconds = time.perf_counter() - start
    real = [int((pack["tokens"] != tokenizer.pad_id).sum()) for pack in dataset.packs]
    num_target_tokens = sum(int((pack["labels"] != IGNORED).sum()) for pack in dataset.packs)
    result = {
        "seconds": seconds,
        "rows": len(rows.read_text().splitlines()),
        "tokens": sum(real),
        "target_tokens": num_target_tokens,
    }
    out.write_text(json.dumps({**result, "versions": {"torchtune": torchtune.__version__}}))


if __name__ == "__main__":
    main()
