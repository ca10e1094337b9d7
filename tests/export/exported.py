"""Models that a GGUF file can hold, small and random, with tokenizers of the kinds that it can hold."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests import checkpoints
from tests.checkpoints import SHAPES
from tests.shapes_dense import GEMMA2, GEMMA3, KINDS3
from tests.shapes_experts import QWEN2
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.gguf_writer import write_gguf
from tunekit.export.quant_types import parse_quant_type
from tunekit.export.tensor_map import TensorMap, build_tensor_map

NAMES = ("llama2", "llama3.1", "llama3.2", "llama-biases", "llama-linear", "llama-yarn", "smollm2", "smollm3")
NAMES += ("granite", "granite-tied", "mistral", "mistral-null", "ministral", "ministral3", "ministral3-sliding")
NAMES += ("gemma", "phi3", "phi3-long", "phi4-mini", "olmo2", "olmo3", "olmo3-yarn", "qwen2", "qwen2-tied")
NAMES += ("qwen2-sliding", "qwen3", "qwen3-sliding", "mistral3-vision", "ministral3-vision", "qwen2-vl", "qwen2.5-vl")
NAMES += ("qwen3-vl", "mixtral", "mixtral-sliding", "qwen3-moe", "qwen3-moe-sliding")
# llama.cpp scales the scores of Gemma by the width of a head, and has no expert layers among dense ones.
FITTING: dict[str, dict[str, Any]] = {name: SHAPES[name] for name in NAMES} | {
    "gemma2": GEMMA2 | {"query_pre_attn_scalar": 10, "num_hidden_layers": 5},
    "gemma3": GEMMA3 | {"query_pre_attn_scalar": 10, "num_hidden_layers": 7},
    "gemma3-mixed": GEMMA3
    | {"query_pre_attn_scalar": 10, "num_hidden_layers": 4, "rope_parameters": KINDS3, "tie_word_embeddings": False}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "qwen2-moe": QWEN2 | {"norm_topk_prob": False},
}
TEXT = """The quick brown fox jumps over the lazy dog, and 12 more dogs look on. It's 7:30; isn't that late?
def f(x):
    return {"city": "Oslo", "day": x + 1000}

Größe, façade, naïve. Привет, мир! 你好，世界。 WE'LL see what they've done, 1234567 times.
""".splitlines(keepends=True)
MARKS = ("<pad>", "<begin>", "<end>", "<turn>")
TEMPLATE = "{% for m in messages %}{{ m.content }}<turn>{% endfor %}"


def made(folder: Path, shape: dict[str, Any]) -> Path:
    """A checkpoint of transformers."""
    return checkpoints.save(checkpoints.build(shape), folder)


def written(folder: Path, out: Path, word: str = "f32") -> tuple[TensorMap, GGUFCheckpoint]:
    """A checkpoint as a file without a tokenizer, and the file opened again."""
    plan = build_tensor_map(HFCheckpoint.open(folder), parse_quant_type(word))
    write_gguf(out, plan, {"tokenizer.ggml.model": "none"}, quiet=True)
    return plan, GGUFCheckpoint.open(out)


def write_bytes(folder: Path, pre: Any, whole: bool = False, normalizer: Any = None) -> Path:
    """Byte-level BPE of 300 tokens, trained on a few lines; `<turn>` ends an answer, `<tool>` is no special token."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(MARKS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    begin = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    tokenizer.post_processor = begin
    return finish(folder, tokenizer)


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Words by expressions, then bytes."""
    cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])


def write_pieces(folder: Path, prefix: str) -> Path:
    """SentencePiece's BPE as converters write it: every way to make a token of two is a merge.

    `prefix`: a space before each part of a text ("always"), before the first ("first") or nowhere ("never").
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trained.train_from_iterator(TEXT * 3, trainers.BpeTrainer(vocab_size=150))
    learnt = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(["<unk>", *MARKS, *bytes_, *learnt, "\u2581\u2581"]))}
    ways = [(t[:i], t[i:]) for t in vocab for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, ways, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    if prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        tokenizer.normalizer = tokenizer.normalizer if prefix == "always" else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", *MARKS])
    return finish(folder, tokenizer)


def finish(folder: Path, tokenizer: Tokenizer) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, tokenizer.token_to_id("<turn>")]}))
    return folder
