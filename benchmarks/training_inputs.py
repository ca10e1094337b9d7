"""Inputs of all compared libraries: a random checkpoint, packed rows and an initial adapter, in one directory.

Tokens follow Zipf's law, so that the loss decreases within a few steps. A word-level tokenizer maps the text to
exactly these tokens.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tunekit.data.dataloader.sampler import plan_rows

EOS_ID, PEFT_PREFIX = 0, "base_model.model."


@dataclass(frozen=True)
class LlamaShape:
    """A Llama with a tied head and the RoPE of Llama 3.2, the only one that all libraries support."""

    layers: int = 30
    dim: int = 576
    heads: int = 9
    kv_heads: int = 3
    intermediate_size: int = 1536
    vocab: int = 49152

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of the linear layers of a block, by Hub name."""
        kv = self.kv_heads * self.dim // self.heads
        return {
            "self_attn.q_proj": (self.dim, self.dim),
            "self_attn.k_proj": (kv, self.dim),
            "self_attn.v_proj": (kv, self.dim),
            "self_attn.o_proj": (self.dim, self.dim),
            "mlp.gate_proj": (self.intermediate_size, self.dim),
            "mlp.up_proj": (self.intermediate_size, self.dim),
            "mlp.down_proj": (self.dim, self.intermediate_size),
        }

    @property
    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.dim,
            "intermediate_size": self.intermediate_size,
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
            "eos_token_id": EOS_ID,
            "pad_token_id": EOS_ID,
            "torch_dtype": "bfloat16",
        }

    def random_tensors(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Initial weights in bf16, by Hub name."""

        def sample_normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

        yield "model.embed_tokens.weight", sample_normal(self.vocab, self.dim)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name, shape in self.linear_shapes.items():
                yield f"{layer}{name}.weight", sample_normal(*shape)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}{name}.weight", torch.ones(self.dim, dtype=torch.bfloat16)
        yield "model.norm.weight", torch.ones(self.dim, dtype=torch.bfloat16)


@dataclass(frozen=True)
class TrainingTask:
    """Training options of all libraries."""

    method: str = "lora"  # lora, qlora, full
    batch_size: int = 4  # rows per step
    steps: int = 6
    rank: int = 16
    alpha: int = 32
    lr: float = 1e-4


@dataclass(frozen=True)
class SFTTask(TrainingTask):
    """`batch_size` packed rows of `max_length` tokens per step, filled with documents."""

    max_length: int = 512
    document_fractions: tuple[float, ...] = (200 / 512, 312 / 512)  # document lengths relative to `period`
    period: int | None = None  # tokens after which the document lengths repeat; None: `max_length`

    @property
    def document_lengths(self) -> list[int]:
        """Lengths of the documents of a row."""
        period = self.period or self.max_length
        ends = [round(period * sum(self.document_fractions[: i + 1])) for i in range(len(self.document_fractions))]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        assert sum(lengths) == period and self.max_length % period == 0
        return lengths * (self.max_length // period)

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.max_length

    @property
    def num_target_tokens(self) -> int:
        """The first token of a document is not a target."""
        return self.batch_size * (self.max_length - len(self.document_lengths))

    def count_flops(self, shape: LlamaShape) -> float:
        """FLOPs of a step: 4 or 6 per weight and token, the head, and causal attention within documents."""
        linears = shape.linear_shapes.values()
        weights = shape.layers * sum(out_features * in_features for out_features, in_features in linears)
        lora_weights = shape.layers * self.rank * sum(sum(features) for features in linears)
        is_full = self.method == "full"
        flops_per_weight = 6 if is_full else 4
        head = flops_per_weight * shape.vocab * shape.dim * self.num_target_tokens
        attended_pairs = self.batch_size * sum(n * (n + 1) / 2 for n in self.document_lengths)
        attention = 3 * 4 * shape.layers * shape.dim * attended_pairs
        lora = 0 if is_full else 6 * lora_weights * self.num_tokens
        return flops_per_weight * weights * self.num_tokens + lora + head + attention


def write_checkpoint(directory: Path, shape: LlamaShape, task: TrainingTask) -> None:
    """Write the model, its tokenizer, and the initial adapter."""
    model, adapter = directory / "model", directory / "adapter"
    model.mkdir(parents=True)
    adapter.mkdir()
    generator = torch.Generator().manual_seed(0)
    save_file(dict(shape.random_tensors(generator)), model / "model.safetensors", metadata={"format": "pt"})
    write_json(model / "config.json", shape.config)
    write_tokenizer(model, shape.vocab)
    write_initial_adapter(adapter, model, shape, task, generator)


def write_tokenizer(model: Path, vocab: int) -> None:
    """Word-level tokenizer."""
    token_ids = {"<end>": EOS_ID} | {f"w{i}": i for i in range(1, vocab)}
    eos = {"id": EOS_ID, "content": "<end>", "special": True}
    eos |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [eos],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": token_ids, "unk_token": "<end>"},
    }
    write_json(model / "tokenizer.json", tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>"}
    config |= {"unk_token": "<end>"}
    write_json(model / "tokenizer_config.json", config)


def write_initial_adapter(
    adapter: Path, model: Path, shape: LlamaShape, task: TrainingTask, generator: torch.Generator
) -> None:
    """Initial adapter in PEFT format: A as for a linear layer, B = 0."""
    tensors = {}
    for i in range(shape.layers):
        for name, (out_features, in_features) in shape.linear_shapes.items():
            a = (torch.rand(task.rank, in_features, generator=generator) * 2 - 1) * in_features**-0.5
            prefix = f"{PEFT_PREFIX}model.layers.{i}.{name}."
            tensors |= {f"{prefix}lora_A.weight": a, f"{prefix}lora_B.weight": torch.zeros(out_features, task.rank)}
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": task.rank,
        "lora_alpha": task.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in shape.linear_shapes),
    }
    write_json(adapter / "adapter_config.json", config)


def sample_token_ids(rng: np.random.Generator, vocab: int, *shape: int) -> np.ndarray:
    """Token ids that follow Zipf's law, without `EOS_ID`."""
    return (rng.pareto(1.0, shape) * 20).astype(int) % (vocab - 1) + 1


def decode(token_ids: Iterable[int]) -> str:
    """Text that the tokenizer encodes as these tokens."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


def write_sft_data(directory: Path, shape: LlamaShape, task: SFTTask) -> None:
    """Write texts for tunekit, and the same tokens as rows, in the packing order of tunekit, for other libraries."""
    directory.mkdir(exist_ok=True)
    lengths = task.document_lengths * (task.batch_size * task.steps)
    token_ids = sample_token_ids(np.random.default_rng(1), shape.vocab, len(lengths), task.max_length)
    documents = [[*ids[: length - 1].tolist(), EOS_ID] for ids, length in zip(token_ids, lengths, strict=True)]
    texts = (json.dumps({"text": decode(document[:-1])}) + "\n" for document in documents)
    (directory / "texts.jsonl").write_text("".join(texts))
    packed = plan_rows(np.array(lengths), np.arange(len(lengths)), task.max_length, None)
    write_json(directory / "rows.json", [[documents[i] for i in row] for row in packed.rows(0, len(packed))])
    write_json(directory / "task.json", asdict(task) | asdict(shape))


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))
