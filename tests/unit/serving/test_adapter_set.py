"""Adapters that share the base weights answer as models that were loaded alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.helpers.servers import write_random_adapter
from tunekit import assets, build
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.serving.adapter_set import AdapterSet

FP32 = PrecisionConfig(compute_dtype="fp32")
TOKENS = torch.arange(40, 72)[None]
ADAPTERS = {
    "lora": LoRAConfig(rank=4, target_modules=("all-linear", "embed_tokens"), alpha=64.0),
    "rslora": LoRAConfig(rank=2, use_rslora=True, target_modules="attn"),
    "dora": DoRAConfig(rank=8, target_modules="mlp"),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_random_adapter(folder / name, cfg, i) for i, (name, cfg) in enumerate(ADAPTERS.items())}


def logits(model: Decoder) -> Tensor:
    model.eval()
    with torch.inference_mode():
        return model(TOKENS)


@pytest.mark.parametrize("quantization", [NoQuantization(), NF4Config()], ids=["none", "nf4"])
def test_switched_adapters_equal_loaded_models(quantization: NoQuantization, directories: dict[str, Path]) -> None:
    def load(name: str) -> Decoder:
        return build.load_for_inference(name, FP32, DistributedContext(), quantization)[0]

    expected: dict[str | None, Tensor] = {name: logits(load(str(path))) for name, path in directories.items()}
    model = load("tunekit/nano")
    expected[None] = logits(model)
    names = {name for name, _ in model.named_parameters()}
    adapters = AdapterSet(model, HFCheckpoint.open(assets.MODELS["tunekit/nano"], "tunekit/nano"))
    for name, path in directories.items():
        adapters.load(name, str(path))
    for name in ("lora", None, "dora", "rslora", "lora", "dora", None):
        adapters.activate(name)
        assert_close(logits(model), expected[name])
    assert {name for name, _ in model.named_parameters()} == names
    assert not torch.equal(expected["lora"], expected["dora"])


def test_adapters_that_change_other_weights_are_errors(tmp_path: Path) -> None:
    path = write_random_adapter(tmp_path / "a", LoRAConfig(rank=2, modules_to_save="norms"), 0)
    model = build.load_for_inference("tunekit/nano", FP32, DistributedContext())[0]
    adapters = AdapterSet(model, HFCheckpoint.open(assets.MODELS["tunekit/nano"], "tunekit/nano"))
    with pytest.raises(UserError, match="modules_to_save"):
        adapters.load("a", str(path))
    assert adapters.states == {}
