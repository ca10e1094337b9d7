"""transformers + peft + trl (+ bitsandbytes): python trl_dpo.py GIVEN ROWS OUT, in an environment that has them.

The reference is the model with its adapter disabled. `--flat`: pairs without padding (`padding_free`).
"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_run import Ordered, TimingCallback, arguments, load, parse_arguments, train

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Trainer(Ordered, DPOTrainer):
    """Trains on pairs of texts."""


def main() -> None:
    (folder, rows, out, work), watch = parse_arguments(), TimingCallback()
    more = {"padding_free": "--flat" in sys.argv, "beta": work["beta"]}
    trainer = Trainer(
        load(folder, work).unload(),  # the given adapter is created by the trainer: a loaded one would be kept twice
        args=DPOConfig(**arguments(out, work), **more),
        peft_config=LoraConfig(r=work["rank"], lora_alpha=work["alpha"], target_modules=TARGETS),
        train_dataset=load_dataset("json", data_files=str(rows / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[watch],
    )
    train(trainer, watch, out)


if __name__ == "__main__":
    main()
