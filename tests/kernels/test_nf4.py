"""Four-bit weights: bytes and scales against bitsandbytes and by hand, numbers and products against float64."""

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.checkpoints import error
from tests.interpreter import needs_loops
from tunekit.kernels import nf4

KERNEL = nf4
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ("nf4", "fp4")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ties(kind: str) -> Tensor:
    """Numbers at the bounds between codes, and the next floats on both sides of them, in blocks whose scale is 1."""
    bounds = nf4.order(kind)[0]
    near = torch.stack([bounds, bounds.nextafter(torch.tensor(2.0)), bounds.nextafter(torch.tensor(-2.0))]).flatten()
    return torch.cat([near, torch.ones(64 - len(near))]).repeat(2, 1)


INPUTS: dict[str, Callable[[str], Tensor]] = {
    "random": lambda kind: random(128, 256),
    "bf16": lambda kind: random(64, 64).to(BF16),
    "half": lambda kind: random(64, 64).half(),
    "zero": lambda kind: torch.zeros(8, 64),
    "constant": lambda kind: torch.full((8, 64), -0.3),
    "huge": lambda kind: random(64, 64).clamp(-3, 3) * 1e38,
    "tiny": lambda kind: random(64, 64) * 1e-33,  # of numbers below 1e-38 bitsandbytes makes zeros in bf16
    "below normal": lambda kind: random(64, 64) * 1e-39,
    "one number": lambda kind: torch.zeros(64, 64).index_fill_(1, torch.tensor([5]), -2.0),
    "ties": ties,
    "rows that end in a block": lambda kind: random(6, 32),
    "a part of a block": lambda kind: random(3, 50),
    "an odd number": lambda kind: random(5, 7),
    "a tiny part of a block": lambda kind: random(1, 10) * 1e-40,
    "not contiguous": lambda kind: random(64, 128).T,
    "experts": lambda kind: random(3, 8, 64),
}


