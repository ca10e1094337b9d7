"""Process-wide attention settings of torch: disables cuDNN attention, and uses FlashAttention 3 if it is installed."""

from functools import cache
from importlib.util import find_spec

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

HOPPER = 9  # major compute capability; FlashAttention 3 has kernels for no other
FA3_MODULE = "flash_attn_interface"


@cache
def configure_attention(device: torch.device) -> None:
    """Choose attention kernels once per process. Does nothing without CUDA."""
    if device.type != "cuda":
        return
    # cuDNN builds a plan for every new shape: 0.44 s for each length on a B200 (modelscope/FunASR#3704).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if can_use_fa3(torch.cuda.get_device_capability(device)):
        activate_fa3(device)


def can_use_fa3(capability: tuple[int, int]) -> bool:
    """Whether the flash-attn-3 package is installed and has kernels for a device of this compute capability."""
    return capability[0] == HOPPER and find_spec(FA3_MODULE) is not None


def activate_fa3(device: torch.device) -> bool:
    """Replace torch's FlashAttention 2 with version 3. Keep version 2 if a check of version 3 fails."""
    try:
        activate_flash_attention_impl("FA3")
        check_flash_attention(device)
    except (ImportError, RuntimeError, ValueError, TypeError, OSError):
        restore_flash_attention_impl()
        return False
    return True


def check_flash_attention(device: torch.device) -> None:
    """Run all kernel variants that attention uses on small inputs. Raise RuntimeError if one fails."""
    q, k = (torch.ones(16, heads, 64, dtype=torch.bfloat16, device=device) for heads in (4, 2))
    bounds = torch.tensor([0, 7, 16], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
    window = {"window_size_left": 3, "window_size_right": 0}
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    for options in ({}, window):
        causal = not options
        y, lse, *_ = forward(q, k, k, bounds, bounds, 9, 9, 0.0, causal, False, scale=0.1, **options)
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
        grads = backward(y, q, k, k, y, lse, bounds, bounds, 9, 9, 0.0, causal, seed, unused, scale=0.1, **options)
        require_finite(y, lse, *grads)
    row_starts = torch.arange(3, dtype=torch.int32, device=device)
    y, lse, *_ = forward(q[:2], k, k, row_starts, bounds, 1, 9, 0.0, False, False, scale=0.1, seqused_k=lengths)
    require_finite(y, lse)
    # All scores are 64 * 0.1: their log-sum-exp shows how many keys were read.
    expected = (6.4 + lengths.float().log()).expand(4, 2)
    if lse.shape != expected.shape or not torch.allclose(lse, expected, atol=0.05):
        raise RuntimeError("flash attention: a key/value cache is not read as expected")


def require_finite(*tensors: torch.Tensor) -> None:
    """Raise RuntimeError if a tensor has NaN or Inf."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise RuntimeError("flash attention: results are not finite")
