"""Example calls of kernels that mix tokens: attention, recurrent layers, and the products of experts."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import attention_cpu, attention_gpu, gated_delta_rule, grouped_mm, state_space
from tunekit.kernels.attention import AttentionParams, attention
from tunekit.kernels.kernel_case import BF16, DTYPES, Kernel, KernelCase, KernelUnavailableError
from tunekit.kernels.sequence_layout import SequenceLayout

# Packed documents in two flattened rows of 150 tokens: long and short ones, and empty ones.
ROWS, LENGTH = 2, 150
BOUNDS = (0, 0, 70, 71, 150, 150, 290, 300, 300)
SCALE = 64**-0.5


class AttentionCase(NamedTuple):
    """A kind of attention."""

    rule: AttentionParams
    is_packed: bool = True
    has_sinks: bool = False
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)  # of keys and values


ATTENTION = {
    "causal": AttentionCase(AttentionParams(SCALE), is_packed=False),
    "packed": AttentionCase(AttentionParams(SCALE), heads=(3, 3)),
    "window": AttentionCase(AttentionParams(SCALE, window=40)),
    "chunk": AttentionCase(AttentionParams(SCALE, chunk=32), heads=(5, 1)),
    "window and chunk": AttentionCase(AttentionParams(SCALE, window=33, chunk=100)),
    "sinks": AttentionCase(AttentionParams(SCALE), has_sinks=True),
    "window with sinks": AttentionCase(AttentionParams(SCALE, window=40), has_sinks=True, dims=(128, 64)),
}
CAPPED = {
    "softcap": AttentionCase(AttentionParams(SCALE, softcap=5.0)),
    "softcap and window": AttentionCase(AttentionParams(SCALE, window=40, softcap=5.0)),
}


def layout_of(bounds: Sequence[int] | None) -> SequenceLayout | None:
    return None if bounds is None else SequenceLayout(torch.tensor(bounds, dtype=torch.int32))


def attention_cases(device: torch.device) -> Iterator[KernelCase]:
    """The kinds and dtypes that training uses; those of FlexAttention, which compiles long, are separate."""
    on_gpu = device.type == "cuda"
    for name, case in (ATTENTION if on_gpu else ATTENTION | CAPPED).items():
        for label, dtype in DTYPES.items():
            if dtype == BF16 or not on_gpu:
                yield attention_case(f"{name} {label}", case, dtype)


def flex_attention_cases(device: torch.device) -> Iterator[KernelCase]:
    yield attention_case("softcap bf16", CAPPED["softcap"], BF16)


def attention_case(name: str, case: AttentionCase, dtype: torch.dtype) -> KernelCase:
    heads, kv_heads = case.heads
    shapes = {"q": (heads, case.dims[0]), "k": (kv_heads, case.dims[0]), "v": (kv_heads, case.dims[1])}
    inputs = {key: torch.randn(ROWS, LENGTH, *shape).to(dtype) for key, shape in shapes.items()}
    if case.has_sinks:
        inputs["sinks"] = torch.randn(heads)
    bounds = BOUNDS if case.is_packed else [LENGTH * row for row in range(ROWS + 1)]
    layout = layout_of(BOUNDS) if case.is_packed else None
    return KernelCase(
        name,
        lambda q, k, v, sinks=None: attention(q, k, v, case.rule, layout, sinks),
        lambda q, k, v, sinks=None: packed_attention_definition((q, k, v), case.rule, bounds, sinks),
        inputs,
    )


def packed_attention_definition(
    inputs: Sequence[Tensor], rule: AttentionParams, bounds: Sequence[int], sinks: Tensor | None = None
) -> Tensor:
    """Attention within documents of the flattened rows, in fp64, for queries, keys and values (B, S, H, D)."""
    q, k, v = (x.flatten(0, 1)[None] for x in inputs)
    y = attention_definition(q, k, v, rule, pair_mask(rule, bounds)[None], sinks)
    return y.unflatten(1, inputs[0].shape[:2])[0]


def attention_definition(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, seen: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """A softmax over the scores of all pairs in fp64. `seen` (B, S, K) masks them."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(len(q), -1, q.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : k.shape[1]], v)


def pair_mask(rule: AttentionParams, bounds: Sequence[int]) -> Tensor:
    """Which tokens of packed documents each token sees, (T, T)."""
    lengths = torch.tensor(bounds).diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.cat([torch.arange(int(length)) for length in lengths])
    return visible_mask(position[None], position, rule)[0] & (document[:, None] == document)


