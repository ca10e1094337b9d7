"""Linear layers with LoRA as one operation equal the float64 formula."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.distributed.fsdp import shard_module
from tunekit.kernels import lora
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.quantization.config import NF4Config, NoQuantization

BF16, FP32 = torch.bfloat16, torch.float32
INNER, OUTER, RANKS = 64, (64, 128, 96), (4, 3, 5)
ADAPTERS = {
    "lora": LoRAConfig(4, 6.0),
    "rslora": LoRAConfig(4, 6.0, use_rslora=True),
    "dropout": LoRAConfig(4, 6.0, dropout=0.4),
    "pissa": LoRAConfig(4, 6.0, init="pissa"),
    "pissa, dropout": LoRAConfig(4, 6.0, init="pissa", dropout=0.4),
    "dora": DoRAConfig(4, 6.0),
    "dora, pissa, dropout": DoRAConfig(4, 6.0, init="pissa", dropout=0.4),
}
FORMATS = {"plain": NoQuantization(), "nf4": NF4Config(), "nested": NF4Config(double_quant=True)}


def make_layers(
    adapter: LoRAConfig, weights: NoQuantization, dtype: torch.dtype, count: int, bias: bool = True
) -> Sequence[Linear]:
    """Layers with a frozen weight in `dtype`, nonzero fp32 adapters, and trained biases."""
    torch.manual_seed(0)
    net = nn.Module()
    net.layers = nn.ModuleList(Linear(INNER, out, bias=bias) for out in OUTER[:count])
    for layer in net.layers:
        layer.to(dtype).weight.data.normal_(std=INNER**-0.5)
    plain = [layer.weight.data for layer in net.layers]
    weights.apply(net)
    for layer, weight, rank in zip(net.layers, plain, RANKS, strict=False):
        layer.requires_grad_(False).load_weight(weight)
        adapter.wrap_layer(layer, rank, adapter.alpha)
        for part in ("lora_A", "lora_B"):
            getattr(layer, part).to_empty(device="cpu").weight.data.normal_(std=0.5)
        for name, start in layer.named_buffers(recurse=False):
            setattr(layer, name, torch.randn(start.shape))
        if isinstance(adapter, DoRAConfig):
            layer.lora_magnitude_vector = nn.Parameter(torch.rand(layer.out_features) + 0.5)
        if bias:
            layer.bias.data.normal_()
            layer.bias.requires_grad_()
    return [*net.layers]


def trained_parameters(layers: Sequence[Linear]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.parameters() if p.requires_grad]


def formula(adapter: LoRAConfig, layer: Linear, x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """The layer in float64, with its trained tensors `p`."""
    weight, scale = layer.dequantize().detach().double(), layer.lora_scale
    dropped_x = F.dropout(x, adapter.dropout, layer.training)
    y, update = x @ weight.T, scale * p["lora_B.weight"] @ p["lora_A.weight"]
    y = y + scale * dropped_x @ p["lora_A.weight"].T @ p["lora_B.weight"].T
    if adapter.init == "pissa":
        a, b = layer.lora_A0.double(), layer.lora_B0.double()
        y, update = y - scale * dropped_x @ a.T @ b.T, update - scale * b @ a
    if isinstance(adapter, DoRAConfig):
        y = y * (p["lora_magnitude_vector"] / (weight + update).norm(dim=1).detach())
    return y + p["bias"] if "bias" in p else y


def float64_results(adapter: LoRAConfig, layers: Sequence[Linear], x: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of x and all trained tensors, in float64."""
    x = x.detach().double().requires_grad_()
    parameters = [
        {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters() if p.requires_grad}
        for layer in layers
    ]
    ys = [formula(adapter, layer, x, p) for layer, p in zip(layers, parameters, strict=True)]
    inputs = [x, *chain.from_iterable(p.values() for p in parameters)]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, inputs, [grad.double() for grad in grads])]


