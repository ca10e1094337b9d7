"""4-bit weights: codes and scales equal bitsandbytes, and values and matmuls equal float64."""

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

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tests.helpers.triton_interpreter import interpret, requires_interpreter_loops
from tunekit.kernels import nf4, nf4_codes
from tunekit.kernels.quantized_cases import dequantize_definition

KERNEL = nf4
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ("nf4", "fp4")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def code_boundaries(kind: str) -> Tensor:
    """Boundaries between codes and the adjacent floats on both sides, in blocks whose scale is 1."""
    bounds = nf4.midpoints_and_codes(kind, torch.device("cpu"))[0]
    near = torch.stack([bounds, bounds.nextafter(torch.tensor(2.0)), bounds.nextafter(torch.tensor(-2.0))]).flatten()
    return torch.cat([near, torch.ones(64 - len(near))]).repeat(2, 1)


INPUTS: dict[str, Callable[[str], Tensor]] = {
    "random": lambda kind: random(128, 256),
    "bf16": lambda kind: random(64, 64).to(BF16),
    "half": lambda kind: random(64, 64).half(),
    "zero": lambda kind: torch.zeros(8, 64),
    "constant": lambda kind: torch.full((8, 64), -0.3),
    "huge": lambda kind: random(64, 64).clamp(-3, 3) * 1e38,
    "tiny": lambda kind: random(64, 64) * 1e-33,  # bitsandbytes flushes numbers below 1e-38 to zero in bf16
    "below normal": lambda kind: random(64, 64) * 1e-39,
    "one number": lambda kind: torch.zeros(64, 64).index_fill_(1, torch.tensor([5]), -2.0),
    "ties": code_boundaries,
    "rows that end in a block": lambda kind: random(6, 32),
    "partial block": lambda kind: random(3, 50),
    "odd count": lambda kind: random(5, 7),
    "tiny partial block": lambda kind: random(1, 10) * 1e-40,
    "not contiguous": lambda kind: random(64, 128).T,
    "experts": lambda kind: random(3, 8, 64),
}


def quantize(weight: Tensor, nested: bool = False, kind: str = "nf4") -> list[Tensor | None]:
    """Quantize a weight (..., in) as a layer stores it: codes, scales as bytes, and the outer scales."""
    packed, scales = nf4.quantize(weight, kind)
    outer_scales = None
    if nested:
        scales, outer_scales = nf4.double_quantize(scales)
    tensors = [tensor.view(*weight.shape[:-1], -1) for tensor in (packed, scales.view(torch.uint8))]
    return [*tensors, None if outer_scales is None else outer_scales.view(torch.uint8)]


# bitsandbytes


@pytest.fixture(scope="module")
def bnb() -> ModuleType:
    return pytest.importorskip("bitsandbytes.functional")


@pairwise(indirect=["backend"], backend=("fast", "reference"), make_weight=INPUTS, kind=KINDS)
def test_codes_and_scales_equal_bitsandbytes(make_weight, kind: str, backend: str, bnb: ModuleType) -> None:
    weight = make_weight(kind)
    expected, state = bnb.quantize_4bit(weight, quant_type=kind, blocksize=64)
    packed, scales = nf4.quantize(weight, kind)
    assert torch.equal(packed, expected.flatten()) and torch.equal(scales, state.absmax)


@pairwise(
    indirect=["backend"],
    backend=("fast", "reference"),
    name=["random", "zero", "constant", "huge", "tiny", "one number", "ties", "experts"],
    dtype=[BF16, FP32],
    kind=KINDS,
)
def test_values_equal_bitsandbytes(name: str, dtype, kind: str, backend: str, bnb: ModuleType) -> None:
    weight = INPUTS[name](kind)
    packed, state = bnb.quantize_4bit(weight, quant_type=kind, blocksize=64)
    state.dtype = dtype
    actual = nf4.dequantize(*quantize(weight, kind=kind), kind, dtype)
    assert torch.equal(actual, bnb.dequantize_4bit(packed, state))


def load_generic_kernels(bnb: ModuleType) -> dict[str, Callable]:
    """Load the generic kernels of bitsandbytes, which devices without kernels of their own use.

    Its CPU kernel finds the nearest of 256 numbers in a table of 65,536 entries, which is wrong for one value in 700.
    """
    kernels: dict[str, Callable] = {}
    ops = sys.modules["bitsandbytes._ops"]
    file = Path(bnb.__file__).parent / "backends" / "default" / "ops.py"
    spec = importlib.util.spec_from_file_location("bitsandbytes.backends.default.again", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "register_kernel", lambda name, kind: lambda f: kernels.setdefault(name, f))
        spec.loader.exec_module(module)
    return kernels


