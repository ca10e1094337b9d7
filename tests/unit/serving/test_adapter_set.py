"""Adapters that share the base weights answer as models that were loaded alone."""

from dataclasses import replace
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
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.slot_batch import StepGraphs
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.serving.adapter_set import AdapterSet

FP32, BF16 = PrecisionConfig(compute_dtype="fp32"), PrecisionConfig(compute_dtype="bf16")
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


def test_an_engine_casts_only_the_weights_of_the_active_adapter(directories: dict[str, Path]) -> None:
    """Graphs and casts are replaced with the adapter; the tokens are those of models that were loaded alone."""
    sampling = SamplingConfig(1.0, max_new_tokens=6)
    requests = [GenerationRequest(f"{i}", TOKENS[0, : 9 + i].tolist(), sampling) for i in range(2)]

    def load(name: str) -> Decoder:
        return build.load_for_inference(name, BF16, DistributedContext(), NoQuantization())[0].eval()

    model = load("tunekit/nano")
    adapters = AdapterSet(model, HFCheckpoint.open(assets.MODELS["tunekit/nano"], "tunekit/nano"))
    engine, graphs = GenerationEngine(model, 2, 64, None), {}
    for name in ("lora", "rslora"):
        adapters.load(name, str(directories[name]))
        graphs[name] = StepGraphs(), GenerationEngine(load(str(directories[name])), 2, 64, None).generate(requests)
    for name in ("lora", "rslora", "lora"):
        adapters.activate(name)
        engine.replace_graphs(graphs[name][0])
        assert engine.generate(requests) == graphs[name][1]
        cast = {id(source) for sources, _ in engine.graphs.factors.copies.values() for source in sources}
        assert cast == {id(p) for n, p in model.named_parameters() if ".lora_" in n and "embedding" not in n}
    assert graphs["lora"][1] != graphs["rslora"][1]


def test_adapters_that_change_other_weights_are_errors(tmp_path: Path) -> None:
    path = write_random_adapter(tmp_path / "a", LoRAConfig(rank=2, modules_to_save="norms"), 0)
    model = build.load_for_inference("tunekit/nano", FP32, DistributedContext())[0]
    adapters = AdapterSet(model, HFCheckpoint.open(assets.MODELS["tunekit/nano"], "tunekit/nano"))
    with pytest.raises(UserError, match="modules_to_save"):
        adapters.load("a", str(path))
    other = write_random_adapter(tmp_path / "b", LoRAConfig(rank=2), 0)
    shorter = replace(adapters.base, spec=replace(adapters.base.spec, layers=adapters.base.spec.layers[:1]))
    with pytest.raises(UserError, match=rf"adapter b={other}: .*adapter_model\.safetensors: "):
        AdapterSet(model, shorter).load("b", str(other))
    assert adapters.states == {}
