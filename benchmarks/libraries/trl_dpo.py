"""DPO with transformers + peft + trl (+ bitsandbytes), in an environment that has them.

python trl_dpo.py CHECKPOINT_DIR DATA_DIR OUTPUT [--padding-free]

The reference is the model with its adapter disabled. `--padding-free` sets `padding_free`.
"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_training import SequentialTrainer, TimingCallback, build_trainer_arguments, load_model, parse_arguments, train

TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class SequentialDPOTrainer(SequentialTrainer, DPOTrainer):
    """Trains on pairs of texts in order."""


def main() -> None:
    (checkpoint_dir, data_dir, output, task), timing = parse_arguments(), TimingCallback()
    options = {"padding_free": "--padding-free" in sys.argv, "beta": task["beta"]}
    trainer = SequentialDPOTrainer(
        load_model(checkpoint_dir, task).unload(),  # the trainer creates the adapter, and a copy of a loaded one
        args=DPOConfig(**build_trainer_arguments(output, task), **options),
        peft_config=LoraConfig(r=task["rank"], lora_alpha=task["alpha"], target_modules=TARGET_MODULES),
        train_dataset=load_dataset("json", data_files=str(data_dir / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(checkpoint_dir / "model"),
        callbacks=[timing],
    )
    train(trainer, timing, output)


if __name__ == "__main__":
    main()
