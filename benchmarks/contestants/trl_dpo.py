"""transformers + peft + trl (+ bitsandbytes): python trl_dpo.py GIVEN ROWS OUT, in an environment that has them.

As an experienced user sets DPO up on a CPU: SDPA, no recomputing, autocast to bf16, fused AdamW; the reference is the
model with its adapter switched off. `--flat`: pairs without padding (`padding_free`).
"""

import json
import sys
from pathlib import Path

import bitsandbytes
import peft
import torch
import transformers
import trl
from datasets import load_dataset
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_sft import Watch, load

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Ordered(DPOTrainer):
    """The pairs as they come."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)


def main() -> None:
    given, rows, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    work = json.loads((rows / "work.json").read_text())
    args = DPOConfig(
        output_dir=str(out.parent),
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        padding_free="--flat" in sys.argv,
        max_length=None,
        beta=work["beta"],
        per_device_train_batch_size=work["batch"],
        max_steps=work["steps"],
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    watch = Watch()
    trainer = Ordered(
        load(given, work).unload(),  # the adapter that is given: one to go on from would be kept twice
        args=args,
        peft_config=LoraConfig(r=work["rank"], lora_alpha=work["alpha"], target_modules=TARGETS),
        train_dataset=load_dataset("json", data_files=str(rows / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(given / "model"),
        callbacks=[watch],
    )
    trainer.train()
    packages = (torch, transformers, peft, trl, bitsandbytes)
    found = {"seconds": watch.seconds, "losses": watch.losses, "peak": watch.peak, "threads": torch.get_num_threads()}
    found["versions"] = {package.__name__: package.__version__ for package in packages}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
