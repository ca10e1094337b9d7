"""SFT with transformers + peft + trl (+ bitsandbytes), in an environment that has them.

python trl_sft.py CHECKPOINT_DIR DATA_DIR OUTPUT [--wrapped]

Rows are flattened as trl does for packed rows (`padding_free`). `--wrapped` trains on each row as one document:
this needs no mask and is faster, but documents attend to each other.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_training import SequentialTrainer, TimingCallback, build_trainer_arguments, load_model, parse_arguments, train


class SequentialSFTTrainer(SequentialTrainer, SFTTrainer):
    """Trains on tokenized rows in order."""


def load_rows(data_dir: Path, wrapped: bool) -> Dataset:
    rows = json.loads((data_dir / "rows.json").read_text())
    columns = {"input_ids": [sum(row, []) for row in rows]}
    if not wrapped:
        columns["seq_lengths"] = [[len(document) for document in row] for row in rows]
    return Dataset.from_dict(columns)


def main() -> None:
    (checkpoint_dir, data_dir, output, task), timing = parse_arguments(), TimingCallback()
    wrapped = "--wrapped" in sys.argv
    options = {"padding_free": not wrapped, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = SequentialSFTTrainer(
        load_model(checkpoint_dir, task),
        args=SFTConfig(**build_trainer_arguments(output, task), **options),
        train_dataset=load_rows(data_dir, wrapped),
        processing_class=AutoTokenizer.from_pretrained(checkpoint_dir / "model"),
        callbacks=[timing],
    )
    train(trainer, timing, output)


if __name__ == "__main__":
    main()