@pytest.mark.parametrize("make_weight", [*INPUTS.values(), lambda kind: random(300, 64)], ids=[*INPUTS, "full groups"])
def test_nested_scales_equal_bitsandbytes(make_weight, bnb: ModuleType) -> None:
    quantize_blockwise = load_generic_kernels(bnb)["bitsandbytes::quantize_blockwise"]
    table = bnb.create_dynamic_map()
    assert torch.equal(nf4.dynamic_map(table.device), table)
    scales = nf4.quantize(make_weight("nf4"))[1]
    expected, largest = quantize_blockwise(scales - scales.mean(), table, 256)
    codes, outer_scales = nf4.double_quantize(scales)
    assert torch.equal(codes, expected) and torch.equal(outer_scales, torch.cat([largest, scales.mean()[None]]))
    state = bnb.QuantState(absmax=largest, code=table, blocksize=256, dtype=FP32)
    assert torch.equal(nf4.decode_scales(codes, outer_scales), bnb.dequantize_blockwise(codes, state) + scales.mean())


# float64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["random", "zero", "huge", "ties"])
def test_codes_are_the_nearest(name: str, kind: str, backend: str) -> None:
    weight = INPUTS[name](kind)
    scales = weight.double().view(-1, 64).abs().amax(1, keepdim=True).clamp(min=1e-30)
    exact_ratios = (weight.double().view(-1, 64) / scales)[..., None]
    nearest = (exact_ratios - torch.tensor(nf4_codes.TABLES[kind]).double()).abs().amin(-1)
    ratios = dequantize_definition(quantize(weight, kind=kind), kind).view(-1, 64) / scales
    assert ((ratios - exact_ratios[..., 0]).abs() - nearest).max() < 1e-6


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 128), (33, 576), (2, 5, 192), (300, 64)])
def test_dequantized_values(shape: tuple[int, ...], nested: bool, backend: str) -> None:
    tensors = quantize(random(*shape) / 50, nested)
    expected = dequantize_definition(tensors)
    assert relative_error(nf4.dequantize(*tensors).double(), expected) < 2e-7
    assert torch.equal(nf4.dequantize(*tensors, "nf4", BF16), nf4.dequantize(*tensors).to(BF16))
    assert torch.equal(nf4.dequantize(*tensors, "nf4", torch.half), nf4.dequantize(*tensors).half())
    assert relative_error(expected, random(*shape).double() / 50) < 0.2


def test_non_finite_scales_propagate(backend: str) -> None:
    tensors = quantize(random(1, 64))
    tensors[1] = torch.tensor([[float("nan")]]).view(torch.uint8)
    assert all(nf4.dequantize(*tensors, "nf4", dtype).isnan().all() for dtype in (BF16, FP32))


TOLERANCES = {BF16: 1e-2, FP32: 1e-5}


@pairwise(
    indirect=["backend"],
    backend=("fast", "reference"),
    dtype=[BF16, FP32],
    nested=[False, True],
    rows=[[3, 1, 5], [0, 4, 0], [0, 0, 0]],
)
def test_products_of_experts(dtype, nested: bool, rows: list[int], backend: str) -> None:
    tolerance = TOLERANCES[dtype]
    tensors, sizes = quantize(random(3, 96, 128), nested), torch.tensor(rows)
    x, grad = random(sum(rows), 128, seed=1).to(dtype).requires_grad_(), random(sum(rows), 96, seed=2).to(dtype)
    y = nf4.grouped_matmul(x, *tensors, sizes, "nf4")
    y.backward(grad)
    weight = dequantize_definition(tensors)[torch.arange(3).repeat_interleave(sizes)]
    assert y.shape == grad.shape and x.grad.shape == x.shape and y.dtype == x.grad.dtype == dtype
    if sum(rows):
        assert relative_error(y.detach().double(), torch.einsum("ni,noi->no", x.detach().double(), weight)) < tolerance
        assert relative_error(x.grad.double(), torch.einsum("no,noi->ni", grad.double(), weight)) < tolerance


