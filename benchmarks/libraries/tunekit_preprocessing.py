"""Preprocessing of conversations by tunekit. TUNEKIT_CACHE sets the cache directory.

python tunekit_preprocessing.py ROWS TOKENIZER_DIR OUTPUT
"""

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
    rows, tokenizer_dir, output = map(Path, sys.argv[1:4])
    tokenizer = Tokenizer.open(tokenizer_dir)
    start = time.perf_counter()
    dataset = preprocess.preprocess_dataset(ChatDataset(source=str(rows), max_length=2048), tokenizer, SingleProcess())
    measurements = {
        "seconds": time.perf_counter() - start,
        "rows": len(dataset),
        "num_tokens": len(dataset.tokens),
        "num_target_tokens": dataset.num_target_tokens,
        "versions": {"tunekit": __version__},
    }
    output.write_text(json.dumps(measurements))


if __name__ == "__main__":
    main()
