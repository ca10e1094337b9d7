"""tunekit: python tunekit_preparation.py ROWS TOKENIZER OUT. TUNEKIT_CACHE sets the cache directory."""

import json
import sys
import time
from pathlib import Path

from tunekit import __version__
from tunekit.data.datasets import ChatDataset
from tunekit.data.preprocess import preprocess
from tunekit.data.tokenizer import Tokenizer


class SingleProcess:
    """Minimal context of a single process."""

    is_main_process = True

    def log(self, text: str) -> None:
        print(text, file=sys.stderr)


def main() -> None:
    rows, folder, out = map(Path, sys.argv[1:4])
    tokenizer = Tokenizer.open(folder)
    start = time.perf_counter()
    dataset = preprocess.preprocess_dataset(ChatDataset(source=str(rows), max_length=2048), tokenizer, SingleProcess())
    result = {"seconds": time.perf_counter() - start, "rows": len(dataset), "tokens": len(dataset.tokens)}
    out.write_text(
        json.dumps({**result, "target_tokens": dataset.num_target_tokens, "versions": {"tunekit": __version__}})
    )


if __name__ == "__main__":
    main()
