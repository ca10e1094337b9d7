"""Dataset `tunekit/sums`: questions about sums whose first number is a word, and the expected numbers."""

from pathlib import Path
from random import Random

from scripts.nano.jsonl import write_rows
from scripts.nano.word_lists import NUMBER_WORDS

NUM_TRAIN_ROWS = 64  # of 81


def write_sums(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`, which have no row in common."""
    rows = [
        {"prompt": f"What is {NUMBER_WORDS[first]} plus {second}?", "answer": str(first + second)}
        for first in range(1, 10)
        for second in range(1, 10)
    ]
    Random(seed).shuffle(rows)
    write_rows(directory / "train.jsonl", rows[:NUM_TRAIN_ROWS])
    write_rows(directory / "test.jsonl", rows[NUM_TRAIN_ROWS:])
