"""Compiled layers: batches of other lengths and numbers of documents compile nothing new after the first two."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental import _config as shapes

from tests.gpu.flash_on_cpu import cpu_flash
from tests.gpu.meta_steps import Documents, build_model, read_spec, representative_spec
from tests.helpers.random_checkpoints import relative_error
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.document import Document
from tunekit.kernels import attention_gpu
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.weight_init import init_weights

CPU = torch.device("cpu")
LENGTHS = 12


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """With the settings of `compile`, and a limit for FlexAttention that is soon reached."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True, recompile_limit=8), shapes.patch(use_duck_shape=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention as on a GPU, with the kernel of torch written down."""
    monkeypatch.setattr(attention_gpu, "is_supported", lambda q, capped: True)
    monkeypatch.setattr(attention_gpu, "HALF_DTYPES", (torch.float32, torch.bfloat16))
    with cpu_flash():
        yield


def packed_batch(draw: random.Random, vocab: int) -> Batch:
    """One packed row of two to six documents of any length."""
    sizes = [draw.randint(2, 40) for _ in range(draw.randint(2, 6))]
    documents = Documents(Document(np.arange(n, dtype=np.int32) % vocab, np.arange(n) > 0, n) for n in sizes)
    (batch,) = Collator(1, 1, 0, 1, 0, sum(sizes)).micro_batches(documents, [np.arange(len(sizes))])
    return batch


def compiled_model(name: str, memory: MemoryConfig, backend: CompileCounterWithBackend, fullgraph: bool) -> Decoder:
    """Layers as `compile` compiles them, run as torch traced them."""
    model = build_model(read_spec(name, layers=2), memory=memory, device=CPU)
    init_weights(model, 0)
    model.compute_dtype, model.flatten_rows = torch.float32, True
    for layer in model.layers:
        layer.compile(backend=backend, dynamic=True, fullgraph=fullgraph)
    return model


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize(
    ("name", "recompute", "backend_name"), [("gemma3", "none", "eager"), ("llama3.2", "full", "aot_eager")]
)
def test_lengths_compile_nothing_new(name: str, recompute: str, backend_name: str) -> None:
    """Each layer is one graph, FlashAttention in it, with bounds that differ in every batch."""
    backend = CompileCounterWithBackend(backend_name)
    model, draw = (
        compiled_model(name, MemoryConfig(activation_checkpointing=recompute), backend, fullgraph=True),
        random.Random(0),
    )
    for number in range(LENGTHS):
        batch = packed_batch(draw, model.spec.vocab)
        (CrossEntropy()(model, batch) / batch.num_target_tokens).backward()
        if number == 1:
            first = backend.frame_count
    assert backend.frame_count == first


def gradients(model: Decoder, batch: Batch) -> torch.Tensor:
    model.zero_grad()
    (CrossEntropy()(model, batch) / batch.num_target_tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize(
    ("adapter", "backend_name"), [(NoAdapter(), "eager"), (LoRAConfig(4), "aot_eager")], ids=["full", "lora"]
)
def test_a_layer_with_experts_is_one_graph(adapter: NoAdapter | LoRAConfig, backend_name: str) -> None:
    """In bf16, which torch's grouped product takes inside of graphs. Routing differs in every batch."""
    backend, spec, draw = CompileCounterWithBackend(backend_name), representative_spec("qwen3-moe"), random.Random(0)
    plain, model = (build_model(spec, adapter=adapter, device=CPU) for _ in range(2))
    for net in (plain, model):
        init_weights(net, 0)
        net.compute_dtype = torch.bfloat16
    model.flatten_rows = True
    for layer in model.layers:
        layer.compile(backend=backend, dynamic=True, fullgraph=True)
    for number in range(4):
        batch = packed_batch(draw, spec.vocab)
        actual, expected = (gradients(net, batch) for net in (model, plain))
        assert (actual - expected).norm() < 3e-2 * expected.norm()
        if number == 1:
            first = backend.frame_count
    assert backend.frame_count == first


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_routers_of_other_families_are_one_graph_too(name: str) -> None:
    """With biases and clamped activations; with shared experts, and groups of experts."""
    backend, spec, draw = CompileCounterWithBackend("eager"), representative_spec(name), random.Random(0)
    spec = replace(spec, layers=spec.layers[-1:])
    model = build_model(spec, device=CPU)
    init_weights(model, 0)
    model.compute_dtype, model.flatten_rows = torch.bfloat16, True
    for layer in model.layers:
        layer.compile(backend=backend, dynamic=True, fullgraph=True)
    for _ in range(3):
        gradients(model, packed_batch(draw, spec.vocab))
    assert backend.frame_count == len(model.layers)


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize(("name", "backend_name"), [("llama3.2", "eager"), ("gemma3", "aot_eager")])
def test_prompts_compile_nothing_new(name: str, backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a generation, whose rows are documents, is one graph for each layer too."""
    monkeypatch.setattr(attention_gpu, "is_gpu", lambda device: True)
    backend = CompileCounterWithBackend(backend_name)
    model, draw = compiled_model(name, MemoryConfig(), backend, fullgraph=True).eval(), random.Random(0)
    plain = compiled_model(name, MemoryConfig(), backend, fullgraph=True).eval()
    for layer in plain.layers:
        layer._compiled_call_impl = None
    for number in range(LENGTHS):
        shape = draw.randint(2, 6), draw.randint(2, 40)
        tokens, lengths = torch.randint(0, model.spec.vocab, shape), torch.full(shape[:1], shape[1])
        with torch.inference_mode():
            actual, expected = (m(tokens, cache=m.make_cache(shape[0], 48), lengths=lengths) for m in (model, plain))
        assert relative_error(actual, expected) < 1e-5
        if number == 1:
            first = backend.frame_count
    assert backend.frame_count == first


def test_the_choice_of_flex_attention_is_a_constant_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo cannot trace the launch that checks Triton, and follows `functools.cache`."""

    @cache
    def can_launch() -> bool:
        return next(path for path in (Path("/none"), *Path("/none").parents) if path.exists()).exists()

    monkeypatch.setattr(attention_gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(attention_gpu, "can_launch", can_launch)
    choose = torch.compile(
        lambda x: x + attention_gpu.is_supported(x, False), backend="eager", fullgraph=True, dynamic=True
    )
    for head_dim, expected in ((64, True), (128, True), (136, False)):  # fp32
        assert bool(choose(torch.zeros(1, 2, 1, head_dim, requires_grad=True)).all()) is expected


def test_flex_attention_fails_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to run uncompiled there, with the scores of all pairs."""
    create, limit = torch.compile, 9
    monkeypatch.setattr(attention_gpu, "FLEX_VARIANTS", limit)
    monkeypatch.setattr(torch, "compile", lambda f, **options: create(f, backend="eager", **options))
    flex = attention_gpu.compiled_flex_attention.__wrapped__()
    monkeypatch.setattr(attention_gpu, "compiled_flex_attention", lambda: flex)
    q, k, v = (torch.randn(1, 256, heads, 16) for heads in (2, 1, 1))
    layout, done = SequenceLayout(torch.tensor([0, 100, 256])), 0
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for done in range(2 * limit):
            attention_gpu.flex(q, k, v, layout, None, [0.2, 0.0, 0.0, 1.0 + done])
    assert done == limit, "8, where torch stops usually, and one more"
