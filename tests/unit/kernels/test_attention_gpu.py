"""GPU attention: block masks and scores on the CPU, and everything on a GPU if there is one."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.gpu.flash_on_cpu import cpu_flash
from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tests.unit.kernels.test_attention import make_sinks
from tests.unit.kernels.test_attention_native import BOUNDS, RULES, gradients, make_inputs
from tunekit.devices import CDNA
from tunekit.kernels import attention_gpu
from tunekit.kernels.attention import AttentionParams, attention
from tunekit.kernels.sequence_cases import packed_attention_definition, pair_mask
from tunekit.kernels.sequence_layout import SequenceLayout, rows_layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", RULES)
def test_blocks_are_those_with_pair_mask(name: str, bounds: str) -> None:
    """Blocks that are marked as full have no masked pair."""
    rule, size = RULES[name], attention_gpu.BLOCK
    offsets = torch.tensor(BOUNDS[bounds])
    mask = attention_gpu.build_block_mask(
        *attention_gpu.split_chunks(offsets, offsets, rule.chunk or 0), rule.window or 0, CPU
    )
    pairs = pair_mask(rule, BOUNDS[bounds])
    count = -(-len(pairs) // size)
    tiles = torch.nn.functional.pad(pairs, (0, count * size - len(pairs)) * 2).view(count, size, count, size)
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(3).any(1))
    for row in range(count):
        full_blocks = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]]
        assert all(
            pairs[row * size : (row + 1) * size, column * size : (column + 1) * size].all() for column in full_blocks
        )
    index = torch.arange(len(pairs))
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index), pairs)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_flex_attention_equals_reference(name: str, with_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has a CPU forward pass."""
    monkeypatch.setattr(attention_gpu, "compiled_flex_attention", lambda: flex_attention)
    rule, bounds, sinks = RULES[name], BOUNDS["many"], make_sinks(6).detach() if with_sinks else None
    inputs = [x.detach() for x in make_inputs(torch.float32, 6, 2, 24, 24)]
    y = attention_gpu.attention_gpu(*inputs, rule.to_list(), SequenceLayout(torch.tensor(bounds)), sinks)
    assert relative_error(y.double(), packed_attention_definition(inputs, rule, bounds, sinks)) < 3e-6


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace FlashAttention by its float64 implementation on the CPU."""
    monkeypatch.setattr(attention_gpu, "HALF_DTYPES", (torch.float32,))
    with cpu_flash():
        yield


@pytest.mark.usefixtures("kernel")
@pairwise(
    name=[name for name in RULES if "softcap" not in name],
    with_sinks=[False, True],
    dims=[(24, 24), (21, 12), (8, 8), (12, 20)],
)
def test_flash_attention_equals_reference(name: str, with_sinks: bool, dims: tuple[int, int]) -> None:
    """Documents, chunks, head dimensions, sinks and their gradients around the float64 kernels."""
    rule, bounds, sinks = RULES[name], BOUNDS["many"], make_sinks(6) if with_sinks else None
    inputs = make_inputs(torch.float32, 6, 2, *dims)
    expected = packed_attention_definition(inputs, rule, bounds, sinks)
    y = attention_gpu.attention_gpu(*inputs, rule.to_list(), SequenceLayout(torch.tensor(bounds)), sinks)
    assert relative_error(y.double(), expected) < 1e-6
    leaves = [*inputs, *([] if sinks is None else [sinks])]
    for grad, expected_grad in zip(gradients(y, leaves), gradients(expected, leaves), strict=True):
        assert relative_error(grad, expected_grad) < 2e-6


@pytest.mark.usefixtures("kernel")
def test_sinks_without_log_sum_exp_use_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layouts of the log-sum-exp, as on ROCm, use FlexAttention."""
    monkeypatch.setattr(attention_gpu, "get_capabilities", lambda device: CDNA)
    monkeypatch.setattr(attention_gpu, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setattr(attention_gpu, "flash_attention", None)
    rule, bounds, sinks = AttentionParams(0.2), BOUNDS["many"], make_sinks(6).detach()
    inputs = [x.detach() for x in make_inputs(torch.float32, 6, 2, 24, 24)]
    y = attention_gpu.attention_gpu(*inputs, rule.to_list(), SequenceLayout(torch.tensor(bounds)), sinks)
    assert relative_error(y.double(), packed_attention_definition(inputs, rule, bounds, sinks)) < 3e-6


@pytest.mark.usefixtures("kernel")
def test_rows_are_documents_by_default() -> None:
    inputs = make_inputs(torch.float32, 6, 2, 16, 16)
    y = attention_gpu.attention_gpu(*inputs, AttentionParams(0.2).to_list(), None, None)
    assert relative_error(y.double(), packed_attention_definition(inputs, AttentionParams(0.2), [0, 300, 600])) < 1e-6


@pytest.mark.parametrize("window", [0, 70])
def test_torch_kernels_accept_the_arguments(window: int) -> None:
    """Meta tensors: torch checks arguments and infers shapes."""
    q, k, v = (torch.empty(1, 100, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (6, 2, 2))
    cu_seqlens, rule = torch.empty(4, dtype=torch.int32, device="meta"), [0.2, float(window), 0.0, 0.0]
    y, lse = attention_gpu.flash_forward(q, k, v, cu_seqlens, cu_seqlens, None, 60, 60, rule)
    assert y.shape == q.shape and lse.shape == (6, 100)
    *grads, _ = attention_gpu.flash_gradients(y, [q, k, v, cu_seqlens, cu_seqlens, y, lse], 60, 60, rule)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_bounds_are_copied_to_the_device_once() -> None:
    layout = SequenceLayout(torch.tensor([0, 3, 10]))
    first = attention_gpu.varlen_bounds(layout, 4, CPU)
    assert first[0].tolist() == first[2].tolist() == [0, 3, 7, 10] and first[1] == first[3] == 4
    assert attention_gpu.varlen_bounds(layout, 4, CPU) is first
    assert attention_gpu.varlen_bounds(layout, 0, CPU)[0].tolist() == [0, 3, 10]


def test_each_device_has_its_own_bounds() -> None:
    """Row layouts are cached per process, which can have models on several devices."""
    layout, meta = rows_layout(3, 7), torch.device("meta")
    for device in (CPU, meta, CPU):
        queries, _, keys, _ = attention_gpu.varlen_bounds(layout, 4, device)
        assert queries.device == keys.device == device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pairwise(
    name=RULES.keys(),
    bounds=["many", "empty ones"],
    with_sinks=[False, True],
    dims=[(64, 64), (128, 128), (192, 128), (20, 12)],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_gpu_equals_reference(
    name: str, bounds: str, with_sinks: bool, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    rule, offsets = RULES[name], BOUNDS[bounds]
    inputs = make_inputs(dtype, 6, 2, *dims)
    sinks = make_sinks(6) if with_sinks else None
    leaves = [*inputs, *([] if sinks is None else [sinks])]
    expected = packed_attention_definition(inputs, rule, offsets, sinks)
    on_gpu = [x.detach().cuda().requires_grad_() for x in leaves]
    y = attention(
        *on_gpu[:3], rule, SequenceLayout(torch.tensor(offsets, dtype=torch.int32)), on_gpu[3] if with_sinks else None
    )
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert relative_error(y.double().cpu(), expected) < limit
    for grad, expected_grad in zip(gradients(y.cpu(), on_gpu), gradients(expected, leaves), strict=True):
        assert relative_error(grad.double().cpu(), expected_grad.double()) < limit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_long_rows_on_a_gpu_need_no_memory_for_all_pairs() -> None:
    for rule in (AttentionParams(0.2), AttentionParams(0.2, softcap=9.0)):
        q, k, v = (
            torch.randn(1, 2**15, 1, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, rule, SequenceLayout(torch.tensor([0, 20000, 2**15]))).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 2**28  # all pairs in bf16: 2 GiB
