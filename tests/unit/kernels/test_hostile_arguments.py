"""C++ kernels reject arguments that do not fit each other, and equal their torch references for all others.

A case is a valid call. Hypothesis changes one or two of its tensors: another shape, layout, dtype, or extreme values.
scripts/sanitize_kernels.py runs this file with sanitizers, which report each access outside of a tensor.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tunekit.kernels import adamw8bit, attention_cpu, cross_entropy, gemv, glu, kl_divergence, nf4, rms_norm, rope
from tunekit.kernels.adamw8bit import AdamWHyperparams, Moments
from tunekit.kernels.attention import AttentionParams, attention_per_document
from tunekit.kernels.kl_divergence import KLMixture, KLTerms
from tunekit.kernels.rope import RopeTables

BF16, FP32 = torch.bfloat16, torch.float32
ONE_CODE = {"atol": 1, "rtol": 0}
NUM_EXAMPLES = int(os.environ.get("TUNEKIT_FUZZ_EXAMPLES", "15"))
# KeyError: dtypes are looked up in the table of compiled functions. ZeroDivisionError: a weight without values.
REJECTIONS = ValueError, LookupError, RuntimeError, TypeError, AssertionError, ZeroDivisionError

Tensors = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """Calls of a kernel and of its reference with the same tensors. Both get copies, which they may write to."""

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    tensors: Tensors
    tolerance: float = 0.0
    contiguous: tuple[str, ...] = ()  # tensors that must be contiguous

    @property
    def names(self) -> list[str]:
        return [name for name, x in self.tensors.items() if x is not None]


def floats(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape).to(dtype)


dtypes, sizes = st.sampled_from([FP32, BF16]), st.integers(1, 5)
flags = st.booleans()


@st.composite
def rope_case(draw: st.DrawFn) -> Case:
    dtype, batch, length, pairs, rest = draw(dtypes), draw(sizes), draw(sizes), draw(sizes), draw(st.integers(0, 9))
    options = interleaved, interleaved_output, rotate_last = draw(flags), False, draw(flags)
    angles = floats(batch, length, 1, pairs)
    q, k = (floats(batch, length, draw(sizes), 2 * pairs + rest, dtype=dtype) for _ in range(2))

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tables = RopeTables(cos, sin, interleaved, interleaved_output, rotate_last)
        return rope.reference(q, tables), rope.reference(k, tables)

    return Case(
        lambda q, k, cos, sin: rope.rotate_forward(q, k, cos, sin, *options, False),
        reference,
        {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()},
    )


@st.composite
def norm_case(draw: st.DrawFn) -> Case:
    shape, scale_in_fp32 = (draw(sizes), draw(sizes), draw(st.integers(1, 70))), draw(flags)
    x, weight = floats(*shape, dtype=draw(dtypes)), floats(shape[-1], dtype=draw(dtypes)) if draw(flags) else None
    return Case(
        lambda x, weight: rms_norm.forward(x, weight, 1e-6, 0.0, scale_in_fp32)[0],
        lambda x, weight: rms_norm.reference(x, weight, 1e-6, 0.0, scale_in_fp32),
        {"x": x, "weight": weight},
        0.02,
    )


@st.composite
def norm_gradient_case(draw: st.DrawFn) -> Case:
    rows, dim, scale_in_fp32 = draw(st.integers(1, 70)), draw(st.integers(1, 70)), draw(flags)
    x, grad, weight = floats(rows, dim), floats(rows, dim), floats(dim)
    rstd = (x.square().mean(-1) + 1e-6).rsqrt()

    def reference(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        torch.testing.assert_close(rstd, (x.square().mean(-1) + 1e-6).rsqrt())
        inputs = x.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(rms_norm.reference(*inputs, 1e-6, 0.0, scale_in_fp32), inputs, grad)

    return Case(
        lambda grad, x, weight, rstd: rms_norm.compute_gradients(grad, x, weight, rstd, 0.0, scale_in_fp32, True),
        with_gradients(reference),
        {"grad": grad, "x": x, "weight": weight, "rstd": rstd},
        0.02,
        ("rstd",),
    )


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.enable_grad()(function)


@st.composite
def glu_case(draw: st.DrawFn) -> Case:
    act = draw(st.sampled_from(sorted(glu.FUSED_ACTIVATIONS)))
    shape, dtype = (draw(sizes), draw(sizes), draw(st.integers(1, 40))), draw(dtypes)
    tensors = {name: floats(*shape, dtype=dtype) for name in ("gate", "up")}
    return Case(lambda gate, up: glu.forward(gate, up, act), glu.ACTIVATIONS[act], tensors, 0.02)


@st.composite
def glu_gradient_case(draw: st.DrawFn) -> Case:
    act = draw(st.sampled_from(sorted(glu.FUSED_ACTIVATIONS)))
    shape = draw(sizes), draw(sizes), draw(st.integers(1, 40))

    def reference(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        inputs = gate.requires_grad_(), up.requires_grad_()
        return torch.autograd.grad(glu.ACTIVATIONS[act](*inputs), inputs, grad)

    tensors = {name: floats(*shape) for name in ("grad", "gate", "up")}
    return Case(lambda **x: glu.compute_gradients(**x, act=act), with_gradients(reference), tensors, 1e-3)


@st.composite
def gemv_case(draw: st.DrawFn) -> Case:
    out, width = draw(sizes), draw(st.integers(1, 70))
    tensors = {"x": floats(draw(st.integers(1, 9)), width), "weight": floats(out, width)}
    tensors["bias"] = floats(out) if draw(flags) else None
    tensors = {name: None if x is None else x.bfloat16() for name, x in tensors.items()}
    return Case(gemv.gemv, F.linear, tensors, 0.03)


@st.composite
def adamw_case(draw: st.DrawFn) -> Case:
    rows, row, dtype = draw(sizes), draw(st.sampled_from([1, 7, 255, 256, 257, 600])), draw(dtypes)
    count, step = rows * row, draw(st.integers(1, 2**40))
    hyperparams = AdamWHyperparams(0.01, 0.1, (0.9, 0.999), 1e-8, step)
    codes = {name: torch.randint(256, (count,), dtype=torch.uint8) for name in ("first", "second")}
    tensors = {"weight": floats(count, dtype=dtype), "grad": floats(count, dtype=dtype), **codes}

    def call(step_fn: Callable[..., None]) -> Callable[..., Any]:
        def run(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
            step_fn(weight, grad, Moments(first, second, scales, row), hyperparams)
            return weight, first, second, scales

        return run

    tensors["scales"] = torch.rand(2, rows * -(-row // adamw8bit.BLOCK))
    return Case(call(adamw8bit.adamw8bit_step), call(adamw8bit.step_reference), tensors, 1e-5, tuple(tensors))


QUANTIZED = "packed", "scales", "outer_scales"


def quantized(out: int, width: int, is_double: bool) -> Tensors:
    """Bytes of a quantized weight (out, width)."""
    packed, scales = nf4.quantize(floats(out, width))
    outer_scales = None
    if is_double:
        scales, outer_scales = nf4.double_quantize(scales)
        outer_scales = outer_scales.view(torch.uint8)
    scales = scales.view(torch.uint8).view(out, -1)
    return {"packed": packed.view(out, -1), "scales": scales, "outer_scales": outer_scales}


@st.composite
def nf4_case(draw: st.DrawFn) -> Case:
    out, width, dtype = draw(sizes), 64 * draw(sizes), draw(dtypes)

    def reference(packed: Tensor, scales: Tensor, outer_scales: Tensor | None) -> Tensor:
        assert packed.shape[:-1] == scales.shape[:-1]
        unpacked = nf4.unpack_scales(scales.contiguous(), outer_scales)
        return nf4.dequantize_reference(packed.contiguous(), unpacked, "nf4").to(dtype)

    weight = quantized(out, width, draw(flags))
    return Case(lambda **x: nf4.dequantize(**x, dtype=dtype), reference, weight, 0.0, QUANTIZED)


@st.composite
def nf4_matmul_case(draw: st.DrawFn) -> Case:
    out, width, dtype, rows = draw(sizes), 64 * draw(sizes), draw(dtypes), draw(st.sampled_from([1, 3, 8, 9]))

    def kernel(x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, bias: Tensor | None) -> Tensor:
        return nf4.matmul(x, packed, scales, outer_scales, "nf4", bias)

    def reference(
        x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return F.linear(x, nf4.dequantize(packed, scales, outer_scales, "nf4", x.dtype), bias)

    weight, bias = quantized(out, width, draw(flags)), floats(out, dtype=dtype) if draw(flags) else None
    tensors = {"x": floats(rows, width, dtype=dtype), **weight, "bias": bias}
    return Case(kernel, reference, tensors, 0.03, (*QUANTIZED, "bias"))


@st.composite
def nf4_gradient_case(draw: st.DrawFn) -> Case:
    out, width, dtype = draw(sizes), 64 * draw(sizes), draw(dtypes)

    def reference(grad: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None) -> Tensor:
        return grad @ nf4.dequantize(packed, scales, outer_scales, "nf4", grad.dtype)

    weight = quantized(out, width, draw(flags))
    tensors = {"grad": floats(draw(sizes), out, dtype=dtype), **weight}
    return Case(lambda **x: nf4.matmul_backward(**x, kind="nf4"), reference, tensors, 0.03, QUANTIZED)


@st.composite
def nf4_grouped_case(draw: st.DrawFn) -> Case:
    out, width, counts = draw(sizes), 64 * draw(sizes), draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    experts, weight = len(counts), quantized(len(counts) * out, width, draw(flags))
    weight |= {name: weight[name].view(experts, out, -1) for name in ("packed", "scales")}

    def kernel(x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, sizes: Tensor) -> Tensor:
        return nf4.grouped_matmul(x, packed, scales, outer_scales, sizes, "nf4")

    def reference(x: Tensor, packed: Tensor, scales: Tensor, outer_scales: Tensor | None, sizes: Tensor) -> Tensor:
        matrices = nf4.dequantize(packed, scales, outer_scales, "nf4", x.dtype)
        rows = x.split(sizes.tolist())
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(rows, matrices, strict=True)])

    tensors = {"x": floats(sum(counts), width), **weight, "sizes": torch.tensor(counts)}
    return Case(kernel, reference, tensors, 0.03, QUANTIZED)


@st.composite
def quantize_case(draw: st.DrawFn) -> Case:
    shape = draw(sizes), draw(st.sampled_from([1, 63, 64, 65, 128]))
    return Case(
        nf4.quantize,
        lambda weight: nf4.quantize_reference(weight.reshape(-1).float().contiguous(), "nf4"),
        {"weight": floats(*shape, dtype=draw(dtypes))},
    )


@st.composite
def loss_case(draw: st.DrawFn) -> Case:
    rows, vocab, gradient = draw(sizes), draw(st.sampled_from([1, 15, 16, 17, 40])), draw(flags)
    terms = [0.7, draw(st.sampled_from([0.0, 5.0])), draw(st.sampled_from([0.0, 0.1])), 0.01]
    tensors: Tensors = {"logits": floats(rows, vocab, dtype=draw(dtypes)), "targets": torch.randint(-1, vocab, (rows,))}

    def call(losses: Callable[..., Tensor]) -> Callable[..., Any]:
        def run(logits: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
            return losses(logits, targets, weights, terms, gradient), logits

        return run

    tensors["weights"] = torch.rand(rows) if draw(flags) else None
    return Case(call(cross_entropy.compute_token_losses), call(cross_entropy.token_losses_reference), tensors, 0.02)


@st.composite
def entropy_case(draw: st.DrawFn) -> Case:
    logits = floats(draw(sizes), draw(st.sampled_from([1, 15, 16, 17, 40])), dtype=draw(dtypes))
    return Case(
        lambda logits: cross_entropy.token_entropies(logits, 0.7, 5.0),
        lambda logits: cross_entropy.token_entropies_reference(logits, [0.7, 5.0]),
        {"logits": logits},
        1e-3,
    )


mixtures = st.sampled_from([KLMixture(), KLMixture(0.5, 0.1, 0.5, 0.2, 2.0), KLMixture(0.0, 0.0, 1.0, 0.0)])


@st.composite
def divergence_case(draw: st.DrawFn) -> Case:
    rows, vocab, extra, gradient = draw(sizes), draw(st.sampled_from([1, 15, 16, 17])), draw(sizes), draw(flags)
    terms = KLTerms(draw(mixtures), (0.7, None), (1.0, 5.0), vocab, None)
    student, teacher = floats(rows, vocab + extra, dtype=draw(dtypes)), floats(rows, vocab, dtype=draw(dtypes))

    def call(divergences: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda student, teacher: (divergences(student, teacher, terms, gradient), student)

    kernel, reference = kl_divergence.divergences_cpu, kl_divergence.divergences_reference
    return Case(call(kernel), call(reference), {"student": student, "teacher": teacher}, 0.02)


@st.composite
def top_k_case(draw: st.DrawFn) -> Case:
    rows, vocab, gradient = draw(sizes), draw(st.sampled_from([6, 16, 17, 40])), draw(flags)
    terms, num_ids = KLTerms(draw(mixtures), (0.7, None), (1.0, None), vocab, None), draw(sizes)
    ids = torch.rand(rows, vocab).topk(num_ids).indices
    log_probs = floats(rows, num_ids + 1).log_softmax(-1)

    def call(divergences: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda logits, ids, log_probs: (divergences(logits, ids, log_probs, terms, gradient), logits)

    kernel, reference = kl_divergence.top_k_divergences_cpu, kl_divergence.top_k_divergences_reference
    logits = floats(rows, vocab + draw(sizes), dtype=draw(dtypes))
    return Case(call(kernel), call(reference), {"logits": logits, "ids": ids, "log_probs": log_probs}, 0.02)


@st.composite
def top_k_targets_case(draw: st.DrawFn) -> Case:
    rows, vocab, num_ids = draw(sizes), draw(st.sampled_from([6, 16, 17, 40])), draw(sizes)
    raw, ids = floats(rows, vocab, dtype=draw(dtypes)), torch.rand(rows, vocab).topk(num_ids).indices
    kernel, reference = kl_divergence.top_k_log_probs_cpu, kl_divergence.top_k_log_probs_reference
    return Case(
        lambda raw, ids: kernel(raw, ids, (0.7, None), 2.0),
        lambda raw, ids: reference(raw, ids, (0.7, None), 2.0),
        {"raw": raw, "ids": ids},
        0.02,
    )


def cu_seqlens(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@st.composite
def attention_case(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    key_lengths = [length + draw(st.integers(0, 20)) for length in lengths]
    kv_heads, dim, v_dim, dtype = draw(st.integers(1, 2)), draw(st.sampled_from([1, 8, 17])), 16, draw(dtypes)
    heads, window, chunk = kv_heads * draw(st.integers(1, 2)), draw(st.sampled_from([None, 1, 7])), None
    params = AttentionParams(0.3, window, chunk, draw(st.sampled_from([None, 5.0])))

    def kernel(sinks: Tensor | None = None, **x: Tensor) -> Tensor:
        return attention_cpu.forward(x["q"], x["k"], x["v"], x["bounds"], x["key_bounds"], sinks, params.to_list())[0]

    def reference(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor) -> Tensor:
        return attention_per_document(q, k, v, params, bounds, None, key_bounds)

    total, keys = sum(lengths), sum(key_lengths)
    q, k = floats(1, total, heads, dim, dtype=dtype), floats(1, keys, kv_heads, dim, dtype=dtype)
    tensors = {"q": q, "k": k, "v": floats(1, keys, kv_heads, v_dim, dtype=dtype)}
    tensors |= {"bounds": cu_seqlens(lengths), "key_bounds": cu_seqlens(key_lengths)}
    return Case(kernel, reference, tensors, 0.03)


@st.composite
def attention_gradient_case(draw: st.DrawFn) -> Case:
    case = draw(attention_case().filter(lambda case: case.tensors["q"].dtype == FP32))
    output = case.reference(**case.tensors)

    def with_grad(function: Callable[..., Tensor]) -> Callable[..., Any]:
        def run(grad: Tensor, **x: Tensor) -> tuple[Tensor, ...]:
            inputs = [x[name].requires_grad_() for name in ("q", "k", "v")]
            return torch.autograd.grad(function(**x), inputs, grad)

        return with_gradients(run)

    def operator(**x: Tensor) -> Tensor:
        params = case.kernel.__closure__[0].cell_contents.to_list()
        return attention_cpu.attention(x["q"], x["k"], x["v"], x["bounds"], x["key_bounds"], None, params)[0]

    tensors = {"grad": torch.randn(output.shape), **case.tensors}
    return replace(case, kernel=with_grad(operator), reference=with_grad(case.reference), tensors=tensors)


CASES: dict[str, tuple[ModuleType, st.SearchStrategy[Case]]] = {
    "rope": (rope, rope_case()),
    "rms_norm": (rms_norm, norm_case()),
    "rms_norm_gradient": (rms_norm, norm_gradient_case()),
    "glu": (glu, glu_case()),
    "glu_gradient": (glu, glu_gradient_case()),
    "gemv": (gemv, gemv_case()),
    "adamw8bit": (adamw8bit, adamw_case()),
    "nf4": (nf4, nf4_case()),
    "nf4_matmul": (nf4, nf4_matmul_case()),
    "nf4_gradient": (nf4, nf4_gradient_case()),
    "nf4_grouped": (nf4, nf4_grouped_case()),
    "nf4_quantize": (nf4, quantize_case()),
    "cross_entropy": (cross_entropy, loss_case()),
    "entropy": (cross_entropy, entropy_case()),
    "divergence": (kl_divergence, divergence_case()),
    "top_k": (kl_divergence, top_k_case()),
    "top_k_targets": (kl_divergence, top_k_targets_case()),
    "attention": (attention_cpu, attention_case()),
    "attention_gradient": (attention_cpu, attention_gradient_case()),
}

OTHER_DTYPES = {
    FP32: [BF16, torch.float64, torch.float16], BF16: [FP32, torch.float16], torch.uint8: [torch.int8, torch.int32],
    torch.int32: [torch.int64, torch.int16], torch.int64: [torch.int32, torch.uint8],
}  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "strided": lambda x, dim: torch.stack((x, x), dim + 1).select(dim + 1, 0),
    "transposed": lambda x, dim: x.transpose(0, dim).contiguous().transpose(0, dim),
    "expanded": lambda x, dim: x.narrow(dim, 0, min(1, x.shape[dim])).expand_as(x),
    "offset": lambda x, dim: torch.cat([x.flatten()[:1], x.flatten()])[min(1, x.numel()) :].view(x.shape),
}
SHAPES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "shorter": lambda x, dim: x.narrow(dim, 0, max(0, x.shape[dim] - 1)),
    "longer": lambda x, dim: torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim),
    "single": lambda x, dim: x.narrow(dim, 0, min(1, x.shape[dim])),
    "doubled": lambda x, dim: torch.cat([x, x], dim),
    "empty": lambda x, dim: x.narrow(dim, 0, 0),
    "unsqueezed": lambda x, dim: x.unsqueeze(dim),
    "flattened": lambda x, dim: x.flatten(),
}


@st.composite
def with_layouts(draw: st.DrawFn, case: Case) -> Case:
    """The case with the same values in another layout."""
    tensors = dict(case.tensors)
    for name in case.names:
        if name not in case.contiguous and draw(flags):
            tensors[name] = LAYOUTS[draw(st.sampled_from(["strided", "transposed", "offset"]))](tensors[name], 0)
    return replace(case, tensors=tensors)


@st.composite
def changed_tensor(draw: st.DrawFn, x: Tensor) -> Tensor:
    """A tensor with another shape, layout, dtype or value."""
    kind = draw(st.sampled_from(["shape", "shape", "layout", "dtype", "values"]))
    dim = draw(st.integers(0, x.dim() - 1))
    if kind == "shape":
        return SHAPES[draw(st.sampled_from(sorted(SHAPES)))](x, dim)
    if kind == "layout":
        return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x, dim)
    if kind == "dtype":
        return x.to(draw(st.sampled_from(OTHER_DTYPES[x.dtype])))
    extremes = [float("nan"), float("inf"), -float("inf"), 3e38, -1e-40]
    if x.dtype == torch.uint8:
        extremes = [0, 255]
    elif not x.is_floating_point():
        extremes = [-(2**31), -1, 0, 1, 100, 2**31 - 1] + ([2**62, -(2**62)] if x.dtype == torch.int64 else [])
    x = x.clone()
    if x.numel():
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from(extremes))
    return x


@st.composite
def hostile(draw: st.DrawFn, case: Case) -> Case:
    tensors = dict(case.tensors)
    for name in draw(st.lists(st.sampled_from(case.names), min_size=1, max_size=2, unique=True)):
        tensors[name] = draw(changed_tensor(tensors[name]))
    return replace(case, tensors=tensors)


def run(function: Callable[..., Any], tensors: Tensors) -> list[Tensor]:
    """Results of a call with copies of the tensors."""
    copies = {name: None if x is None else copy_storage(x) for name, x in tensors.items()}
    outputs = function(**copies)
    return [y.clone() for y in ([outputs] if isinstance(outputs, Tensor) else outputs)]


def copy_storage(x: Tensor) -> Tensor:
    """Copy with the same layout, in a storage that ends with the tensor: sanitizers detect accesses beyond it."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    first = x.storage_offset()
    storage = torch.as_strided(x, (first + length,), (1,), 0).clone()
    return storage.as_strided(x.shape, x.stride(), first)


