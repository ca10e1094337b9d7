"""Tokenizer, chat template and configs of the bundled model: python -m scripts.nano.tokenizer CORPUS_DIR MODEL_DIR"""

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
CONTEXT_LENGTH = 1024
SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|turn|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD_ID, BEGIN_ID, END_ID, TURN_ID = range(4)
# Words with the preceding space, single digits, punctuation, whitespace.
SPLIT_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"

SPECIAL_TOKENS_MAP = {
    "bos_token": SPECIAL_TOKENS[BEGIN_ID],
    "eos_token": SPECIAL_TOKENS[TURN_ID],
    "pad_token": SPECIAL_TOKENS[PAD_ID],
}
TOKENIZER_CONFIG = SPECIAL_TOKENS_MAP | {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONTEXT_LENGTH,
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_LENGTH,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": BEGIN_ID,
    "eos_token_id": TURN_ID,
    "pad_token_id": PAD_ID,
}
GENERATION_CONFIG = {
    "bos_token_id": BEGIN_ID,
    "eos_token_id": [TURN_ID, END_ID],
    "pad_token_id": PAD_ID,
    "do_sample": False,
}
CONFIG_FILES = {
    "tokenizer_config": TOKENIZER_CONFIG,
    "special_tokens_map": SPECIAL_TOKENS_MAP,
    "config": MODEL_CONFIG,
    "generation_config": GENERATION_CONFIG,
}


def iter_corpus_texts(corpus_dir: Path) -> Iterator[str]:
    """Texts and message contents of the corpus."""
    for name in ("text", "chat"):
        yield from iter_row_texts(json.loads(line) for line in (corpus_dir / f"{name}.jsonl").open(encoding="utf-8"))


def iter_row_texts(rows: Iterable[dict]) -> Iterator[str]:
    """Texts and message contents of rows."""
    for row in rows:
        yield from [row["text"]] if "text" in row else (message["content"] for message in row["messages"])


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE, which is lossless. With special tokens, encoded text starts with `<|begin|>`."""
    tokenizer = Tokenizer(models.BPE())
    splitters = [
        pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin_token = SPECIAL_TOKENS[BEGIN_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin_token} $A", pair=f"{begin_token} $A {begin_token} $B", special_tokens=[(begin_token, BEGIN_ID)]
    )
    return tokenizer


def write_model_files(corpus_dir: Path, model_dir: Path) -> None:
    """Write the tokenizer, the chat template, and the configs."""
    model_dir.mkdir(parents=True, exist_ok=True)
    train_tokenizer(iter_corpus_texts(corpus_dir)).save(str(model_dir / "tokenizer.json"))
    shutil.copyfile(CHAT_TEMPLATE, model_dir / CHAT_TEMPLATE.name)
    for name, content in CONFIG_FILES.items():
        (model_dir / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus_dir", type=Path)
    parser.add_argument("model_dir", type=Path)
    args = parser.parse_args()
    write_model_files(args.corpus_dir, args.model_dir)


if __name__ == "__main__":
    main()
