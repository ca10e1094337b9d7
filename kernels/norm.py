"""Root mean square norm."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, late: bool = False) -> Tensor:
    """x / rms(x) * (weight + offset) over the last axis, in fp32, returned in the dtype of `x`.

    The weight multiplies after the cast, as Llama's reference does, or in fp32 before it (`late`), as those of Gemma
    and OLMo do, so that bf16 results equal theirs too.
    """
    y = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is None:
        return y.type_as(x)
    if late or offset:
        return (y * (weight.float() + offset)).type_as(x)
    return y.type_as(x) * weight.type_as(x)
