"""Trains the nano's tokenizer and writes all files of the checkpoint but its weights.

`python -m tunekit.nano.tokenizer <corpus folder> <model folder>`
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 2048
CONTEXT = 1024
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|turn|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD, BEGIN, END, TURN = range(4)
# Words with the space before them, digits one by one, runs of signs, white space.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"

NAMED = {"bos_token": SPECIAL[BEGIN], "eos_token": SPECIAL[TURN], "pad_token": SPECIAL[PAD]}
SETTINGS = NAMED | {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONTEXT,
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": BEGIN,
    "eos_token_id": TURN,
    "pad_token_id": PAD,
}
GENERATION = {"bos_token_id": BEGIN, "eos_token_id": [TURN, END], "pad_token_id": PAD, "do_sample": False}
FILES = {
    "tokenizer_config": SETTINGS,
    "special_tokens_map": NAMED,
    "config": CONFIG,
    "generation_config": GENERATION,
}


def texts(folder: Path) -> Iterator[str]:
    """What a corpus says, without its JSON: every text, every message."""
    for line in (folder / "text.jsonl").open(encoding="utf-8"):
        yield json.loads(line)["text"]
    for line in (folder / "chat.jsonl").open(encoding="utf-8"):
        yield from (message["content"] for message in json.loads(line)["messages"])


def train(corpus: Iterator[str]) -> Tokenizer:
    """Byte-level BPE: any text survives the round trip; `<|begin|>` comes first where special tokens are asked for."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    begin = SPECIAL[BEGIN]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BEGIN)]
    )
    return tokenizer


def write(corpus: Path, model: Path) -> None:
    """Writes the tokenizer, the template and the configuration into the folder `model`."""
    model.mkdir(parents=True, exist_ok=True)
    train(texts(corpus)).save(str(model / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, model / TEMPLATE.name)
    for name, content in FILES.items():
        (model / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    write(args.corpus, args.model)


if __name__ == "__main__":
    main()
