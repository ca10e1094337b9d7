"""A CUDA graph for the CPU: the operators of a step are recorded once and replayed on the same tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class StepRecorder(TorchDispatchMode):
    """Records operators with the very tensors that they read and wrote, as a capture records addresses.

    A replay sees no Python: a value that the host computes in each step would stay constant. Unlike a capture,
    recording runs the step, so everything that it changed in place is put back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert "_local_scalar_dense" not in str(func), "a step must not read the device"
        for x, argument in zip(args, func._schema.arguments, strict=False):
            if argument.is_write and isinstance(x, Tensor):
                self.before.setdefault(id(x), (x, x.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tensors_of(result)))
        return result

    def restore(self) -> None:
        for x, value in self.before.values():
            x.copy_(value)

    def replay(self) -> None:
        for func, args, kwargs, recorded in self.calls:
            inputs = {x.untyped_storage().data_ptr() for x in tensors_of((args, kwargs))}
            for old, new in zip(recorded, tensors_of(func(*args, **kwargs)), strict=True):
                assert old.shape == new.shape
                if new.untyped_storage().data_ptr() not in inputs:  # views and in-place results are up to date
                    old.copy_(new)


def record_step(step: Callable[[], None]) -> Callable[[], None]:
    """Stand in for `capture_cuda_graph`."""
    with StepRecorder() as recorder:
        step()
    recorder.restore()
    return recorder.replay
