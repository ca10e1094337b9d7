"""Layers and their low-rank updates as one operation, against the same formula in float64."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.checkpoints import error
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


def layers_of(
    adapter: LoRAConfig, weights: NoQuantization, dtype: torch.dtype, count: int, bias: bool = True
) -> Sequence[Linear]:
    """Layers with a frozen weight in `dtype`, fp32 updates that are not zero, and trained biases."""
    torch.manual_seed(0)
    net = nn.Module()
    net.layers = nn.ModuleList(Linear(INNER, out, bias=bias) for out in OUTER[:count])
    for layer in net.layers:
        layer.to(dtype).weight.data.normal_(std=INNER**-0.5)
    plain = [layer.weight.data for layer in net.layers]
    weights.apply(net)
    for layer, weight, rank in zip(net.layers, plain, RANKS, strict=False):
        layer.requires_grad_(False).fill(weight)
        adapter.attach(layer, rank, adapter.alpha)
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


def trained(layers: Sequence[Linear]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.parameters() if p.requires_grad]


def formula(adapter: LoRAConfig, layer: Linear, x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """The layer in float64: `p` are its trained tensors."""
    weight, scale = layer.dense().detach().double(), layer.lora_scale
    seen = F.dropout(x, adapter.dropout, layer.training)
    y, update = x @ weight.T, scale * p["lora_B.weight"] @ p["lora_A.weight"]
    y = y + scale * seen @ p["lora_A.weight"].T @ p["lora_B.weight"].T
    if adapter.init == "pissa":
        a, b = layer.lora_A0.double(), layer.lora_B0.double()
        y, update = y - scale * seen @ a.T @ b.T, update - scale * b @ a
    if isinstance(adapter, DoRAConfig):
        y = y * (p["lora_magnitude_vector"] / (weight + update).norm(dim=1).detach())
    return y + p["bias"] if "bias" in p else y


def exactly(adapter: LoRAConfig, layers: Sequence[Linear], x: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and gradients to x and all that is trained, in float64."""
    x = x.detach().double().requires_grad_()
    own = [
        {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters() if p.requires_grad}
        for layer in layers
    ]
    ys = [formula(adapter, layer, x, p) for layer, p in zip(layers, own, strict=True)]
    inputs = [x, *chain.from_iterable(p.values() for p in own)]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, inputs, [grad.double() for grad in grads])]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize(("count", "bias"), [(1, False), (3, True)])
def test_outputs_and_all_gradients(adapter: LoRAConfig, weights: NoQuantization, dtype, count: int, bias: bool) -> None:
    layers = layers_of(adapter, weights, dtype, count, bias)
    x = torch.randn(2, 11, INNER).to(dtype).requires_grad_()
    grads = [torch.randn(2, 11, out).to(dtype) for out in OUTER[:count]]
    torch.manual_seed(7)
    wanted = exactly(adapter, layers, x, grads)
    torch.manual_seed(7)
    ys = shared_input_linears(layers, x)
    found = [*(y.detach() for y in ys), *torch.autograd.grad(ys, [x, *trained(layers)], grads)]
    assert [t.dtype for t in found[count + 1 :]] == [p.dtype for p in trained(layers)]
    for a, b in zip(found, wanted, strict=True):
        assert error(a.double(), b) < (1e-5 if dtype == FP32 else 2e-2 if isinstance(adapter, DoRAConfig) else 1e-2)


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_the_reference_is_the_same(adapter: LoRAConfig) -> None:
    layers = layers_of(adapter, NoQuantization(), FP32, 3)
    x, updates = torch.randn(2, 5, INNER, requires_grad=True), [adapter.parted(layer) for layer in layers]
    found = []
    for run in (lora.lora_linear, lora.reference):
        ys = run(x, updates)
        inputs = [x, *(p for p in trained(layers) if p.ndim == 2)]
        found.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), inputs)])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-5


def test_weights_that_are_trained_get_their_gradient() -> None:
    """A layer whose weight is not frozen is left to autograd."""
    (layer,) = layers_of(ADAPTERS["lora"], NoQuantization(), FP32, 1)
    layer.weight.requires_grad_()
    x = torch.randn(5, INNER)
    layer(x).sum().backward()
    assert error(layer.weight.grad, x.sum(0).expand_as(layer.weight)) < 1e-6


