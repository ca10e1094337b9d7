"""Weights that are read for a GPU: sent as they are stored, in pieces, and cast there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.random_checkpoints import make_checkpoint
from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.load_model import load_weights
from tunekit.models import weight_init
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import upload_tensor
from tunekit.quantization.config import NoQuantization


class Transfers(TorchDispatchMode):
    """Copies from the CPU to another device: (dtype of the source, dtype of the copy, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.dtype, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sources = {"aten::copy_": args[1:2], "aten::_to_copy": args[:1]}.get(func._schema.name, ())
        for source in sources:
            if isinstance(source, Tensor) and source.device.type == "cpu" and out.device.type == "meta":
                self.copies.append((source.dtype, out.dtype, source.nbytes))
        return out


@pytest.mark.parametrize("name", ["llama3.2", "qwen3-moe"])
def test_weights_are_sent_as_they_are_stored(name: str, tmp_path: Path) -> None:
    source = HFCheckpoint.open(make_checkpoint(tmp_path, name))
    model = build.build_meta_model(source, NoQuantization(), NoAdapter())
    PrecisionConfig("bf16", "bf16", "bf16").apply(model, source.dtypes, torch.device("cpu"))  # the checkpoint has fp32
    with Transfers() as transfers:
        load_weights(source, model, quiet=True)  # the model is on the meta device, which stands for a GPU
    assert transfers.copies
    assert {(source, target) for source, target, _ in transfers.copies} == {(torch.float32, torch.float32)}


def test_large_tensors_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_init, "UPLOAD_CHUNK_BYTES", 1000)
    source, target = torch.randn(100, 40).bfloat16(), torch.empty(100, 40, device="meta")
    with Transfers() as transfers:
        upload_tensor(target, source)
        upload_tensor(target[3:50].T, source[3:50].T)
        upload_tensor(torch.empty((), device="meta"), torch.ones(()))
    assert max(size for _, _, size in transfers.copies) <= 1000
    assert sum(size for _, _, size in transfers.copies) == source.nbytes + source[3:50].nbytes + 4


def test_on_the_cpu_nothing_changes() -> None:
    source, target = torch.randn(100, 40).bfloat16(), torch.empty(100, 40)
    upload_tensor(target, source)
    assert torch.equal(target, source.float())
