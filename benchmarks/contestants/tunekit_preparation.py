"""tunekit: python tunekit_preparation.py ROWS TOKENIZER OUT. Rows are kept in the folder that TUNEKIT_CACHE names."""

import json
import sys
import time
from pathlib import Path

from tunekit import __version__
from tunekit.data.datasets import ChatDataset
from tunekit.data.preprocess import preprocess
from tunekit.data.tokenizer import Tokenizer


class Alone:
    """The only process."""

    is_main = True

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr)


def main() -> None:
    rows, folder, out = map(Path, sys.argv[1:4])
    tokenizer = Tokenizer.open(folder)
    began = time.perf_counter()
    found = preprocess.preprocess_dataset(ChatDataset(source=str(rows), max_length=2048), tokenizer, Alone())
    told = {"seconds": time.perf_counter() - began, "rows": len(found), "tokens": len(found.tokens)}
    out.write_text(json.dumps({**told, "learnt": found.targets, "versions": {"tunekit": __version__}}))


if __name__ == "__main__":
    main()