@pairwise(adapter=ADAPTERS, weights=FORMATS, dtype=[FP32, BF16], layers_and_bias=[(1, False), (3, True)])
def test_outputs_and_all_gradients(
    adapter: LoRAConfig, weights: NoQuantization, dtype, layers_and_bias: tuple[int, bool]
) -> None:
    count, bias = layers_and_bias
    layers = make_layers(adapter, weights, dtype, count, bias)
    x = torch.randn(2, 11, INNER).to(dtype).requires_grad_()
    grads = [torch.randn(2, 11, out).to(dtype) for out in OUTER[:count]]
    torch.manual_seed(7)
    expected = float64_results(adapter, layers, x, grads)
    torch.manual_seed(7)
    ys = shared_input_linears(layers, x)
    actual = [*(y.detach() for y in ys), *torch.autograd.grad(ys, [x, *trained_parameters(layers)], grads)]
    assert [t.dtype for t in actual[count + 1 :]] == [p.dtype for p in trained_parameters(layers)]
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a.double(), b) < (
            1e-5 if dtype == FP32 else 4e-2 if isinstance(adapter, DoRAConfig) else 2e-2
        )


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_fused_operation_equals_reference(adapter: LoRAConfig) -> None:
    layers = make_layers(adapter, NoQuantization(), FP32, 3)
    x, updates = torch.randn(2, 5, INNER, requires_grad=True), [adapter.lora_weights(layer) for layer in layers]
    results = []
    for run in (lora.lora_linear, lora.lora_linear_reference):
        ys = run(x, updates)
        inputs = [x, *(p for p in trained_parameters(layers) if p.ndim == 2)]
        results.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), inputs)])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-5


def test_trained_weight_gets_its_gradient() -> None:
    """Layers with a trained weight use autograd."""
    (layer,) = make_layers(ADAPTERS["lora"], NoQuantization(), FP32, 1)
    layer.weight.requires_grad_()
    x = torch.randn(5, INNER)
    layer(x).sum().backward()
    assert relative_error(layer.weight.grad, x.sum(0).expand_as(layer.weight)) < 1e-6


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@torch.no_grad()
def test_cached_factors_follow_the_parameters(adapter: LoRAConfig, dtype: torch.dtype) -> None:
    """The same bits as without the cache, also after parameters change in place."""
    layers = [layer.eval() for layer in make_layers(adapter, NoQuantization(), dtype, 3)]
    cache, x = lora.FactorCache(), torch.randn(2, 5, INNER).to(dtype)
    for _ in range(3):
        expected = shared_input_linears(layers, x), layers[1](x)
        with cache.use():
            actual = shared_input_linears(layers, x), layers[1](x)
        assert all(map(torch.equal, (*actual[0], actual[1]), (*expected[0], expected[1])))
        for parameter in trained_parameters(layers):
            parameter.add_(torch.randn_like(parameter))


def test_all_layers_are_cast_by_one_operator() -> None:
    layers = [layer.eval() for layer in make_layers(ADAPTERS["lora"], NoQuantization(), BF16, 3)]
    cache = lora.FactorCache()
    counts = []
    for _ in range(2):
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler, cache.use():
            for group in (layers, layers[:1], layers[2:]):
                shared_input_linears(group, torch.randn(2, INNER).to(BF16))
        counts.append(sum(e.count for e in profiler.key_averages() if e.key == "aten::_foreach_copy_"))
    assert counts == [3, 1]


@pytest.mark.parametrize("shape", [(0, INNER), (1, INNER), (2, 0, INNER), (3, 2, 2, INNER)])
def test_unusual_shapes(shape: tuple[int, ...]) -> None:
    layers = make_layers(ADAPTERS["dropout"], NoQuantization(), FP32, 2)
    x = torch.randn(shape, requires_grad=True)
    ys = shared_input_linears(layers, x)
    assert [y.shape for y in ys] == [(*shape[:-1], out) for out in OUTER[:2]]
    sum(y.sum() for y in ys).backward()
    assert x.grad.shape == shape


def test_strided_rows() -> None:
    layers = make_layers(ADAPTERS["lora"], NoQuantization(), FP32, 2)
    x = torch.randn(INNER, 7, 3).permute(2, 1, 0)
    grads = [torch.randn(out, 7, 3).permute(2, 1, 0) for out in OUTER[:2]]
    results = []
    for inputs in (x, x.contiguous()):
        leaf = inputs.detach().requires_grad_()
        ys = shared_input_linears(layers, leaf)
        results.append([*ys, *torch.autograd.grad(ys, [leaf, *trained_parameters(layers)], grads)])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize(("adapter", "dropout_bytes"), [("lora", 0), ("pissa", 0), ("dropout", 3)])
