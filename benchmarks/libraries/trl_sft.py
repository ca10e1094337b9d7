"""transformers + peft + trl (+ bitsandbytes): python trl_sft.py GIVEN ROWS OUT, in an environment that has them.

Rows are flattened as trl does for packed rows (`padding_free`). `--wrapped` trains on each row as one document:
this needs no mask and is cheaper, but documents attend to each other.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_run import Ordered, TimingCallback, arguments, load, parse_arguments, train


class Trainer(Ordered, SFTTrainer):
    """Trains on tokenized rows."""


def data(folder: Path, wrapped: bool) -> Dataset:
    rows = json.loads((folder / "rows.json").read_text())
    table = {"input_ids": [sum(row, []) for row in rows]}
    return Dataset.from_dict(table if wrapped else table | {"seq_lengths": [[len(d) for d in row] for row in rows]})


def main() -> None:
    (folder, rows, out, work), watch = parse_arguments(), TimingCallback()
    wrapped = "--wrapped" in sys.argv
    more = {"padding_free": not wrapped, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = Trainer(
        load(folder, work),
        args=SFTConfig(**arguments(out, work), **more),
        train_dataset=data(rows, wrapped),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[watch],
    )
    train(trainer, watch, out)


if __name__ == "__main__":
    main()
