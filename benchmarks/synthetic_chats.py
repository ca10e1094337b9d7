"""Generated conversations and tokenizers for the preprocessing benchmark.

Words are invented and follow Zipf's law. The tokenizer is a byte-level BPE that is trained on them, so a word has
one or a few tokens.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

WORDS, SENTENCES, VOCAB = 40_000, 60_000, 32_000
# number of sentences of each question and answer, of which there are three to five
TURNS, QUESTION, ANSWER = (3, 6), (1, 4), (3, 12)
SYLLABLES = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "ing", "ou")]

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}\
{{ message.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADERS = """{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<|eot_id|>{% endgeneration %}\
{% else %}{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
TEMPLATES = {
    "chatml": (CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "headers": (
        HEADERS,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
}


def sentences() -> list[str]:
    """Sentences of 5 to 20 words, with capitals, commas and numbers."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(SYLLABLES, random.integers(1, 4))) for _ in range(WORDS)]
    often = 1 / np.arange(1, WORDS + 1)
    lengths = random.integers(5, 21, SENTENCES)
    drawn = iter(random.choice(WORDS, lengths.sum(), p=often / often.sum()).tolist())
    texts = []
    for length in lengths.tolist():
        chosen = [words[next(drawn)] for _ in range(length)]
        chosen[length // 2] += "," if length % 3 else f" {length * 37}"
        texts.append(" ".join(chosen).capitalize() + ".")
    return texts


def chats(count: int, seed: int = 1) -> Iterator[dict]:
    """Conversations of three to five questions and answers."""
    random, known = np.random.default_rng(seed), sentences()
    for _ in range(count):
        messages = []
        for _ in range(random.integers(*TURNS)):
            for role, bounds in (("user", QUESTION), ("assistant", ANSWER)):
                drawn = random.integers(0, SENTENCES, random.integers(*bounds)).tolist()
                messages.append({"role": role, "content": " ".join(known[i] for i in drawn)})
        yield {"messages": messages}


def write_rows(file: Path, count: int) -> None:
    with file.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in chats(count))


def write_tokenizers(folder: Path, vocab: int = VOCAB) -> None:
    """A tokenizer directory for each chat template, and the same vocabulary as a tiktoken file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(sentences()[: SENTENCES // 3], trainer)
    ranks = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    folder.mkdir(exist_ok=True)
    lines = (f"{base64.b64encode(raw(token)).decode()} {rank}\n" for token, rank in ranks)
    (folder / "words.tiktoken").write_text("".join(lines))
    plain = tokenizer.to_str()
    for name, (template, special, end) in TEMPLATES.items():
        (folder / name).mkdir(exist_ok=True)
        with_special = Tokenizer.from_str(plain)
        with_special.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        with_special.save(str(folder / name / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": end}
        config |= {"pad_token": special[1], "chat_template": template}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(config))


def raw(token: str) -> bytes:
    """Bytes of a byte-level token."""
    return bytes(BYTES[char] for char in token)


def byte_table() -> dict[str, int]:
    """Characters of bytes: printable bytes are themselves, others are the characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = byte_table()