def test_only_the_input_is_saved(adapter: str, dropout_bytes: int) -> None:
    """Dropout also saves a byte per input element and layer. DoRA saves its outputs too."""
    layers = make_layers(ADAPTERS[adapter], NoQuantization(), BF16, 3)
    x = torch.randn(2, 50, INNER, dtype=BF16, requires_grad=True)
    parameter_ptrs = {
        t.untyped_storage().data_ptr() for layer in layers for t in (*layer.parameters(), *layer.buffers())
    }
    saved: dict[int, int] = {}

    def record(t: Tensor) -> Tensor:
        pointer = t.untyped_storage().data_ptr()
        if pointer not in parameter_ptrs:
            saved[pointer] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        shared_input_linears(layers, x)
    assert sum(saved.values()) == x.nbytes + dropout_bytes * x.numel()


@pytest.mark.parametrize("adapter", ["dropout", "pissa", "dora"])
@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
def test_checkpointing_gives_the_same_bits(adapter: str, weights: NoQuantization) -> None:
    layers = make_layers(ADAPTERS[adapter], weights, BF16, 3)
    x = torch.randn(2, 9, INNER, dtype=BF16, requires_grad=True)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        ys = (
            checkpoint(shared_input_linears, layers, x, use_reentrant=False)
            if checkpointed
            else shared_input_linears(layers, x)
        )
        loss = sum(y.float().square().sum() for y in ys)
        results.append([*ys, *torch.autograd.grad(loss, [x, *trained_parameters(layers)])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("adapter", "fullgraph"), [("lora", True), ("pissa", True), ("dora", False)])
def test_torch_compile_gives_the_same(adapter: str, fullgraph: bool) -> None:
    """In one graph, except for the row norms of DoRA."""
    layers = make_layers(ADAPTERS[adapter], NF4Config(), FP32, 3)
    x = torch.randn(9, INNER, requires_grad=True)
    run = torch.compile(shared_input_linears, backend="aot_eager", fullgraph=fullgraph)
    results = []
    for product in (shared_input_linears, run):
        ys = product(layers, x)
        results.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *trained_parameters(layers)])])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-5


def test_layers_with_other_adapters_run_one_by_one() -> None:
    """A layer without an adapter, and one with another adapter, next to a LoRA layer."""
    first, second, third = make_layers(ADAPTERS["lora"], NoQuantization(), FP32, 3)
    second.update, third.update = None, LoRAConfig(4, 6.0).forward_linear
    x = torch.randn(4, INNER)
    for y, layer in zip(shared_input_linears((first, second, third), x), (first, second, third), strict=True):
        assert torch.equal(y, layer(x))
    assert torch.equal(second(x), second.matmul(x))


@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("cached_bytes", [1, 3 * INNER, 2**19])
def test_row_norms_equal_those_of_the_full_weight(
    weights: NoQuantization, cached_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "CPU_CHUNK_SIZE", cached_bytes)
    for adapter in (ADAPTERS["dora"], ADAPTERS["dora, pissa, dropout"]):
        for layer in make_layers(adapter, weights, BF16, 3):
            full_weight = layer.dequantize().detach().double() + adapter.delta(layer).detach().double()
            assert relative_error(adapter.row_norms(layer).double(), full_weight.norm(dim=1)) < 1e-6


@pytest.mark.parametrize("adapter", ["lora", "dropout", "pissa"])
def test_outputs_can_be_changed_in_place(adapter: str) -> None:
    layers = make_layers(ADAPTERS[adapter], NoQuantization(), FP32, 3)
    x = torch.randn(2, 3, INNER, requires_grad=True)
    ys = shared_input_linears(layers, x)
    assert not any(y._is_view() for y in ys)
    sum(y.mul_(2).sum() for y in ys).backward()
    assert x.grad is not None


class ShardedUnit(nn.Module):
    """Module that is sharded as a unit."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return shared_input_linears(self.layers, x)


@pytest.fixture
def single_process_group(tmp_path: Path) -> Iterator[None]:
    """Initialize a process group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("adapter", ["dropout", "pissa", "dora"])
def test_sharded_layers_give_the_same(adapter: str, weights: NoQuantization) -> None:
    x, results = torch.randn(2, 5, INNER), []
    for shard in (False, True):
        unit = ShardedUnit(make_layers(ADAPTERS[adapter], weights, FP32, 3))
        if shard:
            shard_module(unit, mesh=init_device_mesh("cpu", (1,)))
        leaf = x.detach().requires_grad_()
        torch.manual_seed(4)
        sum(y.square().sum() for y in unit(leaf)).backward()
        grads = [p.grad.to_local() if shard else p.grad for p in unit.parameters() if p.requires_grad]
        results.append([leaf.grad, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
