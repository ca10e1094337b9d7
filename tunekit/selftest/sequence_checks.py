"""Kernels that mix tokens: attention, the gated delta rule, and the products of experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import attention_cpu, attention_gpu, gated_delta_rule, grouped_mm, state_space
from tunekit.kernels.attention import AttentionParams, attention
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.selftest.compare import BF16, DTYPE_NAMES, FP32, Comparison
from tunekit.selftest.context import Context
from tunekit.selftest.result import CheckSkippedError, Result

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 150, 4, 2, 64
BOUNDS = (0, 70, 71, 150, 290, 300)  # of packed documents in the flattened rows
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Case:
    """A kind of attention."""

    rule: AttentionParams
    packed: bool = False
    sinks: bool = False


CASES = {
    "causal": Case(AttentionParams(SCALE)),
    "packed": Case(AttentionParams(SCALE), packed=True),
    "window": Case(AttentionParams(SCALE, window=40), packed=True),
    "chunk": Case(AttentionParams(SCALE, chunk=32), packed=True),
    "sinks": Case(AttentionParams(SCALE), packed=True, sinks=True),
}
CAPPED = {"softcap": Case(AttentionParams(SCALE, softcap=5.0), packed=True)}


def check_attention(context: Context) -> Result:
    """Each kind of attention in the dtypes that training uses; what FlexAttention computes has a check of its own."""
    on_gpu = context.device.type == "cuda"
    dtypes = (BF16,) if on_gpu else (FP32, BF16)
    comparison = Comparison(context, attention_version(context, dtypes[0]))
    for (name, case), dtype in product((CASES if on_gpu else CASES | CAPPED).items(), dtypes):
        check_case(comparison, f"{name} {DTYPE_NAMES[dtype]}", case, dtype)
    return comparison.result()


def check_flex_attention(context: Context) -> Result:
    """On a GPU: fp32, and scores with a cap. Compiles for up to half a minute."""
    if context.device.type != "cuda":
        raise CheckSkippedError("FlexAttention is used on GPUs only")
    comparison = Comparison(context, "FlexAttention")
    check_case(comparison, "softcap bf16", CAPPED["softcap"], BF16)
    return comparison.result()


def attention_version(context: Context, dtype: torch.dtype) -> str:
    """The name of the kernel that `attend` uses."""
    q = torch.empty(1, 1, HEADS, DIM, dtype=dtype, device=context.device)
    if attention_cpu.is_supported(q):
        return "C++"
    return "FlashAttention" if attention_gpu.is_supported(q, capped=False) else "torch SDPA"


def check_case(comparison: Comparison, name: str, case: Case, dtype: torch.dtype) -> None:
    """Compare attention with a softmax over all pairs of tokens."""
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    inputs = {key: torch.randn(ROWS, LENGTH, heads, DIM).to(dtype) for key, heads in shapes.items()}
    if case.sinks:
        inputs["sinks"] = torch.randn(HEADS)
    fast, reference = partial(attend_case, case), partial(attend_reference, case)
    comparison.check_function(name, fast, reference, inputs)


def layout_of(bounds: Sequence[int]) -> SequenceLayout:
    return SequenceLayout(torch.tensor(bounds, dtype=torch.int32))


def attend_case(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    layout = layout_of(BOUNDS) if case.packed else None
    return attention(q, k, v, case.rule, layout, sinks)


def attend_reference(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """A softmax over all pairs of tokens, in fp64."""
    flat = [x.double().flatten(0, 1).transpose(0, 1) for x in (q, k, v)]
    q2, k2, v2 = flat[0], *(x.repeat_interleave(HEADS // KV_HEADS, 0) for x in flat[1:])
    scores = q2 @ k2.mT * SCALE
    if case.rule.softcap:
        scores = case.rule.softcap * (scores / case.rule.softcap).tanh()
    scores = scores.masked_fill(~visible(case), float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : v2.shape[1]]
    return (weights @ v2).transpose(0, 1).reshape(ROWS, LENGTH, HEADS, DIM).float()


def visible(case: Case) -> Tensor:
    """Which keys (T,) each query sees, (T, T)."""
    bounds = BOUNDS if case.packed else [LENGTH * row for row in range(ROWS + 1)]
    lengths = torch.tensor(bounds).diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.cat([torch.arange(int(length)) for length in lengths])
    age = position[:, None] - position
    seen = (document[:, None] == document) & (age >= 0)
    if case.rule.window:
        seen &= age < case.rule.window
    if case.rule.chunk:
        seen &= position[:, None] // case.rule.chunk == position // case.rule.chunk
    return seen


def check_gated_delta_rule(context: Context) -> Result:
    """The gated delta rule in chunks, and the short convolution before it."""
    comparison = Comparison(context, "torch")
    for dtype, label in DTYPE_NAMES.items():
        inputs = recurrent_inputs(dtype) | {"beta": torch.rand(1, LENGTH, 4)}
        comparison.check_function(f"delta rule {label}", delta_rule, delta_rule_reference, inputs)
        inputs = {"x": torch.randn(1, LENGTH, 24).to(dtype), "weight": torch.randn(24, 4)}
        comparison.check_function(f"convolution {label}", convolve, convolve_reference, inputs)
    return comparison.result()


def check_state_space(context: Context) -> Result:
    """The state space model of Mamba 2, in chunks."""
    comparison = Comparison(context, "torch")
    for dtype, label in DTYPE_NAMES.items():
        comparison.check_function(f"scan {label}", scan, scan_reference, recurrent_inputs(dtype))
    return comparison.result()


DOCUMENTS = (0, 67, 68, LENGTH)


def recurrent_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Two heads of queries and keys, and four of values, with their decay."""
    shapes = {"q": (2, 32), "k": (2, 32), "v": (4, 16)}
    inputs = {key: torch.randn(1, LENGTH, *shape).to(dtype) for key, shape in shapes.items()}
    return inputs | {"decay": -torch.rand(1, LENGTH, 4)}


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_rule.gated_delta_rule(q, k, v, decay, beta, layout_of(DOCUMENTS))[0]


