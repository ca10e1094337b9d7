"""Operators of a generation step, with the meta device standing in for a GPU: shapes, launches and host waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.random_checkpoints import SHAPES
from tunekit.kernels import fake_mode, glu, rms_norm, rope
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}
WITHOUT_KERNEL = {"detach", "empty", "empty_like", "new_empty", "empty_strided", "lift_fresh"}


class HostWaitError(AssertionError):
    """An operator for whose result the host has to wait, or a copy from or to the host."""


@dataclass(frozen=True)
class Op:
    """An operator that a step called."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # of what it returned
    layer: bool  # inside a layer
    launches: bool  # not only a view, or memory


class DecodeOps(TorchDispatchMode):
    """Records operators, and refuses those that need the host."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.in_layer = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in WAITING:
            raise HostWaitError(name)
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        kinds = {x.device.type for x in (*inputs, *outputs) if x.ndim}  # numbers are arguments of kernels
        if len(kinds) > 1:
            raise HostWaitError(f"{name}: a copy between {kinds}")
        if kinds == {"meta"}:
            is_view = func.is_view or name in (
                "detach",
                "empty",
                "empty_like",
                "new_empty",
                "empty_strided",
                "lift_fresh",
            )
            self.ops.append(Op(name, tuple(tuple(x.shape) for x in outputs), self.in_layer, not is_view))
        return result

    @contextmanager
    def watch_layers(self, model: Decoder) -> Iterator[None]:
        """Know which operators layers call."""

        def switch(on: bool) -> Any:
            def hook(*unused: object) -> None:
                self.in_layer = on

            return hook

        handles = [layer.register_forward_pre_hook(switch(True)) for layer in model.layers]
        handles += [layer.register_forward_hook(switch(False)) for layer in model.layers]
        yield
        for handle in handles:
            handle.remove()

    def count(self, layer: bool) -> int:
        """Kernels that are launched, inside layers or outside."""
        return sum(op.launches and op.layer == layer for op in self.ops)


def build_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of one of the test shapes."""
    plain = {key: value for key, value in SHAPES[name].items() if key != "model_type"} | changes
    return transformers.AutoConfig.for_model(SHAPES[name]["model_type"], **plain).to_dict()


def build_model(config: dict[str, Any]) -> Decoder:
    """A model in bf16 without numbers."""
    with torch.device("meta"):
        model = Decoder(find_family(config, "config.json")[1])
    return model.to(torch.bfloat16).eval()


@contextmanager
def gpu_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the meta device go through the operators of a GPU: our Triton kernels count as one each."""
    for module in (rope, rms_norm, glu):
        monkeypatch.setattr(module, "use_torch_fallback", lambda *args: False)
    with fake_mode.fake_mode("cuda"), torch.inference_mode():
        yield