@pytest.fixture(params=["fast", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is compiled, and plain torch as on machines without a compiler."""
    if request.param == "reference":
        monkeypatch.setattr(nf4, "load_library", lambda source: None)
        nf4.compiled.cache_clear()
        request.addfinalizer(nf4.compiled.cache_clear)
    elif nf4.compiled() is None:
        pytest.skip("no compiler")
    return request.param


def kept(weight: Tensor, nested: bool = False, kind: str = "nf4") -> list[Tensor | None]:
    """A weight (..., in) as a layer keeps it: bytes, scales as bytes, and what decodes them."""
    packed, scales = nf4.quantize(weight, kind)
    outer = None
    if nested:
        scales, outer = nf4.double_quantize(scales)
    parts = [part.view(*weight.shape[:-1], -1) for part in (packed, scales.view(torch.uint8))]
    return [*parts, None if outer is None else outer.view(torch.uint8)]


def numbers(parts: list[Tensor | None], kind: str = "nf4") -> Tensor:
    """The same in float64, one look-up after the other."""
    packed, scales, outer = parts
    if outer is None:
        scales = scales.view(FP32).double()
    else:
        largest = outer.view(FP32).double()
        groups = torch.arange(scales.numel()).view(scales.shape) // 256
        scales = nf4.dynamic_map(packed.device).double()[scales.int()] * largest[groups] + largest[-1]
    codes = torch.stack([packed // 16, packed % 16], -1).flatten(-2)
    return torch.tensor(nf4.TABLES[kind]).double()[codes.int()] * scales.repeat_interleave(64, -1)


# Against bitsandbytes


@pytest.fixture(scope="module")
def bnb() -> ModuleType:
    return pytest.importorskip("bitsandbytes.functional")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", INPUTS.values(), ids=INPUTS)
def test_bytes_and_scales_are_those_of_bitsandbytes(of, kind: str, way: str, bnb: ModuleType) -> None:
    weight = of(kind)
    wanted, state = bnb.quantize_4bit(weight, quant_type=kind, blocksize=64)
    packed, scales = nf4.quantize(weight, kind)
    assert torch.equal(packed, wanted.flatten()) and torch.equal(scales, state.absmax)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", ["random", "zero", "constant", "huge", "tiny", "one number", "ties", "experts"])
def test_numbers_are_those_of_bitsandbytes(name: str, dtype, kind: str, way: str, bnb: ModuleType) -> None:
    weight = INPUTS[name](kind)
    packed, state = bnb.quantize_4bit(weight, quant_type=kind, blocksize=64)
    state.dtype = dtype
    found = nf4.dequantize(*kept(weight, kind=kind), kind, dtype)
    assert torch.equal(found, bnb.dequantize_4bit(packed, state))


def without_its_cpu_code(bnb: ModuleType) -> dict[str, Callable]:
    """What bitsandbytes computes on devices for which it has no code of its own.

    On the CPU it finds the nearest of the 256 numbers in a table of 65,536 shares, and misses it for one share in 700.
    """
    found: dict[str, Callable] = {}
    ops = sys.modules["bitsandbytes._ops"]
    file = Path(bnb.__file__).parent / "backends" / "default" / "ops.py"
    spec = importlib.util.spec_from_file_location("bitsandbytes.backends.default.again", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "register_kernel", lambda name, kind: lambda f: found.setdefault(name, f))
        spec.loader.exec_module(module)
    return found


@pytest.mark.parametrize("of", [*INPUTS.values(), lambda kind: random(300, 64)], ids=[*INPUTS, "full groups"])
def test_nested_scales_are_those_of_bitsandbytes(of, bnb: ModuleType) -> None:
    quantize = without_its_cpu_code(bnb)["bitsandbytes::quantize_blockwise"]
    table = bnb.create_dynamic_map()
    assert torch.equal(nf4.dynamic_map(table.device), table)
    scales = nf4.quantize(of("nf4"))[1]
    wanted, largest = quantize(scales - scales.mean(), table, 256)
    codes, outer = nf4.double_quantize(scales)
    assert torch.equal(codes, wanted) and torch.equal(outer, torch.cat([largest, scales.mean()[None]]))
    state = bnb.QuantState(absmax=largest, code=table, blocksize=256, dtype=FP32)
    assert torch.equal(nf4.unnest(codes, outer), bnb.dequantize_blockwise(codes, state) + scales.mean())


# Against float64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["random", "zero", "huge", "ties"])
def test_the_nearest_code_of_every_number(name: str, kind: str, way: str) -> None:
    weight = INPUTS[name](kind)
    scales = weight.double().view(-1, 64).abs().amax(1, keepdim=True).clamp(min=1e-30)
    shares = (weight.double().view(-1, 64) / scales)[..., None]
    nearest = (shares - torch.tensor(nf4.TABLES[kind]).double()).abs().amin(-1)
    found = numbers(kept(weight, kind=kind), kind).view(-1, 64) / scales
    assert ((found - shares[..., 0]).abs() - nearest).max() < 1e-6


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 128), (33, 576), (2, 5, 192), (300, 64)])
def test_numbers(shape: tuple[int, ...], nested: bool, way: str) -> None:
    parts = kept(random(*shape) / 50, nested)
    wanted = numbers(parts)
    assert error(nf4.dequantize(*parts).double(), wanted) < 2e-7
    assert torch.equal(nf4.dequantize(*parts, "nf4", BF16), nf4.dequantize(*parts).to(BF16))
    assert torch.equal(nf4.dequantize(*parts, "nf4", torch.half), nf4.dequantize(*parts).half())
    assert error(wanted, random(*shape).double() / 50) < 0.2


def test_numbers_that_are_not_finite_stay_so(way: str) -> None:
    parts = kept(random(1, 64))
    parts[1] = torch.tensor([[float("nan")]]).view(torch.uint8)
    assert all(nf4.dequantize(*parts, "nf4", dtype).isnan().all() for dtype in (BF16, FP32))


SIZES = [(1, 1, 64), (7, 33, 64), (5, 64, 576), (130, 96, 192)]  # tokens, out, in


@pytest.mark.parametrize("tile", [64, 640, 2**22], ids=["small tiles", "uneven tiles", "one tile"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("dtype", "within"), [(BF16, 1e-2), (FP32, 1e-5)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_and_gradients(sizes, dtype, within: float, nested: bool, tile: int, way: str, monkeypatch) -> None:
    monkeypatch.setattr(nf4, "TILE", tile)
    tokens, out, inner = sizes
    parts = kept(random(out, inner), nested)
    x, bias, grad = (random(*shape, seed=out).to(dtype) for shape in ((2, tokens, inner), (out,), (2, tokens, out)))
    weight = numbers(parts)
    for b in (None, bias.requires_grad_()):
        y = nf4.product(x.requires_grad_(), *parts, "nf4", b)
        (back,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        wanted = x.detach().double() @ weight.T + (0 if b is None else b.detach().double())
        assert y.dtype == back.dtype == dtype
        assert error(y.detach().double(), wanted) < within
        assert error(back.double(), grad.double() @ weight) < within
    (back,) = torch.autograd.grad(y, bias, grad)
    assert error(back.double(), grad.double().sum((0, 1))) < within


@pytest.mark.parametrize("rows", [[3, 1, 5], [0, 4, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("dtype", "within"), [(BF16, 1e-2), (FP32, 1e-5)], ids=str)
def test_products_of_experts(dtype, within: float, nested: bool, rows: list[int], way: str) -> None:
    parts, sizes = kept(random(3, 96, 128), nested), torch.tensor(rows)
    x, grad = random(sum(rows), 128, seed=1).to(dtype).requires_grad_(), random(sum(rows), 96, seed=2).to(dtype)
    y = nf4.grouped(x, *parts, sizes, "nf4")
    y.backward(grad)
    weight = numbers(parts)[torch.arange(3).repeat_interleave(sizes)]
    assert y.shape == grad.shape and x.grad.shape == x.shape and y.dtype == x.grad.dtype == dtype
    if sum(rows):
        assert error(y.detach().double(), torch.einsum("ni,noi->no", x.detach().double(), weight)) < within
        assert error(x.grad.double(), torch.einsum("no,noi->ni", grad.double(), weight)) < within


def test_nothing_dense_is_kept_for_the_backward_pass() -> None:
    x, parts, saved = random(3, 64).requires_grad_(), kept(random(32, 64)), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        nf4.product(x, *parts, "nf4", None)
    assert {t.dtype for t in saved} == {torch.uint8}


def test_the_operators_keep_what_torch_asks_of_them() -> None:
    for nested in (False, True):
        x, parts = random(3, 64).requires_grad_(), kept(random(32, 64), nested)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(nf4.forward, (x, *parts, "nf4", None), test_utils=checks)
        torch.library.opcheck(nf4.forward, (x, *parts, "nf4", torch.ones(32)), test_utils=checks)
        stacked = kept(random(2, 32, 64), nested)
        torch.library.opcheck(nf4.forward_grouped, (x, *stacked, torch.tensor([1, 2]), "nf4"), test_utils=checks)


def test_compiled_without_a_break() -> None:
    x, parts = random(3, 64).requires_grad_(), kept(random(32, 64))
    run = torch.compile(lambda x: nf4.product(x * 2, *parts, "nf4", None).sum(), fullgraph=True, backend="aot_eager")
    run(x).backward()
    wanted = 2 * numbers(parts).sum(0).expand(3, -1)
    assert error(x.grad.double(), wanted) < 1e-5


def test_compiled_for_inputs_without_gradients() -> None:
    """As the first layer of an adapted model has them."""
    x, parts, stacked, sizes = random(3, 64), kept(random(32, 64)), kept(random(2, 32, 64)), torch.tensor([1, 2])

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return nf4.product(x, *parts, "nf4", None), nf4.grouped(x, *stacked, sizes, "nf4")

    for found, wanted in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_processors_without_wide_registers(dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The plain loop of nf4.cpp, as others run it, gives the same bits."""
    parts = kept(random(33, 576))
    wanted = nf4.dequantize(*parts, "nf4", dtype)
    plain = tmp_path / "plain.cpp"
    plain.write_text(nf4.SOURCE.read_text().replace("defined(__x86_64__)", "0"))
    monkeypatch.setattr(nf4, "SOURCE", plain)
    nf4.compiled.cache_clear()
    lib = nf4.compiled()
    found = nf4.dequantize(*parts, "nf4", dtype)
    nf4.compiled.cache_clear()
    assert torch.equal(found, wanted) and (lib is None or isinstance(lib, ctypes.CDLL))


# Triton


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [FP32, torch.half, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (33, 576), (2, 7, 128), (300, 64)])
def test_one_launch(shape: tuple[int, ...], dtype, nested: bool, interpreted: ModuleType) -> None:
    packed, scales, outer = parts = kept(random(*shape), nested)
    tables = nf4.code_values("nf4", packed.device), nf4.dynamic_map(packed.device)
    found = interpreted.dequantize(packed, scales, outer, *tables, dtype).view(shape)
    wanted = nf4.dequantize(*parts, "nf4", dtype)
    if dtype == BF16:  # the interpreter cuts off where a GPU rounds
        assert ((found.view(torch.int16) - wanted.view(torch.int16)).abs() <= 1).all()
    else:
        assert torch.equal(found, wanted)


@needs_loops
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 64), (2, 5, 1088), (3, 9, 576), (5, 33, 320), (8, 300, 64)], ids=str)
def test_a_few_rows(sizes: tuple[int, int, int], dtype, nested: bool, interpreted: ModuleType) -> None:
    rows, out, inner = sizes
    parts, x, bias = kept(random(out, inner), nested), random(rows, inner, seed=1).to(dtype), random(out, seed=2)
    tables = nf4.code_values("nf4", x.device), nf4.dynamic_map(x.device)
    wanted = x.double() @ numbers(parts).T
    within = 3e-2 if dtype == BF16 else 1e-5  # the interpreter cuts off where a GPU rounds
    for b in (None, bias.to(dtype)):
        found = interpreted.few(x, tuple(parts), *tables, b)
        exact = wanted if b is None else wanted + b.double()
        assert found.dtype == dtype and error(found.double(), exact) < within


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("nested", [False, True])
def test_a_gpu_gives_the_same_bits_and_the_host_never_waits(nested: bool) -> None:
    parts = kept(random(300, 576), nested)
    on_gpu = [None if part is None else part.cuda() for part in parts]
    x = random(70, 576).to(BF16).cuda().requires_grad_()
    nf4.product(x, *on_gpu, "nf4", None)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    y = nf4.product(x, *on_gpu, "nf4", None)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.cuda.set_sync_debug_mode("default")
    for dtype in (BF16, FP32):
        assert torch.equal(nf4.dequantize(*on_gpu, "nf4", dtype).cpu(), nf4.dequantize(*parts, "nf4", dtype))
    weight = numbers(parts)
    for few in (x.detach()[:1], x.detach()[:8].view(2, 4, 576)):
        wanted = few.cpu().double() @ weight.T
        assert error(nf4.product(few, *on_gpu, "nf4").cpu().double(), wanted) < 1e-2
    assert error(y.detach().cpu().double(), x.detach().cpu().double() @ weight.T) < 1e-2
    assert error(grad.cpu().double(), weight.sum(0).expand(70, -1)) < 1e-2
