"""Values of 4-bit codes (NF4 and FP4) and of the 8-bit codes of double quantization, as tensors on any device."""

import torch
from torch import Tensor

from tunekit.kernels.device_tensors import DeviceConstants

TABLES = {  # values of the 16 codes
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * x / 192 for sign in (1, -1) for x in (0, 1, 128, 192, 64, 96, 32, 48)),
}  # fmt: skip


@DeviceConstants
def code_values(kind: str) -> Tensor:
    """Values (16,) of the 4-bit codes, fp32."""
    return torch.tensor(TABLES[kind])


def midpoints_and_codes(kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Midpoints (15,) between neighboring values, and the codes (16,) sorted by value."""
    return midpoints(kind, device), sorted_codes(kind, device)


@DeviceConstants
def midpoints(kind: str) -> Tensor:
    values = torch.tensor(TABLES[kind]).sort()[0]
    return (values[:-1] + values[1:]) / 2


@DeviceConstants
def sorted_codes(kind: str) -> Tensor:
    return torch.tensor(TABLES[kind]).argsort(stable=True).to(torch.uint8)


@DeviceConstants
def dynamic_map() -> Tensor:
    """Dynamic 8-bit map (arXiv:1511.04561): 256 sorted values in [-1, 1], denser near zero. fp32 (256,)."""
    values = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        magnitudes = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [magnitudes, -magnitudes]
    return torch.cat(values).sort()[0]
