"""Root mean square norm."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in fp32, returned in the dtype of `x`.

    The weight multiplies after the cast, as Llama's reference does, so that bf16 results equal it too.
    """
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).type_as(x) * weight.type_as(x)
