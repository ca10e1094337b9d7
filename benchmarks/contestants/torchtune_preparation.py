"""torchtune 0.6.1: python torchtune_preparation.py ROWS TOKENIZER OUT, in an environment that has it.

`chat_dataset` with `packed=True`, which is how its recipes prepare rows before they train; unpacked, they do it while
they train. Its tokenizer of Llama 3, on the words of the others.
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
    began = time.perf_counter()
    found = chat_dataset(
        tokenizer,
        source="json",
        data_files=str(rows),
        conversation_column="messages",
        conversation_style="openai",
        packed=True,
    )
    seconds = time.perf_counter() - began
    real = [int((pack["tokens"] != tokenizer.pad_id).sum()) for pack in found.packs]
    learnt = sum(int((pack["labels"] != IGNORED).sum()) for pack in found.packs)
    told = {"seconds": seconds, "rows": len(rows.read_text().splitlines()), "tokens": sum(real), "learnt": learnt}
    out.write_text(json.dumps({**told, "versions": {"torchtune": torchtune.__version__}}))


if __name__ == "__main__":
    main()