def has_defined_result(tensors: Tensors) -> bool:
    """Whether no tensor is empty, all floats are finite, and ids do not occur twice in a row."""
    ids = tensors.get("ids")
    if ids is not None and any(len(set(row)) < len(row) for row in ids.tolist()):
        return False
    given_tensors = [x for x in tensors.values() if x is not None]
    return all(x.numel() and not (x.is_floating_point() and not (x.abs() < 1e30).all()) for x in given_tensors)


def assert_equals_reference(case: Case) -> None:
    actual = run(case.kernel, case.tensors)
    try:
        expected = run(case.reference, case.tensors)
    except REJECTIONS:
        return
    assert [y.shape for y in actual] == [y.shape for y in expected]
    if not has_defined_result(case.tensors):
        return
    for y, target in zip(actual, expected, strict=True):
        if case.tolerance:  # a code of 8 bits may be rounded to its neighbor
            tolerances = {"atol": case.tolerance, "rtol": case.tolerance} if y.dtype != torch.uint8 else ONE_CODE
            torch.testing.assert_close(y.float(), target.float(), **tolerances)
        else:
            assert torch.equal(y.nan_to_num(), target.to(y.dtype).nan_to_num())


@pytest.fixture(params=CASES)
def cases(request: pytest.FixtureRequest) -> st.SearchStrategy[Case]:
    """Valid calls of each kernel that is available."""
    module, cases = CASES[request.param]
    if module.compiled() is None:
        pytest.skip("no compiler, or a processor without AVX-512")
    return cases


def test_valid_arguments_equal_reference(cases: st.SearchStrategy[Case]) -> None:
    @settings(max_examples=NUM_EXAMPLES)
    @given(cases.flatmap(with_layouts))
    def check(case: Case) -> None:
        with torch.no_grad():
            assert_equals_reference(case)

    check()


def test_hostile_arguments_are_rejected_or_equal_reference(cases: st.SearchStrategy[Case]) -> None:
    @settings(max_examples=2 * NUM_EXAMPLES)
    @given(cases.flatmap(hostile))
    def check(case: Case) -> None:
        with torch.no_grad():
            try:
                run(case.kernel, case.tensors)
            except REJECTIONS:
                return
            assert_equals_reference(case)

    check()
