"""Choice of an attention kernel from the properties of a call and of the device. Nothing here touches a device."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from tunekit import devices
from tunekit.devices import HALF_DTYPES, Capabilities
from tunekit.kernels.fake_mode import device_type
from tunekit.kernels.torch_compile import assume_constant_result

MAX_FLASH_HEAD_DIM = 256
MAX_FLEX_HEAD_BYTES = 512  # a wider head does not fit into shared memory next to its tile of scores


class AttentionBackend(Enum):
    """Attention kernel, or the operator that selects it."""

    CPU = "scaled_dot_product_attention on the CPU"
    FLASH_VARLEN = "FlashAttention over packed documents"
    FLEX = "FlexAttention over packed documents"
    PER_DOCUMENT = "one scaled_dot_product_attention call per document"
    FLASH_DECODE = "FlashAttention on a key/value cache, one query per row"
    SDPA_FLASH = "FlashAttention inside scaled_dot_product_attention"
    SDPA_EFFICIENT = "memory-efficient kernel inside scaled_dot_product_attention"
    MATH = "scores of all pairs in memory"


@dataclass(frozen=True)
class AttentionCall:
    """Properties of an attention call that determine which kernels support it."""

    device_type: str
    dtype: torch.dtype
    head_dim: int  # the wider of keys and values
    capabilities: Capabilities = devices.CPU
    is_packed: bool = False  # documents, or whole rows as documents: no mask, only bounds
    is_decoding: bool = False  # one query per row on a key/value cache
    has_mask: bool = False
    has_softcap: bool = False

    @property
    def has_flash(self) -> bool:
        """Whether FlashAttention 2 takes this dtype and head size on this device."""
        return self.capabilities.flash and self.dtype in HALF_DTYPES and self.head_dim <= MAX_FLASH_HEAD_DIM

    @property
    def has_flex(self) -> bool:
        """Whether FlexAttention takes this dtype and head size on this device."""
        is_supported = self.capabilities.flex and self.dtype in (*HALF_DTYPES, torch.float32)
        return is_supported and self.head_dim * self.dtype.itemsize <= MAX_FLEX_HEAD_BYTES

    @property
    def has_efficient(self) -> bool:
        """Whether the memory-efficient kernel takes this dtype. It takes masks, and heads of any size."""
        if self.device_type != "cuda":
            return False
        has_bf16 = self.dtype == torch.bfloat16 and self.capabilities.bf16
        return has_bf16 or self.dtype in (torch.float16, torch.float32)


def choose_attention_backend(call: AttentionCall) -> AttentionBackend:
    """Return the fastest kernel that takes the call. MATH is the last resort: fp64, and bf16 before Ampere."""
    if call.is_packed:
        if call.has_flash and not call.has_softcap:
            return AttentionBackend.FLASH_VARLEN
        return AttentionBackend.FLEX if call.has_flex else AttentionBackend.PER_DOCUMENT
    if call.is_decoding and call.has_flash and call.capabilities.flash_lse and not call.has_softcap:
        return AttentionBackend.FLASH_DECODE
    if call.device_type != "cuda":
        return AttentionBackend.CPU
    if call.has_softcap:
        return AttentionBackend.MATH  # blockwise, see `attention.softcapped_attention`
    if call.has_flash and not call.has_mask:
        return AttentionBackend.SDPA_FLASH
    return AttentionBackend.SDPA_EFFICIENT if call.has_efficient else AttentionBackend.MATH


@assume_constant_result
def get_capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities of a CUDA device; those of an Ampere GPU in fake mode."""
    return devices.device_capabilities(device) if device.type == "cuda" else devices.AMPERE


@assume_constant_result  # torch 2.11 cannot trace through objects that such functions return, such as capabilities
def needs_expanded_kv(device: torch.device, dtype: torch.dtype, head_dim: int, has_mask: bool) -> bool:
    """Whether grouped heads of keys must be repeated for scaled_dot_product_attention on a CUDA device.

    The memory-efficient kernel of torch 2.11 refuses grouped heads, and the call would silently use MATH, with S x S
    scores in fp32.
    """
    call = AttentionCall("cuda", dtype, head_dim, get_capabilities(device), has_mask=has_mask)
    return choose_attention_backend(call) is AttentionBackend.SDPA_EFFICIENT


def choose_decode_backend(q: Tensor, v: Tensor, has_softcap: bool) -> AttentionBackend:
    """Return the fastest kernel for queries (B, S, H, D) on a cache with values (B, slots, H_kv, D_v)."""
    kind, head_dim = device_type(q), max(q.shape[-1], v.shape[-1])
    capabilities = get_capabilities(q.device) if kind == "cuda" else devices.CPU
    properties = {"is_decoding": q.shape[1] == 1, "has_mask": True, "has_softcap": has_softcap}
    return choose_attention_backend(AttentionCall(kind, q.dtype, head_dim, capabilities, **properties))