@pytest.mark.parametrize("shape", [(0, INNER), (1, INNER), (2, 0, INNER), (3, 2, 2, INNER)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    layers = layers_of(ADAPTERS["dropout"], NoQuantization(), FP32, 2)
    x = torch.randn(shape, requires_grad=True)
    ys = shared_input_linears(layers, x)
    assert [y.shape for y in ys] == [(*shape[:-1], out) for out in OUTER[:2]]
    sum(y.sum() for y in ys).backward()
    assert x.grad.shape == shape


def test_rows_that_do_not_stand_in_order() -> None:
    layers = layers_of(ADAPTERS["lora"], NoQuantization(), FP32, 2)
    x = torch.randn(INNER, 7, 3).permute(2, 1, 0)
    grads = [torch.randn(out, 7, 3).permute(2, 1, 0) for out in OUTER[:2]]
    found = []
    for same in (x, x.contiguous()):
        leaf = same.detach().requires_grad_()
        ys = shared_input_linears(layers, leaf)
        found.append([*ys, *torch.autograd.grad(ys, [leaf, *trained(layers)], grads)])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize(("adapter", "share"), [("lora", 0), ("pissa", 0), ("dropout", 3)])
def test_what_is_kept_is_the_input_alone(adapter: str, share: int) -> None:
    """Beside the parameters; dropout costs a byte for each number of the input and layer. (DoRA keeps its outputs.)"""
    layers = layers_of(ADAPTERS[adapter], NoQuantization(), BF16, 3)
    x = torch.randn(2, 50, INNER, dtype=BF16, requires_grad=True)
    own = {t.untyped_storage().data_ptr() for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        place = t.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        shared_input_linears(layers, x)
    assert sum(kept.values()) == x.nbytes + share * x.numel()


@pytest.mark.parametrize("adapter", ["dropout", "pissa", "dora"])
@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
def test_a_pass_that_is_run_again_gives_the_same_bits(adapter: str, weights: NoQuantization) -> None:
    layers = layers_of(ADAPTERS[adapter], weights, BF16, 3)
    x = torch.randn(2, 9, INNER, dtype=BF16, requires_grad=True)
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        ys = (
            checkpoint(shared_input_linears, layers, x, use_reentrant=False)
            if again
            else shared_input_linears(layers, x)
        )
        loss = sum(y.float().square().sum() for y in ys)
        found.append([*ys, *torch.autograd.grad(loss, [x, *trained(layers)])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("adapter", "whole"), [("lora", True), ("pissa", True), ("dora", False)])
def test_the_compiler_gives_the_same(adapter: str, whole: bool) -> None:
    """In one graph, but for the lengths that DoRA wants."""
    layers = layers_of(ADAPTERS[adapter], NF4Config(), FP32, 3)
    x = torch.randn(9, INNER, requires_grad=True)
    run = torch.compile(shared_input_linears, backend="aot_eager", fullgraph=whole)
    found = []
    for product in (shared_input_linears, run):
        ys = product(layers, x)
        found.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *trained(layers)])])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-5


def test_layers_of_other_kinds_are_taken_one_by_one() -> None:
    """One without an update, and one of another adapter, beside one with."""
    first, second, third = layers_of(ADAPTERS["lora"], NoQuantization(), FP32, 3)
    second.update, third.update = None, LoRAConfig(4, 6.0).product
    x = torch.randn(4, INNER)
    for y, layer in zip(shared_input_linears((first, second, third), x), (first, second, third), strict=True):
        assert torch.equal(y, layer(x))
    assert torch.equal(second(x), second.product(x))


@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("room", [1, 3 * INNER, 2**19])
def test_lengths_are_those_of_the_whole_weight(
    weights: NoQuantization, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "CACHED", room)
    for adapter in (ADAPTERS["dora"], ADAPTERS["dora, pissa, dropout"]):
        for layer in layers_of(adapter, weights, BF16, 3):
            whole = layer.dense().detach().double() + adapter.delta(layer).detach().double()
            assert error(adapter.lengths(layer).double(), whole.norm(dim=1)) < 1e-6


@pytest.mark.parametrize("adapter", ["lora", "dropout", "pissa"])
def test_outputs_may_be_changed_in_place(adapter: str) -> None:
    layers = layers_of(ADAPTERS[adapter], NoQuantization(), FP32, 3)
    x = torch.randn(2, 3, INNER, requires_grad=True)
    ys = shared_input_linears(layers, x)
    assert not any(y._is_view() for y in ys)
    sum(y.mul_(2).sum() for y in ys).backward()
    assert x.grad is not None


class Box(nn.Module):
    """What is sharded as one."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return shared_input_linears(self.layers, x)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("adapter", ["dropout", "pissa", "dora"])
def test_sharded_blocks_give_the_same(adapter: str, weights: NoQuantization) -> None:
    x, found = torch.randn(2, 5, INNER), []
    for shard in (False, True):
        box = Box(layers_of(ADAPTERS[adapter], weights, FP32, 3))
        if shard:
            shard_module(box, mesh=init_device_mesh("cpu", (1,)))
        leaf = x.detach().requires_grad_()
        torch.manual_seed(4)
        sum(y.square().sum() for y in box(leaf)).backward()
        grads = [p.grad.to_local() if shard else p.grad for p in box.parameters() if p.requires_grad]
        found.append([leaf.grad, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
