"""Tokenizer directories with the template shapes of real model families, and fake runs of any size."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tunekit import assets
from tunekit.data import tokenizer
from tunekit.distributed.parallel_dims import ParallelDims

TEXT = [
    "The quick brown fox, said she, jumps over 12 lazy dogs.\n\n  It is so: naïve café, 你好, 😀!",
    "system user assistant model think Hello there. What is 2 + 2? It is 4. Thanks; and now?",
]

CHATML = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# Writes a reasoning block only after the last user message, and then even if there is no reasoning.
THINKING = """
{%- set found = namespace(last=-1) -%}
{%- for message in messages if message.role == 'user' -%}
    {%- set found.last = messages.index(message) -%}
{%- endfor -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- for tool in tools %}{{- tool | tojson }}
    {% endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- set parts = message.content.split('</think>') -%}
    {%- if message.role == 'assistant' and loop.index0 > found.last -%}
        {%- set own = parts[0].replace('<think>', '') if parts | length > 1 else '' -%}
        {%- set thought = message.reasoning_content or own -%}
        {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- (parts[-1].lstrip('\\n') if message.role == 'assistant' else message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

HEADERS = """
{{- bos_token -}}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%Y') + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate user/assistant') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

BRACKETS = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}
{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""

# The end token strips the line break after it; the template ends with eos unless a generation prompt is added.
CLOSED = """{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PLAIN = """{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

GENERATION = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content -}}{%- endgeneration -%}
        {{- '<|im_end|>\\n' -}}
    {%- else -%}
        {{- message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


@dataclass(frozen=True)
class Shape:
    """A chat template and the special tokens that it needs, including bos and eos."""

    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    plain: tuple[str, ...] = ()
    metaspace: bool = False


SHAPES = {
    "chatml": Shape(CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), None, "<|im_end|>"),
    "thinking": Shape(
        THINKING, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), None, "<|im_end|>", ("<think>", "</think>")
    ),
    "headers": Shape(
        HEADERS,
        ("<|begin|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin|>",
        "<|end_of_text|>",
    ),
    "turns": Shape(
        TURNS, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", ("\n\n",), metaspace=True
    ),
    "brackets": Shape(BRACKETS, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", metaspace=True),
    "closed": Shape(CLOSED, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"), None, "<|endoftext|>"),
    "plain": Shape(PLAIN, ("<|endoftext|>",), None, "<|endoftext|>"),
    "generation": Shape(GENERATION, ("<|im_start|>", "<|im_end|>"), None, "<|im_end|>"),
}


def train_tokenizer(shape: Shape) -> Tokenizer:
    """Train a tokenizer: byte-level like Qwen and Llama 3, or metaspace with byte fallback like Gemma and Mistral."""
    special = [AddedToken(text, special=True, normalized=False, rstrip=text == "<|end|>") for text in shape.special]
    if shape.metaspace:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
        )
        first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=440, special_tokens=first, show_progress=False)
        tokenizer.train_from_iterator([text.replace("😀", "") for text in TEXT], trainer)
        # Only the trainer needs bytes as special tokens: as added tokens their texts would be tokenized as bytes.
        saved = json.loads(tokenizer.to_str())
        saved["added_tokens"] = saved["added_tokens"][:1]
        tokenizer = Tokenizer.from_str(json.dumps(saved))
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in shape.plain])
    steps: list = [] if shape.metaspace else [processors.ByteLevel(trim_offsets=True)]
    if shape.bos is not None:
        bos = (shape.bos, tokenizer.token_to_id(shape.bos))
        steps.append(processors.TemplateProcessing(single=f"{shape.bos} $A", special_tokens=[bos]))
    tokenizer.post_processor = processors.Sequence(steps)
    tokenizer.enable_truncation(7)  # settings of tokenizer.json that must be ignored
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(shape.eos), pad_token=shape.eos)
    return tokenizer


def write_tokenizer(directory: Path, shape: Shape) -> Path:
    train_tokenizer(shape).save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": shape.eos, "chat_template": shape.template}
    if shape.bos is not None:
        config["bos_token"] = {"content": shape.bos, "special": True, "__type": "AddedToken"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def nano() -> tokenizer.Tokenizer:
    directory = assets.model_dir("tunekit/nano")
    assert directory is not None
    return tokenizer.Tokenizer.open(directory).with_vocab_size(2048, directory)


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_tokenizer(tmp_path_factory.mktemp(name), shape) for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class FakeDist:
    """Fake distributed context of one rank."""

    rank: int = 0
    world_size: int = 1
    seed: int = 0

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        return self.rank

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(dp_shard=self.world_size)

    def log(self, message: str) -> None:
        print(message, file=sys.stderr)


@pytest.fixture
def make_dist() -> Callable[..., FakeDist]:
    return FakeDist
