"""Generated conversations and tokenizers for the preprocessing benchmark.

Words are invented and follow Zipf's law. The tokenizer is a byte-level BPE that is trained on them, so a word has
one or a few tokens.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

NUM_WORDS, NUM_SENTENCES, VOCAB_SIZE = 40_000, 60_000, 32_000
# Ranges, without their ends: questions and answers of a conversation, sentences of each
TURNS, QUESTION_SENTENCES, ANSWER_SENTENCES = (3, 6), (1, 4), (3, 12)
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


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja source and special tokens; the first two are BOS and padding."""

    source: str
    special_tokens: tuple[str, ...]
    eos_token: str


TEMPLATES = {
    "chatml": ChatTemplate(CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "headers": ChatTemplate(
        HEADERS,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
}


def generate_sentences() -> list[str]:
    """Sentences of 5 to 20 words, with capitals, commas and numbers."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(NUM_WORDS)]
    frequencies = 1 / np.arange(1, NUM_WORDS + 1)
    lengths = rng.integers(5, 21, NUM_SENTENCES)
    word_ids = iter(rng.choice(NUM_WORDS, lengths.sum(), p=frequencies / frequencies.sum()).tolist())
    sentences = []
    for length in lengths.tolist():
        sentence = [words[next(word_ids)] for _ in range(length)]
        sentence[length // 2] += "," if length % 3 else f" {length * 37}"
        sentences.append(" ".join(sentence).capitalize() + ".")
    return sentences


def generate_chats(num_chats: int, seed: int = 1) -> Iterator[dict]:
    """Conversations of three to five questions and answers."""
    rng, sentences = np.random.default_rng(seed), generate_sentences()
    for _ in range(num_chats):
        messages = []
        for _ in range(rng.integers(*TURNS)):
            for role, num_sentences in (("user", QUESTION_SENTENCES), ("assistant", ANSWER_SENTENCES)):
                sentence_ids = rng.integers(0, NUM_SENTENCES, rng.integers(*num_sentences)).tolist()
                messages.append({"role": role, "content": " ".join(sentences[i] for i in sentence_ids)})
        yield {"messages": messages}


def write_chats(file: Path, num_chats: int) -> None:
    with file.open("w") as stream:
        stream.writelines(json.dumps(chat) + "\n" for chat in generate_chats(num_chats))


def write_tokenizers(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A tokenizer directory for each chat template, and the same vocabulary as a tiktoken file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(generate_sentences()[: NUM_SENTENCES // 3], trainer)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    directory.mkdir(exist_ok=True)
    lines = (f"{base64.b64encode(decode_token(token)).decode()} {rank}\n" for token, rank in vocab)
    (directory / "vocab.tiktoken").write_text("".join(lines))
    without_special_tokens = tokenizer.to_str()
    for name, template in TEMPLATES.items():
        (directory / name).mkdir(exist_ok=True)
        tokenizer = Tokenizer.from_str(without_special_tokens)
        special_tokens = [AddedToken(text, special=True, normalized=False) for text in template.special_tokens]
        tokenizer.add_special_tokens(special_tokens)
        tokenizer.save(str(directory / name / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template.source}
        config |= {"bos_token": template.special_tokens[0], "pad_token": template.special_tokens[1]}
        config |= {"eos_token": template.eos_token}
        (directory / name / "tokenizer_config.json").write_text(json.dumps(config))


def decode_token(token: str) -> bytes:
    """Bytes of a byte-level token."""
    return bytes(CHAR_TO_BYTE[char] for char in token)


def build_byte_table() -> dict[str, int]:
    """Bytes by character, as in GPT-2: printable bytes are themselves, others are the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


CHAR_TO_BYTE = build_byte_table()
