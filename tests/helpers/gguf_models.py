"""Small random models of the architectures that GGUF supports, with tokenizers of the supported kinds."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.helpers import random_checkpoints as checkpoints
from tests.helpers.dense_shapes import GEMMA2, GEMMA3, GEMMA3_ROPE
from tests.helpers.moe_shapes import QWEN2
from tests.helpers.random_checkpoints import SHAPES
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.export.gguf_export import write_gguf
from tunekit.export.gguf_plan import GGUFPlan, build_gguf_plan
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.quant_types import parse_quant_type

NAMES = ("llama2", "llama3.1", "llama3.2", "llama-biases", "llama-linear", "llama-yarn", "smollm2", "smollm3")
NAMES += ("granite", "granite-tied", "mistral", "mistral-null", "ministral", "ministral3", "ministral3-sliding")
NAMES += ("gemma", "phi3", "phi3-long", "phi4-mini", "olmo2", "olmo3", "olmo3-yarn", "qwen2", "qwen2-tied")
NAMES += ("qwen2-sliding", "qwen3", "qwen3-sliding", "mistral3-vision", "ministral3-vision", "qwen2-vl", "qwen2.5-vl")
NAMES += ("qwen3-vl", "mixtral", "mixtral-sliding", "qwen3-moe", "qwen3-moe-sliding")
# llama.cpp scales the scores of Gemma by the head dimension, and does not support dense layers between expert layers.
SUPPORTED: dict[str, dict[str, Any]] = {name: SHAPES[name] for name in NAMES} | {
    "gemma2": GEMMA2 | {"query_pre_attn_scalar": 10, "num_hidden_layers": 5},
    "gemma3": GEMMA3 | {"query_pre_attn_scalar": 10, "num_hidden_layers": 7},
    "gemma3-mixed": GEMMA3
    | {
        "query_pre_attn_scalar": 10,
        "num_hidden_layers": 4,
        "rope_parameters": GEMMA3_ROPE,
        "tie_word_embeddings": False,
    }
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "qwen2-moe": QWEN2 | {"norm_topk_prob": False},
}
TEXT = """The quick brown fox jumps over the lazy dog, and 12 more dogs look on. It's 7:30; isn't that late?
def f(x):
    return {"city": "Oslo", "day": x + 1000}

Größe, façade, naïve. Привет, мир! 你好，世界。 WE'LL see what they've done, 1234567 times.
""".splitlines(keepends=True)
SPECIAL_TOKENS = ("<pad>", "<begin>", "<end>", "<turn>")
TEMPLATE = "{% for m in messages %}{{ m.content }}<turn>{% endfor %}"


def make_checkpoint(directory: Path, shape: dict[str, Any]) -> Path:
    """Write a transformers checkpoint."""
    return checkpoints.save(checkpoints.build(shape), directory)


def export_checkpoint(directory: Path, out: Path, quant_type: str = "f32") -> tuple[GGUFPlan, GGUFCheckpoint]:
    """Write a checkpoint as a GGUF file without a tokenizer, and open the file."""
    gguf_plan = build_gguf_plan(HFCheckpoint.open(directory), parse_quant_type(quant_type))
    write_gguf(out, gguf_plan, {"tokenizer.ggml.model": "none"})
    return gguf_plan, GGUFCheckpoint.open(out)


def write_byte_level_bpe(
    directory: Path, pre_tokenizer: Any, ignore_merges: bool = False, normalizer: Any = None
) -> Path:
    """Write a byte-level BPE trained on a few lines. `<turn>` ends answers, and `<tool>` is not a special token."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    template = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    tokenizer.post_processor = template
    return write_tokenizer(directory, tokenizer)


def regex_pre_tokenizer(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Split text by regular expressions, then into bytes."""
    splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


def write_sentencepiece(directory: Path, prefix: str) -> Path:
    """Write a SentencePiece BPE like converters do: each pair of tokens that forms a token is a merge.

    `prefix`: a space is added to each segment of a text ("always"), to the first one ("first"), or not ("never").
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trained.train_from_iterator(TEXT * 3, trainers.BpeTrainer(vocab_size=150))
    pieces = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {
        token: i for i, token in enumerate(dict.fromkeys(["<unk>", *SPECIAL_TOKENS, *bytes_, *pieces, "\u2581\u2581"]))
    }
    merges = [(t[:i], t[i:]) for t in vocab for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    if prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        tokenizer.normalizer = tokenizer.normalizer if prefix == "always" else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", *SPECIAL_TOKENS])
    return write_tokenizer(directory, tokenizer)


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, tokenizer.token_to_id("<turn>")]})
    )
    return directory
