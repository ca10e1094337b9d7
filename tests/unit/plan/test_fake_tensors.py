"""Operations on fake tensors have the same outputs on the meta device as in FakeTensorMode and on real tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tunekit.plan.fake_tensors import call_with_cached_layout
from tunekit.plan.memory_tracker import MemoryTracker

OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "views": lambda x: (x.t(), x[1:, ::2], x.split(2), x.unsqueeze(0).expand(3, -1, -1), x.detach()),
    "copies": lambda x: (x.clone(), x.t().contiguous(), x.half(), torch.zeros_like(x.t()), x.new_empty(3)),
    "products": lambda x: (x @ x.t(), torch.addmm(x, x, x.t() @ x), x.t() * x.T, x + x.half(), x.exp().sum(1)),
    "tuples": lambda x: (x.topk(2), x.sort(0), x.max(0)),
    "in place": lambda x: (x.add_(1), x.t().mul_(2), x[0].zero_(), torch._foreach_mul([x, x], 2.0)),  # pyright: ignore
    "rows": lambda x: (x.index_select(0, torch.zeros(3, dtype=torch.long)), torch.cat([x, x]), x.norm(dim=1)),
}


def describe(outputs: object, x: Tensor) -> list[object]:
    """Shapes, dtypes and strides, and which outputs share the storage of `x`."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    storage = x.untyped_storage()._cdata
    return [(t.shape, t.stride(), t.dtype, t.device, t.untyped_storage()._cdata == storage) for t in tensors]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_outputs_match_real_tensors(operation: Callable[[Tensor], object]) -> None:
    """The first call caches layouts, which the second one uses; inputs with other layouts or dtypes do not use them."""
    for real in (torch.randn(6, 6), torch.randn(6, 6), torch.randn(6, 6).t(), torch.randn(6, 6).double()):
        expected = describe(operation(real), real)
        with FakeTensorMode() as mode, MemoryTracker():
            x = mode.from_tensor(real)
            outputs = operation(x)
        assert describe(outputs, x) == expected
        assert all(isinstance(leaf, FakeTensor) for leaf in tree_leaves(outputs))


def test_layouts_of_dtypes_and_devices_are_cached_apart() -> None:
    x, default = torch.ones(3, dtype=torch.int64, device="meta"), torch.get_default_dtype()
    divide, new = torch.ops.aten.div.Tensor, torch.ops.aten.new_empty.default
    for device in ("cpu", "meta", "cpu", "meta"):
        assert call_with_cached_layout(new, (x, (2,)), {"device": torch.device(device)}).device.type == device
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert call_with_cached_layout(divide, (x, x), {}).dtype == dtype
    finally:
        torch.set_default_dtype(default)


def test_shapes_that_depend_on_values_are_refused() -> None:
    with FakeTensorMode() as mode, MemoryTracker(), pytest.raises(Exception, match="nonzero"):
        mode.from_tensor(torch.ones(4)).nonzero()