def visible_mask(queries: Tensor, keys: Tensor, rule: AttentionParams) -> Tensor:
    """Mask (B, S, K) of the keys (K,) that the queries (B, S) see, both given as positions."""
    queries = queries[..., None]
    seen = queries >= keys
    if rule.window is not None:
        seen = seen & (queries - keys < rule.window)
    return seen if rule.chunk is None else seen & (queries // rule.chunk == keys // rule.chunk)


def attention_version(device: torch.device) -> str:
    q = torch.empty(1, 1, 4, 64, dtype=BF16 if device.type == "cuda" else torch.float32, device=device)
    if attention_cpu.is_supported(q):
        return "C++"
    return "FlashAttention" if attention_gpu.is_supported(q, capped=False) else "torch SDPA"


def flex_attention_version(device: torch.device) -> str:
    if device.type != "cuda":
        raise KernelUnavailableError("FlexAttention is used on GPUs only")
    return "FlexAttention"


DOCUMENTS = (0, 67, 68, LENGTH)


def gated_delta_rule_cases(device: torch.device) -> Iterator[KernelCase]:
    """The gated delta rule in chunks, and the short convolution before it."""
    for label, dtype in DTYPES.items():
        inputs = recurrent_inputs(dtype) | {"beta": torch.rand(1, LENGTH, 4)}
        definition = partial(run_documents, delta_rule_definition)
        yield KernelCase(f"delta rule {label}", delta_rule, lambda *x, f=definition: f(x, DOCUMENTS)[0], inputs)
        for width, bounds in product((1, 2, 4), (None, DOCUMENTS)):
            inputs = {"x": torch.randn(1, LENGTH, 24).to(dtype), "weight": torch.randn(24, width)}
            function, reference = partial(convolve, bounds), partial(convolve_definition, bounds or (0, LENGTH))
            yield KernelCase(f"convolution of {width} {label}, {bounds}", function, reference, inputs)


def state_space_cases(device: torch.device) -> Iterator[KernelCase]:
    """The state space model of Mamba 2, in chunks."""
    definition = partial(run_documents, state_space_definition)
    for label, dtype in DTYPES.items():
        inputs = recurrent_inputs(dtype)
        yield KernelCase(f"scan {label}", scan, lambda *x, f=definition: f(x, DOCUMENTS)[0], inputs)


def recurrent_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Two heads of queries and keys, and four of values, with their decay."""
    shapes = {"q": (2, 32), "k": (2, 32), "v": (4, 16)}
    inputs = {key: torch.randn(1, LENGTH, *shape).to(dtype) for key, shape in shapes.items()}
    return inputs | {"decay": -torch.rand(1, LENGTH, 4)}


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_rule.gated_delta_rule(q, k, v, decay, beta, layout_of(DOCUMENTS))[0]


def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return state_space.state_space_scan(q, k, v, decay, layout_of(DOCUMENTS))[0]


def run_documents(
    definition: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    bounds: Sequence[int],
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each document separately: outputs (B, S, H, V), and its last state (documents, H, K, V). Starts from `states`."""
    flat, (heads, dim) = [x.flatten(0, 1) for x in inputs], inputs[2].shape[2:]
    states = torch.zeros(len(bounds) - 1, heads, inputs[1].shape[-1], dim) if states is None else states
    spans = zip(bounds, bounds[1:], states, strict=False)
    pairs = [definition(*(x[first:last].double() for x in flat), state.double()) for first, last, state in spans]
    return torch.cat([y for y, _ in pairs]).view_as(inputs[2]), torch.stack([state for _, state in pairs])


def state_space_definition(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state of a document (S, H, ...), token by token (arXiv:2405.21060). The state is (H, K, V)."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    outputs = []
    for t in range(len(v)):
        state = decay[t].exp()[:, None, None] * state + k[t, :, :, None] * v[t, :, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs), state


def delta_rule_definition(  # noqa: PLR0913 (the symbols of the paper)
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and last state of a document (S, H, ...), token by token (arXiv:2412.06464). The state is (H, K, V)."""
    q, k = (F.normalize(x, dim=-1).repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    outputs = []
    for t in range(len(v)):
        state = decay[t].exp()[:, None, None] * state
        update = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t, :, None]
        state = state + k[t, :, :, None] * update[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs), state


def convolve(bounds: Sequence[int] | None, x: Tensor, weight: Tensor) -> Tensor:
    return gated_delta_rule.short_convolution(x, weight, layout_of(bounds))


def convolve_definition(bounds: Sequence[int], x: Tensor, weight: Tensor) -> Tensor:
    """Document by document."""
    parts = []
    for part in x.flatten(0, 1).split([b - a for a, b in zip(bounds, bounds[1:], strict=False)]):
        padded = F.pad(part.T[None], (weight.shape[1] - 1, 0))
        parts.append(F.silu(F.conv1d(padded, weight[:, None], groups=len(weight)))[0].T)
    return torch.cat(parts).view_as(x)


EXPERTS = {"some": [17, 1, 40, 8], "gaps": [0, 17, 0, 8], "one": [0, 0, 40, 0], "first": [9, 0, 0, 0]}
WIDTHS = {"": (64, 96), ", odd widths": (7, 5)}  # torch's grouped_mm does not support the odd ones


def grouped_mm_cases(device: torch.device) -> Iterator[KernelCase]:
    """Products of rows with the weights of their experts, some of which have no rows."""
    options = EXPERTS.items(), DTYPES.items(), DTYPES.items(), WIDTHS.items()
    for (name, sizes), (label, dtype), (weight_label, weight_dtype), (widths, (inner, outer)) in product(*options):
        inputs = {
            "x": torch.randn(sum(sizes), inner).to(dtype),
            "weight": torch.randn(len(sizes), outer, inner).to(weight_dtype),
            "sizes": torch.tensor(sizes),
            "bias": torch.randn(len(sizes), outer).to(weight_dtype),
        }
        yield KernelCase(
            f"{name} {label}, {weight_label} weight{widths}", grouped_mm.grouped_mm, grouped_mm_definition, inputs
        )


def grouped_mm_definition(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor) -> Tensor:
    expert = torch.arange(len(sizes)).repeat_interleave(sizes)
    return torch.einsum("ni,noi->no", x, weight[expert]) + bias[expert]


def grouped_mm_version(device: torch.device) -> str:
    return "Triton" if grouped_mm.needs_triton(torch.empty(1, 64, dtype=BF16, device=device)) else "torch grouped_mm"


KERNELS = (
    Kernel("attention", attention_cases, attention_version, attention_cpu),
    Kernel("flex_attention", flex_attention_cases, flex_attention_version),
    Kernel("gated_delta_rule", gated_delta_rule_cases),
    Kernel("state_space", state_space_cases),
    Kernel("grouped_mm", grouped_mm_cases, grouped_mm_version),
)
