"""The size of the largest tensor that a computation creates."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation creates, including the backward pass."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]
        # A view shares the storage of another tensor.
        self.numel = max(self.numel, *(t.untyped_storage().nbytes() // t.itemsize for t in tensors), 0)
        return result
