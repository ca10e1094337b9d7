"""What the layers of one pass share, and what generation keeps between passes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import attention_gpu
from tunekit.kernels.attention import AttentionParams, attention, attention_sharded
from tunekit.kernels.attention_decode import CachePositions, attend_decode
from tunekit.kernels.attention_gpu import ALIGNED, NARROWEST
from tunekit.kernels.rope import RopeTables
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.shared_prefix import PrefixIndex, SharedPrefixKV

MIN_VISIBLE = 256  # slots that a pass of static shapes looks at, at least


def has_static_shapes(device: torch.device) -> bool:
    """Whether passes of one token have the same shapes each time: launches are dear on a GPU, slots on the CPU."""
    return device.type != "cpu"


class LayerKVCache:
    """Keys (B, slots, H_kv, D) and values of one layer in generation; the index of a slot is its position.

    Both have one width, that of the wider: kernels want it, and padding all slots for every token would copy them.
    """

    def __init__(self, k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        width = max(k[-1], v[-1])
        if has_static_shapes(device):
            width = max(NARROWEST, -(-width // ALIGNED) * ALIGNED)
        self.k = torch.zeros(*k[:-1], width, dtype=dtype, device=device)
        self.v = torch.zeros(*v[:-1], width, dtype=dtype, device=device)

    def add(self, k: Tensor, v: Tensor, context: "ForwardContext") -> tuple[Tensor, Tensor]:
        """Store (B, S, H_kv, D) of these tokens; keys and values that their queries see."""
        at = context.cache_positions
        if at is None:
            return self.prefill(k, v, context)
        write_token(self.k, pad_head_dim(k, self.k), at)
        write_token(self.v, pad_head_dim(v, self.v), at)
        return self.k, self.v

    def prefill(self, k: Tensor, v: Tensor, context: "ForwardContext") -> tuple[Tensor, Tensor]:
        """Store the first tokens of all rows. Attention among these needs no slots, and is the faster."""
        length = k.shape[1]
        self.k[:, :length, :, : k.shape[-1]] = k
        self.v[:, :length, :, : v.shape[-1]] = v
        return k, v

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows only, in this order."""
        self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)


def write_token(slots: Tensor, x: Tensor, at: CachePositions) -> None:
    """Write (B, 1, H, D) of the current tokens into `slots` (B, slots, H, D)."""
    if len(x) == 1 and not has_static_shapes(x.device):
        slots[:, at.num_visible - 1 : at.num_visible] = x  # 4.6 microseconds, and 9.3 by an index
    else:
        slots.flatten(0, 1).index_copy_(0, at.write_index, x[:, 0])


def pad_head_dim(x: Tensor, like: Tensor) -> Tensor:
    """Zeros behind the channels of a head, up to those of `like`."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


class LayerCache(Protocol):
    """State of one layer in generation. Only its mixer knows the kind."""

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows only, in this order."""
        ...


class KVCache:
    """State of a model in generation. Short rows are padded on the right, and overwrite the padding later.

    The first pass fills it; every later one adds a token to each row, at shapes that change with `num_visible` alone.
    """

    def __init__(self, layers: Sequence[LayerCache], num_slots: int) -> None:
        self.layers, self.num_slots = layers, num_slots
        self.cache_length = 0  # slots that any row may have written
        self.tables: tuple[RopeTables, ...] = ()  # rotations of every slot, for passes of one token
        self.is_decoding = False  # the first pass is done

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows only, in this order."""
        for layer in self.layers:
            layer.select_rows(rows)

    def begin_decoding(self, tables: tuple[RopeTables, ...]) -> None:
        """Say that the first pass is done. `tables` turn each slot, (num_slots, 1, 1, pairs)."""
        self.tables, self.is_decoding = tables, True

    def decode_context(self, positions: Tensor) -> "ForwardContext":
        """What the layers share in a pass of one token a row at `positions` (B, 1)."""
        cached = CachePositions(positions, self.num_slots, self.num_visible(positions.device))
        index = positions[:, 0]
        rotations = tuple(
            table._replace(cos=table.cos.index_select(0, index), sin=table.sin.index_select(0, index))
            for table in self.tables
        )
        return ForwardContext(positions, None, None, rotations, row_length=1, cache_positions=cached)

    def num_visible(self, device: torch.device) -> int:
        """Slots to look at. Static ones grow by doubling, and one captured graph serves every token between."""
        if not has_static_shapes(device):
            return self.cache_length
        return min(self.num_slots, max(MIN_VISIBLE, 1 << (self.cache_length - 1).bit_length()))


class SequenceSharding:
    """Which tokens of the rows of a pass are here: all of them."""

    def local_tokens(self, x: Tensor, value: int = 0) -> Tensor:
        """What is here of (B, S, ...). Where there is nothing to keep, it is `value`."""
        return x

    def gather(self, x: Tensor, length: int) -> Tensor:
        """All (B, S, ...) of rows of this length, from what is here of them."""
        return x

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks that have tokens of these rows. A part's gradient is that of the sum: all of these
        ranks make the same of it, and it counts once."""
        return x

    def local_ranges(self, length: int) -> tuple[range, ...] | None:
        """Which tokens of each row are here; None: all."""
        return None


UNSHARDED = SequenceSharding()


class SharedKV:
    """Keys and values of some layers, by their number, from which later ones take them.

    Not a plain dict: FSDP makes others of those that it finds among the arguments of a layer.
    """

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, layer_index: int, kv: tuple[Tensor, Tensor]) -> None:
        """When a layer is run again for its gradients, those who took keep what they took."""
        self.kv.setdefault(layer_index, kv)

    def get(self, layer_index: int) -> tuple[Tensor, Tensor]:
        return self.kv[layer_index]


@dataclass
class ForwardContext:
    """What all layers of one pass share: where the tokens are."""

    positions: Tensor  # (B, S) of the tokens that are here
    layout: SequenceLayout | None  # bounds of packed documents, in whole rows
    lengths: Tensor | None  # (B,) tokens of each row that are not padding behind it; None: all, or nobody asks
    rope_tables: tuple[RopeTables, ...]  # one for each distinct Rope of the model
    cp_sharding: SequenceSharding = UNSHARDED  # which tokens of each row are here
    row_length: int = 0  # of whole rows
    prefix: SharedPrefixKV | PrefixIndex | None = None  # what documents see before their own tokens
    shared_kv: SharedKV = field(default_factory=SharedKV)
    prepared_layout: SequenceLayout | None = (
        None  # the layout, or one of whole rows, with all that is on a GPU for attention
    )
    cache_positions: CachePositions | None = None  # where the tokens are in the caches, in passes of one token

    def gather(self, x: Tensor) -> Tensor:
        """(B, length, ...) of whole rows, from what is here."""
        return self.cp_sharding.gather(x, self.row_length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None = None) -> Tensor:
        """Queries of what is here on keys and values of whole rows, or of all that a cache has seen."""
        if (ranges := self.cp_sharding.local_ranges(self.row_length)) is not None:
            assert not isinstance(self.prefix, SharedPrefixKV)
            return attention_sharded(q, k, v, params, self.positions, ranges, sinks, self.prefix, self.layout)
        if self.cache_positions is not None:
            return attend_decode(q, k, v, self.cache_positions, params, sinks)
        assert not isinstance(self.prefix, PrefixIndex)
        layout = self.layout
        if (
            layout is None
            and self.prepared_layout is not None
            and attention_gpu.is_supported(q, params.softcap is not None)
        ):
            layout = self.prepared_layout  # a compiled layer must not make it
        return attention(q, k, v, params, layout, sinks, self.prefix)  # there is nothing but what came now
