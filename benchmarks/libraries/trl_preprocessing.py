"""Preprocessing of conversations by trl, in an environment that has it.

python trl_preprocessing.py ROWS TOKENIZER_DIR OUTPUT

SFTTrainer prepares rows for training on assistant messages, with two processes.
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


class TimedTrainer(SFTTrainer):
    """Records the time of the preprocessing."""

    def _prepare_dataset(self, *args, **kwargs):
        start = time.perf_counter()
        dataset = super()._prepare_dataset(*args, **kwargs)
        self.preprocessing_seconds = time.perf_counter() - start
        return dataset


def main() -> None:
    rows, tokenizer_dir, output = map(Path, sys.argv[1:4])
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tiny = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    tiny.vocab_size = len(tokenizer)
    args = SFTConfig(
        output_dir=str(output.parent / "trl"),
        use_cpu=True,
        bf16=False,
        max_length=2048,
        assistant_only_loss=True,
        dataset_num_proc=2,
        report_to="none",
        disable_tqdm=True,
    )
    start = time.perf_counter()
    conversations = datasets.load_dataset("json", data_files=str(rows), split="train")
    loading_seconds = time.perf_counter() - start
    trainer = TimedTrainer(LlamaForCausalLM(tiny), args=args, train_dataset=conversations, processing_class=tokenizer)
    dataset = trainer.train_dataset
    num_tokens = num_target_tokens = 0
    for batch in dataset.with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        num_tokens, num_target_tokens = num_tokens + len(labels), num_target_tokens + int((labels != -100).sum())
    measurements = {
        "seconds": loading_seconds + trainer.preprocessing_seconds,
        "rows": len(dataset),
        "num_tokens": num_tokens,
        "num_target_tokens": num_target_tokens,
        "versions": {package.__name__: package.__version__ for package in (trl, transformers, datasets)},
    }
    output.write_text(json.dumps(measurements))


if __name__ == "__main__":
    main()
