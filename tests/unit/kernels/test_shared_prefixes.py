"""Attention with shared prefixes equals attention of full documents."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from tests.gpu.flash_on_cpu import cpu_flash
from tests.helpers.random_checkpoints import relative_error
from tests.unit.kernels.test_attention import make_sinks
from tests.unit.kernels.test_attention_gpu import CPU
from tests.unit.kernels.test_attention_native import RULES, gradients, make_inputs, relative_norm_error
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.context_parallel import ContextParallelSharding
from tunekit.kernels import attention, attention_cpu, attention_gpu
from tunekit.kernels.attention import AttentionParams
from tunekit.kernels.attention_ranges import attention_sharded
from tunekit.kernels.sequence_cases import packed_attention_definition, pair_mask
from tunekit.kernels.sequence_layout import SequenceLayout

# Rows of 300 tokens: the number of stored tokens of each document, and (prefix length, document of the prefix).
CASES = {
    "pairs": ([140, 60, 60, 40, 250, 49, 1], [(0, 0), (130, 0), (0, 0), (1, 2), (0, 0), (249, 4), (0, 0)]),
    "shared by many": ([200, 20, 30, 49, 1, 300], [(0, 0), (200, 0), (150, 0), (64, 0), (199, 0), (0, 0)]),
    "full prefix and one more token": ([257, 1, 42, 299, 1], [(0, 0), (257, 0), (0, 0), (0, 0), (299, 3)]),
    "none": ([300, 300], [(0, 0), (0, 0)]),
}
ALL_CASES = [(name, "pairs") for name in RULES]
ALL_CASES += [(name, case) for name in ("causal", "window and chunk") for case in list(CASES)[1:3]]
needs_cpp_kernel = pytest.mark.skipif(
    not attention_cpu.is_available(), reason="no compiler, or a CPU without bf16 matmul"
)


def prefix_layout(case: str) -> tuple[Tensor, Tensor]:
    """Bounds of the stored tokens, and prefix length and start of each document."""
    lengths, before = CASES[case]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return offsets, torch.tensor([[count, offsets[of] if count else 0] for count, of in before], dtype=torch.int32)


def full_documents(case: str) -> tuple[list[int], list[list[int]], list[int]]:
    """Bounds of full documents, positions of their tokens in the rows, and indices of the stored tokens in them."""
    lengths, prefixes = CASES[case]
    starts, token_positions, stored_indices, num_tokens = [0, *itertools.accumulate(lengths)], [], [], 0
    for number, (length, (count, prefix_document)) in enumerate(zip(lengths, prefixes, strict=True)):
        token_positions.append(
            [
                *range(starts[prefix_document], starts[prefix_document] + count),
                *range(starts[number], starts[number] + length),
            ]
        )
        stored_indices += range(num_tokens + count, num_tokens := num_tokens + count + length)
    return [0, *itertools.accumulate(map(len, token_positions))], token_positions, stored_indices


def expected_attention(inputs: list[Tensor], rule: AttentionParams, case: str, sinks: Tensor | None = None) -> Tensor:
    """Attention of full documents, in float64."""
    bounds, token_positions, stored_indices = full_documents(case)
    positions = torch.tensor([position for positions in token_positions for position in positions])
    copies = [x.flatten(0, 1)[positions][None] for x in inputs]
    return packed_attention_definition(copies, rule, bounds, sinks)[0][stored_indices].view(*inputs[0].shape[:3], -1)


def assert_same(y: Tensor, expected: Tensor, inputs: list[Tensor], limit: float = 2e-6) -> None:
    assert relative_error(y.double(), expected) < limit
    for grad, expected_grad in zip(gradients(y, inputs), gradients(expected, inputs), strict=True):
        assert relative_error(grad.double(), expected_grad.double()) < limit


@pytest.mark.parametrize("case", CASES)
def test_keys_of_each_document(case: str) -> None:
    layout, (bounds, token_positions, _) = SequenceLayout(*prefix_layout(case)), full_documents(case)
    assert layout.key_cu_seqlens.dtype == torch.int32 and layout.key_cu_seqlens.tolist() == bounds
    assert layout.key_index(CPU).tolist() == [position for document in token_positions for position in document]


def backends(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The C++ kernel, if it can be compiled, and torch's operations. Cases compute their expected values once."""
    if attention_cpu.is_available():
        yield "compiled"
    patch.setattr(attention_cpu, "is_available", lambda: False)
    yield "torch"


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_attention_equals_full_documents(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SequenceLayout(*prefix_layout(case))
    inputs = make_inputs(torch.float32, 6, 2, 24, 20)
    expected = expected_attention(inputs, RULES[name], case)
    expected_grads = gradients(expected, inputs)
    for backend in backends(monkeypatch):
        y = attention.attention(*inputs, RULES[name], layout, None, layout.key_index(CPU))
        assert relative_error(y.double(), expected) < 5e-6, backend
        for grad, expected_grad in zip(gradients(y, inputs), expected_grads, strict=True):
            assert relative_error(grad.double(), expected_grad.double()) < 5e-6, backend


@pytest.mark.parametrize("backend", [pytest.param("compiled", marks=needs_cpp_kernel), "torch"])
@pytest.mark.parametrize("name", ["causal", "window and chunk"])
def test_sinks_equal_full_documents(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torch":
        monkeypatch.setattr(attention_cpu, "is_available", lambda: False)
    layout = SequenceLayout(*prefix_layout("pairs"))
    inputs, sinks = make_inputs(torch.float32, 6, 2, 16, 16), make_sinks(6)
    y = attention.attention(*inputs, RULES[name], layout, sinks, layout.key_index(CPU))
    assert_same(y, expected_attention(inputs, RULES[name], "pairs", sinks), [*inputs, sinks], 5e-6)


@needs_cpp_kernel
@pytest.mark.parametrize("name", RULES)
def test_bf16_is_as_accurate_as_full_documents(name: str) -> None:
    layout, (bounds, token_positions, stored_indices) = SequenceLayout(*prefix_layout("pairs")), full_documents("pairs")
    inputs = make_inputs(torch.bfloat16, 6, 2, 64, 64)
    expected = expected_attention(inputs, RULES[name], "pairs")
    actual = attention.attention(*inputs, RULES[name], layout, None, layout.key_index(CPU))
    positions = torch.tensor([position for positions in token_positions for position in positions])
    copies = [x.flatten(0, 1)[positions][None] for x in inputs]
    full_result = attention.attention(*copies, RULES[name], SequenceLayout(torch.tensor(bounds)))[0][
        stored_indices
    ].view_as(actual)
    assert relative_norm_error(actual, expected) <= 1.05 * relative_norm_error(full_result, expected)
    for a, b, c in zip(
        gradients(actual, inputs), gradients(full_result, inputs), gradients(expected, inputs), strict=True
    ):
        assert relative_norm_error(a, c) <= 1.05 * relative_norm_error(b, c)


@needs_cpp_kernel
def test_number_of_threads_does_not_change_bits() -> None:
    layout = SequenceLayout(torch.tensor([0, 900, 1300, 1500]), torch.tensor([[0, 0], [700, 0], [899, 0]]))
    inputs, threads, results = make_inputs(torch.float32, 6, 2, 32, 32, 1500), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = attention.attention(*inputs, RULES["window"], layout, None, layout.key_index(CPU))
            results.append([y, *gradients(y, inputs)])
    finally:
        torch.set_num_threads(threads)
    for first, second in itertools.pairwise(results):
        assert all(map(torch.equal, first, second))


@needs_cpp_kernel
def test_compiled_once_for_all_documents() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention.attention, backend=counter, fullgraph=True, dynamic=True)
    inputs, counts = make_inputs(torch.float32, 6, 2, 16, 16), []
    for case in ("pairs", "full prefix and one more token", "shared by many"):
        layout = SequenceLayout(*prefix_layout(case))
        args = *inputs, AttentionParams(0.3, window=9, softcap=3.0), layout, None, layout.key_index(CPU)
        assert torch.equal(compiled(*args), attention.attention(*args))
        counts.append(counter.frame_count)
    assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "case", "with_sinks"), [*((*pair, False) for pair in ALL_CASES), ("chunk", "shared by many", True)]
)
def test_context_parallel_ranks_equal_full_rows(
    name: str, case: str, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has the queries of some spans, and the keys of full rows."""
    monkeypatch.setattr(attention, "BLOCK", 64)  # of torch's operations
    layout = SequenceLayout(*prefix_layout(case))
    q, k, v = inputs = make_inputs(torch.float32, 6, 2, 16, 16)
    sinks = make_sinks(6) if with_sinks else None
    expected = expected_attention(inputs, RULES[name], case, sinks)
    weight, leaves = torch.randn_like(expected), [*inputs, *([] if sinks is None else [sinks])]
    expected_grads = torch.autograd.grad((expected * weight).sum(), leaves)
    ranks = [ContextParallelSharding(MeshDim(None, 3, index)) for index in range(3)]  # type: ignore[arg-type] (nothing is sent)
    for backend in backends(monkeypatch):
        outputs = [
            attention_sharded(rank.local_tokens(q), k, v, RULES[name], rank.local_ranges(300), layout, sinks)
            for rank in ranks
        ]
        for y, rank in zip(outputs, ranks, strict=True):
            assert relative_error(y.double(), rank.local_tokens(expected)) < 5e-6, backend
        weighted = [(y * rank.local_tokens(weight)).sum() for y, rank in zip(outputs, ranks, strict=True)]
        for a, b in zip(torch.autograd.grad(sum(weighted), leaves), expected_grads, strict=True):
            assert relative_error(a.double(), b.double()) < 5e-6, backend


def visible_pairs(rule: AttentionParams, case: str) -> Tensor:
    """Mask (T, K) of the keys, including prefixes, that the stored tokens attend to."""
    bounds, _, stored_indices = full_documents(case)
    return pair_mask(rule, bounds)[stored_indices]


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_blocks_include_all_visible_pairs(name: str, case: str) -> None:
    """There can be extra blocks, for example of a prefix before a window."""
    rule, size, layout = RULES[name], attention_gpu.BLOCK, SequenceLayout(*prefix_layout(case))
    at = attention_gpu.split_chunks(layout.cu_seqlens, layout.key_cu_seqlens, rule.chunk or 0)
    mask, expected = attention_gpu.build_block_mask(*at, rule.window or 0, CPU), visible_pairs(rule, case)
    rows, columns = (-(-n // size) for n in expected.shape)
    padding = (0, columns * size - expected.shape[1], 0, rows * size - expected.shape[0])
    tiles = torch.nn.functional.pad(expected, padding).view(rows, size, columns, size)
    assert (mask.to_dense()[0, 0].bool() >= tiles.any(3).any(1)).all()
    for row in range(rows):
        full_blocks = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]]
        assert all(expected[row * size : (row + 1) * size, at * size : (at + 1) * size].all() for at in full_blocks)
    query, key = (torch.arange(n) for n in expected.shape)
    assert torch.equal(mask.mask_mod(0, 0, query[:, None], key), expected)


@pytest.mark.parametrize(("name", "with_sinks"), [*((name, False) for name in RULES), ("window", True)])
def test_flex_attention_equals_full_documents(name: str, with_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has a CPU forward pass."""
    monkeypatch.setattr(attention_gpu, "compiled_flex_attention", lambda: flex_attention)
    layout, sinks = SequenceLayout(*prefix_layout("pairs")), make_sinks(6).detach() if with_sinks else None
    q, k, v = inputs = [x.detach() for x in make_inputs(torch.float32, 6, 2, 24, 24)]
    k, v = (x.flatten(0, 1)[layout.key_index(CPU)][None] for x in (k, v))
    y = attention_gpu.attention_gpu(q, k, v, RULES[name].to_list(), layout, sinks)
    assert relative_error(y.double(), expected_attention(inputs, RULES[name], "pairs", sinks)) < 3e-6


@pytest.mark.parametrize(
    ("name", "case", "with_sinks"),
    [(*pair, bool(i % 2)) for i, pair in enumerate(pair for pair in ALL_CASES if "softcap" not in pair[0])],
)
def test_flash_attention_equals_full_documents(
    name: str, case: str, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the float64 implementation of FlashAttention on the CPU."""
    monkeypatch.setattr(attention_gpu, "HALF_DTYPES", (torch.float32,))
    layout, sinks = SequenceLayout(*prefix_layout(case)), make_sinks(6) if with_sinks else None
    q, k, v = inputs = make_inputs(torch.float32, 6, 2, 16, 16)
    k, v = (x.flatten(0, 1)[layout.key_index(CPU)][None] for x in (k, v))
    expected, leaves = (
        expected_attention(inputs, RULES[name], case, sinks),
        [*inputs, *([] if sinks is None else [sinks])],
    )
    with cpu_flash():
        assert_same(attention_gpu.attention_gpu(q, k, v, RULES[name].to_list(), layout, sinks), expected, leaves, 5e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_gpu_equals_full_documents(name: str, case: str, dtype: torch.dtype) -> None:
    layout, inputs = SequenceLayout(*prefix_layout(case)), make_inputs(dtype, 6, 2, 64, 64)
    expected, on_gpu = (
        expected_attention(inputs, RULES[name], case),
        [x.detach().cuda().requires_grad_() for x in inputs],
    )
    y = attention.attention(*on_gpu, RULES[name], layout, None, layout.key_index(on_gpu[0].device))
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert relative_error(y.double().cpu(), expected) < limit
    for grad, expected_grad in zip(gradients(y.cpu(), on_gpu), gradients(expected, inputs), strict=True):
        assert relative_error(grad.double().cpu(), expected_grad.double()) < limit
