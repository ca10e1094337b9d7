"""Documents with a shared prompt give the same log-probabilities and gradients as with repeated prompts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.preference_pairs import answer_logps, make_batches
from tests.helpers.random_checkpoints import FP32, load_model, make_checkpoint, relative_error
from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.kernels import attention_cpu
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NF4Config, NoQuantization

# Full attention, windows, chunks, softcaps, sinks, latent attention, experts, shared keys, scaling by position.
FAMILIES = ["llama3.2", "mistral", "gemma2", "gemma3", "llama4", "gpt-oss", "deepseek-v3", "deepseek-v2", "qwen3-moe"]
FAMILIES += ["gemma4-shared", "gemma4-moe", "ministral3"]


def logps_and_gradients(model: Decoder, shared: bool, micro_batch: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all answers, and gradients of a weighted sum of them."""
    model.zero_grad()
    logps_by_index = []
    for batch in make_batches(shared, micro_batch=micro_batch):
        assert (batch.shared_prefixes is not None) == shared
        logps = answer_logps(model, batch)
        (logps * torch.cos(batch.documents.indices.float())).sum().backward()
        logps_by_index += zip(batch.documents.indices.tolist(), logps.tolist(), strict=True)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.tensor([value for _, value in sorted(logps_by_index)]), gradients


def check_equal(shared_model: Decoder, reference: Decoder, micro_batch: int = 1) -> None:
    (actual, gradients), (expected, expected_gradients) = (
        logps_and_gradients(shared_model, True, micro_batch),
        logps_and_gradients(reference, False),
    )
    assert relative_error(actual, expected) < 1e-5
    assert gradients.keys() == expected_gradients.keys() and expected_gradients
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected_gradients[name]) < 1e-5, name


@pytest.mark.parametrize("name", FAMILIES)
def test_shared_prompts_match_repeated_prompts(name: str, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, name))
    assert model.shares_prefixes(60)
    check_equal(model, model)


@pytest.mark.parametrize("name", ["gemma2", "llama4", "gpt-oss", "deepseek-v3"])
def test_shared_prompts_without_native_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cpu, "is_available", lambda: False)
    model = load_model(make_checkpoint(tmp_path, name))
    check_equal(model, model, micro_batch=3)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ["gemma2", "gemma4-shared"])
def test_shared_prompts_with_activation_checkpointing(name: str, recompute: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    check_equal(load_model(folder, memory=MemoryConfig(activation_checkpointing=recompute)), load_model(folder))


@pytest.mark.slow
def test_shared_prompts_with_compiled_layers(tmp_path: Path) -> None:
    """Traced without code generation; rows are flattened, with any number of tokens and documents."""
    torch._dynamo.reset()  # earlier tests in this process count towards the recompile limit
    folder = make_checkpoint(tmp_path, "mistral")
    model = load_model(folder)
    model.flatten_rows = True
    fullgraph = attention_cpu.is_available()  # torch's operations process documents one by one, outside of the graph
    for layer in model.layers:
        layer.compile(backend="aot_eager", dynamic=True, fullgraph=fullgraph)
    check_equal(model, load_model(folder), micro_batch=2)


@pytest.mark.parametrize("weights", [NoQuantization(), NF4Config()], ids=["lora", "qlora"])
def test_shared_prompts_with_adapters(weights: NoQuantization, tmp_path: Path) -> None:
    source, adapter = HFCheckpoint.open(make_checkpoint(tmp_path, "llama3.2")), LoRAConfig(4)
    model = build.build_model(source, weights, adapter, FP32, MemoryConfig(), DistributedContext(0, "cpu"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    check_equal(model, model)


@pytest.mark.parametrize(("name", "length", "exact"), [("llama3.2", 10**6, True), ("qwen3.5", 8, False)])
def test_recurrent_state_is_not_shared(name: str, length: int, exact: bool, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, name), adapter=NoAdapter())
    assert model.shares_prefixes(length) == exact
    if not exact:
        with pytest.raises(AssertionError, match="state"):
            answer_logps(model, make_batches(True)[0])


def test_longrope_prompts_are_not_shared_beyond_the_switch(tmp_path: Path) -> None:
    """LongRoPE rotates all tokens of long documents differently."""
    model = load_model(make_checkpoint(tmp_path, "phi4-mini"))
    (edge,) = model.rope_switch_lengths
    assert model.shares_prefixes(edge) and not model.shares_prefixes(edge + 1)