def test_backward_saves_only_codes() -> None:
    x, tensors, saved = random(3, 64).requires_grad_(), quantize(random(32, 64)), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        nf4.matmul(x, *tensors, "nf4", None)
    assert {t.dtype for t in saved} == {torch.uint8}


def test_operators_are_registered_consistently() -> None:
    for nested in (False, True):
        x, tensors = random(3, 64).requires_grad_(), quantize(random(32, 64), nested)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(nf4.forward, (x, *tensors, "nf4", None), test_utils=checks)
        torch.library.opcheck(nf4.forward, (x, *tensors, "nf4", torch.ones(32)), test_utils=checks)
        stacked = quantize(random(2, 32, 64), nested)
        torch.library.opcheck(nf4.forward, (x, *stacked, "nf4", None, torch.tensor([1, 2])), test_utils=checks)


def test_compiled_without_graph_break() -> None:
    x, tensors = random(3, 64).requires_grad_(), quantize(random(32, 64))
    run = torch.compile(lambda x: nf4.matmul(x * 2, *tensors, "nf4", None).sum(), fullgraph=True, backend="aot_eager")
    run(x).backward()
    expected = 2 * dequantize_definition(tensors).sum(0).expand(3, -1)
    assert relative_error(x.grad.double(), expected) < 1e-5


