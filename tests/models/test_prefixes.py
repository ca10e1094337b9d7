"""Answers that go on from one prompt are what they are where each has a prompt of its own, with all gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import FP32, load_model, make_checkpoint, relative_error
from tests.pairs import answer_logps, make_batches
from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.kernels import attention_cpu
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NF4Config, NoQuantization

# Full attention, windows, chunks, caps, sinks, latents, experts, keys that are lent, growth with the position.
KINDS = ["llama3.2", "mistral", "gemma2", "gemma3", "llama4", "gpt-oss", "deepseek-v3", "deepseek-v2", "qwen3-moe"]
KINDS += ["gemma4-shared", "gemma4-moe", "ministral3"]


def judged(model: Decoder, shared: bool, micro_batch: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all answers, and gradients of a sum in which each has its own weight."""
    model.zero_grad()
    found = []
    for batch in make_batches(shared, micro_batch=micro_batch):
        assert (batch.shared_prefixes is not None) == shared
        each = answer_logps(model, batch)
        (each * torch.cos(batch.document_indices.float())).sum().backward()
        found += zip(batch.document_indices.tolist(), each.tolist(), strict=True)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.tensor([value for _, value in sorted(found)]), gradients


def same(one: Decoder, other: Decoder, micro_batch: int = 1) -> None:
    (mine, gradients), (wanted, right) = judged(one, True, micro_batch), judged(other, False)
    assert relative_error(mine, wanted) < 1e-5
    assert gradients.keys() == right.keys() and right
    for name, gradient in gradients.items():
        assert relative_error(gradient, right[name]) < 1e-5, name


@pytest.mark.parametrize("name", KINDS)
def test_answers_of_one_prompt(name: str, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, name))
    assert model.shares_prefixes(60)
    same(model, model)


@pytest.mark.parametrize("name", ["gemma2", "llama4", "gpt-oss", "deepseek-v3"])
def test_without_a_compiler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cpu, "able", lambda: False)
    model = load_model(make_checkpoint(tmp_path, name))
    same(model, model, micro_batch=3)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ["gemma2", "gemma4-shared"])
def test_layers_that_are_run_again(name: str, recompute: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    same(load_model(folder, memory=MemoryConfig(activation_checkpointing=recompute)), load_model(folder))


@pytest.mark.slow
def test_compiled_layers(tmp_path: Path) -> None:
    """Traced, and run as torch runs what it has traced: rows come as one, in any number of tokens and documents."""
    folder = make_checkpoint(tmp_path, "gemma2")
    model = load_model(folder)
    model.flat = True
    fullgraph = attention_cpu.able()  # torch's operations take documents one by one, outside of the graph
    for layer in model.layers:
        layer.compile(backend="aot_eager", dynamic=True, fullgraph=fullgraph)
    same(model, load_model(folder), micro_batch=2)


@pytest.mark.parametrize("weights", [NoQuantization(), NF4Config()], ids=["lora", "qlora"])
def test_adapters(weights: NoQuantization, tmp_path: Path) -> None:
    source, adapter = HFCheckpoint.open(make_checkpoint(tmp_path, "llama3.2")), LoRAConfig(4)
    model = build.build_model(source, weights, adapter, FP32, MemoryConfig(), DistributedContext(0, "cpu"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    same(model, model)


@pytest.mark.parametrize(("name", "length", "exact"), [("llama3.2", 10**6, True), ("qwen3.5", 8, False)])
def test_a_state_is_not_shared(name: str, length: int, exact: bool, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, name), adapter=NoAdapter())
    assert model.shares_prefixes(length) == exact
    if not exact:
        with pytest.raises(AssertionError, match="state"):
            answer_logps(model, make_batches(True)[0])


def test_rotations_that_depend_on_what_follows_are_not_shared(tmp_path: Path) -> None:
    """LongRoPE turns tokens of long documents otherwise, from the first one on."""
    model = load_model(make_checkpoint(tmp_path, "phi4-mini"))
    (edge,) = model.rope_switch_lengths
    assert model.shares_prefixes(edge) and not model.shares_prefixes(edge + 1)
