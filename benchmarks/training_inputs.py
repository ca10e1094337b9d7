"""Inputs of the contestants: a random checkpoint, packed rows and an initial adapter, in one directory.

Tokens follow Zipf's law, so that the loss decreases within a few steps. A word-level tokenizer maps the text to
exactly these tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tunekit.data.dataloader.sampler import plan_rows

END, PREFIX = 0, "base_model.model."


@dataclass(frozen=True)
class Shape:
    """A Llama with a tied head and the RoPE of Llama 3.2, the only one that all contestants support."""

    layers: int = 30
    dim: int = 576
    heads: int = 9
    kv_heads: int = 3
    hidden: int = 1536
    vocab: int = 49152

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers of a block, by Hub name."""
        kv = self.kv_heads * self.dim // self.heads
        return {
            "self_attn.q_proj": (self.dim, self.dim),
            "self_attn.k_proj": (kv, self.dim),
            "self_attn.v_proj": (kv, self.dim),
            "self_attn.o_proj": (self.dim, self.dim),
            "mlp.gate_proj": (self.hidden, self.dim),
            "mlp.up_proj": (self.hidden, self.dim),
            "mlp.down_proj": (self.dim, self.hidden),
        }

    @property
    def config(self) -> dict[str, Any]:
        scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.dim,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim // self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_theta": 500000.0,
            "rope_scaling": {**scaling, "original_max_position_embeddings": 8192},
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": END,
            "pad_token_id": END,
            "torch_dtype": "bfloat16",
        }

    def tensors(self, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Initial weights in bf16, by Hub name."""

        def draw(*size: int) -> Tensor:
            return (torch.randn(size, generator=random) * 0.02).bfloat16()

        yield "model.embed_tokens.weight", draw(self.vocab, self.dim)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name, size in self.linears.items():
                yield f"{layer}{name}.weight", draw(*size)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}{name}.weight", torch.ones(self.dim, dtype=torch.bfloat16)
        yield "model.norm.weight", torch.ones(self.dim, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Task:
    """Training options of all contestants."""

    method: str = "lora"  # lora, qlora, full
    batch: int = 4  # rows per step
    steps: int = 6
    rank: int = 16
    alpha: int = 32
    lr: float = 1e-4


@dataclass(frozen=True)
class Work(Task):
    """`batch` packed rows of `length` tokens per step, filled with documents."""

    length: int = 512
    document_fractions: tuple[float, ...] = (200 / 512, 312 / 512)  # lengths of the documents relative to a span
    span: int | None = None  # tokens after which the documents repeat; None: a row

    @property
    def documents(self) -> list[int]:
        """Lengths of the documents of a row."""
        span = self.span or self.length
        ends = [round(span * sum(self.document_fractions[: i + 1])) for i in range(len(self.document_fractions))]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        assert sum(sizes) == span and self.length % span == 0
        return sizes * (self.length // span)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def num_target_tokens(self) -> int:
        """The first token of a document is not a target."""
        return self.batch * (self.length - len(self.documents))

    def flops(self, shape: Shape) -> float:
        """FLOPs of a step: 4 or 6 per weight and token, the head, and causal attention within documents."""
        weights = shape.layers * sum(out * inner for out, inner in shape.linears.values())
        lora = shape.layers * self.rank * sum(out + inner for out, inner in shape.linears.values())
        full = self.method == "full"
        head = (6 if full else 4) * shape.vocab * shape.dim * self.num_target_tokens
        pairs = self.batch * sum(n * (n + 1) / 2 for n in self.documents)
        attention = 3 * 4 * shape.layers * shape.dim * pairs
        return (6 if full else 4) * weights * self.tokens + (0 if full else 6 * lora * self.tokens) + head + attention


def prepare(folder: Path, shape: Shape, work: Task) -> None:
    """Write all inputs, once."""
    model, adapter = folder / "model", folder / "adapter"
    model.mkdir(parents=True)
    adapter.mkdir()
    random = torch.Generator().manual_seed(0)
    save_file(dict(shape.tensors(random)), model / "model.safetensors", metadata={"format": "pt"})
    write(model / "config.json", shape.config)
    write_tokenizer(model, shape.vocab)
    write_initial_adapter(adapter, model, shape, work, random)


def write_tokenizer(model: Path, vocab: int) -> None:
    """Word-level tokenizer."""
    words = {"<end>": END} | {f"w{i}": i for i in range(1, vocab)}
    end = {"id": END, "content": "<end>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    write(
        model / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "<end>"},
        },
    )
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write(model / "tokenizer_config.json", kind | {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<end>"})


def write_initial_adapter(adapter: Path, model: Path, shape: Shape, work: Task, random: torch.Generator) -> None:
    """Initial adapter in PEFT format: A as for a linear layer, B = 0."""
    tensors = {}
    for i in range(shape.layers):
        for name, (out, inner) in shape.linears.items():
            a = (torch.rand(work.rank, inner, generator=random) * 2 - 1) * inner**-0.5
            prefix = f"{PREFIX}model.layers.{i}.{name}."
            tensors |= {f"{prefix}lora_A.weight": a, f"{prefix}lora_B.weight": torch.zeros(out, work.rank)}
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    write(
        adapter / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model),
            "r": work.rank,
            "lora_alpha": work.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(name.rpartition(".")[2] for name in shape.linears),
        },
    )


def write_rows(folder: Path, shape: Shape, work: Work) -> None:
    """Texts for tunekit, and the same tokens as rows, in the packing order of tunekit, for the others."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(1)
    sizes = work.documents * (work.batch * work.steps)
    common = (random.pareto(1.0, (len(sizes), work.length)) * 20).astype(int) % (shape.vocab - 1) + 1
    documents = [[*row[: size - 1].tolist(), END] for row, size in zip(common, sizes, strict=True)]
    texts = (" ".join(f"w{token}" for token in document[:-1]) for document in documents)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    packed = plan_rows(np.array(sizes), np.arange(len(sizes)), work.length, None)
    write(folder / "rows.json", [[documents[i] for i in row] for row in packed.rows(0, len(packed))])
    write(folder / "work.json", asdict(work) | {"num_target_tokens": work.num_target_tokens} | asdict(shape))


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))
