"""trl: python trl_preparation.py ROWS TOKENIZER OUT, in an environment that has it.

Preprocessing of conversations by SFTTrainer for training on assistant messages, with two processes.
"""

import json
import sys
import time
from pathlib import Path

import datasets
import transformers
import trl
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer


class Timed(SFTTrainer):
    """Records the time of the preprocessing."""

    def _prepare_dataset(self, *args, **options):
        start = time.perf_counter()
        dataset = super()._prepare_dataset(*args, **options)
        self.prepared = time.perf_counter() - start
        return dataset


def main() -> None:
    rows, folder, out = map(Path, sys.argv[1:4])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    small = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    small.vocab_size = len(tokenizer)
    args = SFTConfig(
        output_dir=str(out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        max_length=2048,
        assistant_only_loss=True,
        dataset_num_proc=2,
        report_to="none",
        disable_tqdm=True,
    )
    start = time.perf_counter()
    table = datasets.load_dataset("json", data_files=str(rows), split="train")
    loaded = time.perf_counter() - start
    trainer = Timed(LlamaForCausalLM(small), args=args, train_dataset=table, processing_class=tokenizer)
    dataset = trainer.train_dataset
    num_target_tokens = tokens = 0
    for batch in dataset.with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        tokens, num_target_tokens = tokens + len(labels), num_target_tokens + int((labels != -100).sum())
    result = {
        "seconds": loaded + trainer.prepared,
        "rows": len(dataset),
        "tokens": tokens,
        "target_tokens": num_target_tokens,
    }
    packages = (trl, transformers, datasets)
    out.write_text(json.dumps({**result, "versions": {package.__name__: package.__version__ for package in packages}}))


if __name__ == "__main__":
    main()
