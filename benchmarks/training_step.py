"""Batches and training steps of random models, and the config of a Llama with 135M parameters."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization
from tunekit.selftest.random_step import build_training_step

LLAMA_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def build_batch(tokens: Tensor, targets: Tensor, document_lengths: list[int]) -> Batch:
    """Batch of packed rows (B, S). `cu_seqlens` is on the host, as in batches of a data loader."""
    cu_seqlens = F.pad(torch.tensor(document_lengths).cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(length) for length in document_lengths]).view(tokens.shape).to(tokens.device)
    num_target_tokens = int((targets != IGNORE).sum())
    return Batch(tokens, targets, positions, cu_seqlens, num_target_tokens, tokens.numel())


def build_cpu_training_step(
    source: HFCheckpoint, quantization: NoQuantization, adapter: NoAdapter | LoRAConfig
) -> Callable[[], None]:
    """Training step of a random bf16 model on 4 packed rows of 512 tokens."""
    precision, dist = PrecisionConfig("bf16", frozen_dtype="bf16"), DistributedContext(0, "cpu")
    model = build.build_model(source, quantization, adapter, precision, MemoryConfig(), dist, from_scratch=True)
    tokens = torch.randint(0, LLAMA_135M["vocab_size"], (4, 512))
    return build_training_step(model, adapter, build_batch(tokens, tokens.roll(-1, 1), [200, 312] * 4))
