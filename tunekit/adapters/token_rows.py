"""Rows of the embedding and the head that are trained on their own, as with PEFT's `trainable_token_indices`.

A tied head shares the rows of the embedding. Rows replace those of the frozen weight.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.adapters.module_patterns import display_name
from tunekit.errors import FieldError, UserError
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Embedding, Linear


def check_token_ids(ids: Sequence[int]) -> None:
    """Raise FieldError for negative or repeated ids."""
    if problems := [token for token in ids if token < 0 or ids.count(token) > 1]:
        raise FieldError("trainable_token_indices", f"must be different ids from 0 up, got {problems[0]}")


def token_row_layers(model: Decoder) -> dict[str, Embedding | Linear]:
    """Layers with rows that are trained on their own, by name."""
    layers: dict[str, Embedding | Linear] = {"embed": model.embed, "head": model.head}
    return {name: layer for name, layer in layers.items() if layer.token_ids}


def add_token_rows(model: Decoder, ids: Sequence[int], adapted: set[str], saved: set[str]) -> None:
    """Add trained rows for tokens to the embedding, and to the head of a language model, on the meta device.

    `adapted` are the layers with LoRA weights, `saved` the parameters that are trained in full: they need no rows.
    Raises UserError for unknown ids, or if a layer has LoRA weights.
    """
    if not ids:
        return
    if ids[-1] >= model.spec.vocab:
        raise UserError(f"adapter.trainable_token_indices: must be < {model.spec.vocab}, got {ids[-1]}")
    layers = {"embed": model.embed} if model.spec.score is not None else {"embed": model.embed, "head": model.head}
    if both := [name for name in layers if name in adapted]:
        raise UserError(
            f"adapter.target_modules: {display_name(both[0])} has rows of new tokens, which are trained on their own. "
            "Remove it, or list it in adapter.modules_to_save instead."
        )
    tied = model.spec.tie_word_embeddings
    trained = {name for name in layers if f"{name}.weight" in saved}
    for name, layer in layers.items():
        if name in trained or (tied and trained):
            continue
        layer.token_ids = tuple(ids)
        layer.lora_token_rows = nn.Parameter(torch.empty(len(ids), model.spec.dim, device="meta"))
        layer.register_buffer("lora_token_ids", torch.empty(len(ids), dtype=torch.long, device="meta"))
        if isinstance(layer, Embedding):
            layer.update = forward_embedding
        else:
            layer.update = forward_head
    model.tie()


def forward_embedding(layer: Embedding, tokens: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Embeddings of tokens (...): (..., dim)."""
    return look_up_token_rows(layer, tokens, layer.embed(tokens, dtype))


def look_up_token_rows(layer: Embedding, tokens: Tensor, rows: Tensor) -> Tensor:
    """Embeddings `rows` (..., dim) of tokens (...), with those that are trained on their own replaced."""
    if not layer.token_ids:
        return rows
    slots = torch.searchsorted(layer.lora_token_ids, tokens.contiguous()).clamp_(max=len(layer.token_ids) - 1)
    is_trained = layer.lora_token_ids[slots] == tokens
    if layer.vocab_shard is not None:  # other ranks add the rows of their ids
        index = tokens - layer.vocab_shard.start
        is_trained &= (index >= 0) & (index < len(layer.weight))
    return torch.where(is_trained[..., None], F.embedding(slots, layer.lora_token_rows).to(rows.dtype), rows)


def forward_head(layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Logits (..., local ids) of a head for hidden states `x`."""
    (layer,) = layers
    start = 0 if layer.vocab_shard is None else layer.vocab_shard.start
    index, rows = local_token_rows(layer, start, layer.out_features)
    return (layer.matmul(x).index_copy(-1, index, F.linear(x, rows.to(x.dtype))),)


def replace_token_rows(layer: Linear, weight: Tensor, start: int) -> Tensor:
    """Rows `weight` (n, dim) of a head from row `start`, with those that are trained on their own replaced."""
    if not layer.token_ids:
        return weight
    index, rows = local_token_rows(layer, start, len(weight))
    return weight.index_copy(0, index, rows.to(weight.dtype))


def local_token_rows(layer: Linear, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions among the `count` ids from `start`, and rows, of the tokens that are among them."""
    local = slice(bisect_left(layer.token_ids, start), bisect_left(layer.token_ids, start + count))
    return layer.lora_token_ids[local] - start, layer.lora_token_rows[local]