def test_compiled_for_inputs_without_gradients() -> None:
    """The first layer of an adapted model has such inputs."""
    x, tensors, stacked, sizes = (
        random(3, 64),
        quantize(random(32, 64)),
        quantize(random(2, 32, 64)),
        torch.tensor([1, 2]),
    )

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return nf4.matmul(x, *tensors, "nf4", None), nf4.grouped_matmul(x, *stacked, sizes, "nf4")

    for actual, expected in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_scalar_loop_gives_the_same_bits(dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The scalar loop of nf4.cpp gives the same bits."""
    tensors = quantize(random(33, 576))
    expected = nf4.dequantize(*tensors, "nf4", dtype)
    source = tmp_path / "plain.cpp"
    source.write_text(nf4.SOURCE.read_text().replace("defined(__x86_64__)", "0"))
    monkeypatch.setattr(nf4, "SOURCE", source)
    nf4.compiled.cache_clear()
    lib = nf4.compiled()
    actual = nf4.dequantize(*tensors, "nf4", dtype)
    nf4.compiled.cache_clear()
    assert torch.equal(actual, expected) and (lib is None or isinstance(lib, ctypes.CDLL))


# Triton


def test_input_without_rows(backend: str) -> None:
    packed, scales = quantized_matrix()
    for gradient in (False, True):
        with torch.set_grad_enabled(gradient):
            assert nf4.matmul(torch.zeros(0, 64), packed, scales, None, "nf4").shape == (0, 3)


def test_repeated_values_without_memory(backend: str) -> None:
    weight = torch.ones(1).expand(640)
    assert all(torch.equal(*pair) for pair in zip(nf4.quantize(weight), nf4.quantize(torch.ones(640)), strict=True))


@pytest.mark.parametrize("name", ["packed", "scales"])
def test_scales_that_do_not_fit_are_rejected(name: str, interpreted: ModuleType) -> None:
    tensors = dict(zip(("packed", "scales"), quantized_matrix(), strict=True))
    tensors[name] = tensors[name][:2]
    tables = nf4.code_values("nf4", torch.device("cpu")), nf4.dynamic_map(torch.device("cpu"))
    with pytest.raises(ValueError, match="nf4: scales"):
        nf4.NF4Weight(*tensors.values(), None, "nf4").check()
    with pytest.raises(ValueError, match="nf4: scales"):
        interpreted.dequantize(*tensors.values(), None, *tables, torch.float32)


def quantized_matrix() -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix (3, 64)."""
    packed, scales = nf4.quantize(torch.randn(3, 64))
    return packed.view(3, 32), scales.view(torch.uint8).view(3, 4)


@pairwise(shape=[(1, 64), (33, 576), (2, 7, 128), (300, 64)], dtype=[FP32, torch.half, BF16], nested=[False, True])
def test_interpreted_dequantize(shape: tuple[int, ...], dtype, nested: bool, interpreted: ModuleType) -> None:
    packed, scales, outer_scales = tensors = quantize(random(*shape), nested)
    tables = nf4.code_values("nf4", packed.device), nf4.dynamic_map(packed.device)
    actual = interpreted.dequantize(packed, scales, outer_scales, *tables, dtype).view(shape)
    expected = nf4.dequantize(*tensors, "nf4", dtype)
    if dtype == BF16:  # the interpreter truncates where a GPU rounds
        assert ((actual.view(torch.int16) - expected.view(torch.int16)).abs() <= 1).all()
    else:
        assert torch.equal(actual, expected)


@pytest.fixture
def interpreted_matmul(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels for few rows, run by Triton's interpreter."""
    return interpret("tunekit.kernels.nf4_matmul_triton", monkeypatch)


@requires_interpreter_loops
@pairwise(
    sizes=[(1, 1, 64), (2, 5, 1088), (3, 9, 576), (5, 33, 320), (8, 300, 64)],
    kind=["nf4", "fp4"],
    nested=[False, True],
)
def test_interpreted_product_of_few_rows(
    sizes: tuple[int, int, int], kind: str, nested: bool, interpreted_matmul: ModuleType
) -> None:
    rows, out, inner = sizes
    # fp16: the interpreter multiplies the bits of bf16 matrices.
    x, bias = random(rows, inner, seed=1).half(), random(out, seed=2).half()
    packed, scales, outer_scales = quantize(random(out, inner), nested, kind)
    tables = nf4.code_values(kind, x.device), nf4.dynamic_map(x.device)
    weight = nf4.dequantize(packed, scales, outer_scales, kind, torch.float32)
    for b in (None, bias):
        actual = interpreted_matmul.matmul_fused(x, (packed, scales, outer_scales), kind, *tables, b)
        assert actual.dtype == torch.half
        assert product_error(actual, x, weight, b) < 1e-3


def product_error(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Largest error of a product, relative to the sum of the magnitudes of its terms."""
    exact, magnitudes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitudes = exact + bias.double(), magnitudes + bias.double().abs()
    return ((actual.double() - exact).abs() / magnitudes).max().item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_product_of_few_rows_on_a_gpu(kind: str, nested: bool) -> None:
    sizes = (1, 1, 64), (1, 300, 576), (2, 33, 14336), (3, 33, 320), (8, 300, 1088), (16, 70, 4096)
    for dtype, tolerance in ((BF16, 8e-3), (torch.half, 1e-3), (FP32, 1e-6)):
        for rows, out, inner in sizes:
            weight = *quantize(random(out, inner).cuda(), nested, kind), kind
            x, bias = random(rows, inner, seed=1).cuda().to(dtype), random(out, seed=2).cuda().to(dtype)
            exact = nf4.dequantize(*weight, FP32)
            for b in (None, bias):
                error = product_error(nf4.matmul(x, *weight, b), x, exact, b)
                assert error < tolerance, (dtype, rows, out, inner, error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("nested", [False, True])
def test_gpu_gives_the_same_bits_without_synchronization(nested: bool) -> None:
    tensors = quantize(random(300, 576), nested)
    on_gpu = [None if tensor is None else tensor.cuda() for tensor in tensors]
    x = random(70, 576).to(BF16).cuda().requires_grad_()
    nf4.matmul(x, *on_gpu, "nf4", None)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    y = nf4.matmul(x, *on_gpu, "nf4", None)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.cuda.set_sync_debug_mode("default")
    for dtype in (BF16, FP32):
        assert torch.equal(nf4.dequantize(*on_gpu, "nf4", dtype).cpu(), nf4.dequantize(*tensors, "nf4", dtype))
    weight = dequantize_definition(tensors)
    for few_rows in (x.detach()[:1], x.detach()[:8].view(2, 4, 576)):
        expected = few_rows.cpu().double() @ weight.T
        assert relative_error(nf4.matmul(few_rows, *on_gpu, "nf4").cpu().double(), expected) < 1e-2
    assert relative_error(y.detach().cpu().double(), x.detach().cpu().double() @ weight.T) < 1e-2
    assert relative_error(grad.cpu().double(), weight.sum(0).expand(70, -1)) < 1e-2


def test_scratch_memory_of_generation_serves_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4, "SCRATCH", nf4.ScratchBuffer())
    with torch.inference_mode():
        nf4.SCRATCH.take(2, 3, torch.float32)
    nf4.SCRATCH.take(2, 3, torch.float32).copy_(torch.ones(2, 3))