def delta_rule_reference(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Token by token, in fp64 (arXiv:2412.06464)."""
    q, k = (F.normalize(x.double(), dim=-1, eps=1e-3).repeat_interleave(2, 2)[0] for x in (q, k))
    values, outputs = v.double()[0], []
    state = values.new_zeros(4, 32, 16)
    for t in range(LENGTH):
        fade = 0.0 if t in DOCUMENTS else decay.double()[0, t, :, None, None].exp()
        state = state * fade
        update = (values[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta.double()[0, t, :, None]
        state = state + k[t][:, :, None] * update[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)[None].float()


def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return state_space.state_space_scan(q, k, v, decay, layout_of(DOCUMENTS))[0]


def scan_reference(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Token by token, in fp64 (arXiv:2405.21060)."""
    q, k = (x.double().repeat_interleave(2, 2)[0] for x in (q, k))
    outputs, state = [], v.new_zeros(4, 32, 16, dtype=torch.float64)
    for t in range(LENGTH):
        fade = 0.0 if t in DOCUMENTS else decay.double()[0, t, :, None, None].exp()
        state = state * fade + k[t][:, :, None] * v.double()[0, t][:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs)[None].float()


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return gated_delta_rule.short_convolution(x, weight, layout_of(DOCUMENTS))


def convolve_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Document by document."""
    parts = []
    for part in x.split([b - a for a, b in zip(DOCUMENTS, DOCUMENTS[1:], strict=False)], dim=1):
        padded = F.pad(part.mT, (weight.shape[1] - 1, 0))
        parts.append(F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).mT)
    return torch.cat(parts, dim=1)


def check_grouped_mm(context: Context) -> Result:
    """Products of rows with the weights of their experts, one of which has no rows."""
    x = torch.empty(1, 64, dtype=BF16, device=context.device)
    comparison = Comparison(context, "Triton" if grouped_mm.needs_triton(x) else "torch grouped_mm")
    sizes = torch.tensor([17, 0, 40, 8])
    for dtype, label in DTYPE_NAMES.items():
        inputs = {
            "x": torch.randn(int(sizes.sum()), 64).to(dtype),
            "weight": torch.randn(len(sizes), 96, 64).to(dtype),
            "bias": torch.randn(len(sizes), 96).to(dtype),
        }
        fast = partial(experts_product, grouped_mm.grouped_mm, sizes.to(context.device))
        comparison.check_function(label, fast, partial(experts_product, experts_reference, sizes), inputs)
    return comparison.result()


def experts_product(function, sizes: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return function(x, weight, sizes, bias)


def experts_reference(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor) -> Tensor:
    rows = zip(x.split(sizes.tolist()), weight, bias, strict=True)
    return torch.cat([part @ w.T + b for part, w, b in rows])
