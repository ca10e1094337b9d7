"""Documents that go on from the first tokens of another: attention is what it is where each is written whole."""

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from tests.checkpoints import error
from tests.kernels.test_attention import sinks_of
from tests.kernels.test_attention_gpu import CPU, flash_backward, flash_forward, seen
from tests.kernels.test_attention_native import RULES, gradients, made, spread, truth
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.context_parallel import ContextParallelSharding
from tunekit.kernels import attention, attention_cpu, attention_gpu, shared_prefix
from tunekit.kernels.attention import AttentionParams, attention_sharded
from tunekit.kernels.sequence_layout import SequenceLayout

# Rows of 300 tokens. Lengths of what is written of each document; how many tokens of which one stand before it.
CASES = {
    "pairs": ([140, 60, 60, 40, 250, 49, 1], [(0, 0), (130, 0), (0, 0), (1, 2), (0, 0), (249, 4), (0, 0)]),
    "many of one": ([200, 20, 30, 49, 1, 300], [(0, 0), (200, 0), (150, 0), (64, 0), (199, 0), (0, 0)]),
    "all of a beginning, and one token more": ([257, 1, 42, 299, 1], [(0, 0), (257, 0), (0, 0), (0, 0), (299, 3)]),
    "none": ([300, 300], [(0, 0), (0, 0)]),
}
EVERY = [(name, "pairs") for name in RULES]
EVERY += [(name, case) for name in ("causal", "window and chunk") for case in list(CASES)[1:3]]
needed = pytest.mark.skipif(not attention_cpu.able(), reason="no compiler, or a processor without bf16 products")


def documents(case: str) -> tuple[Tensor, Tensor]:
    """Bounds of what is written, and of each document how many tokens stand before that and where."""
    lengths, before = CASES[case]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return offsets, torch.tensor([[count, offsets[of] if count else 0] for count, of in before], dtype=torch.int32)


def apart(case: str) -> tuple[list[int], list[list[int]], list[int]]:
    """Bounds of documents that are written whole, where the tokens of each are, and which of them all are its own."""
    lengths, before = CASES[case]
    starts, whole, own, done = [0, *itertools.accumulate(lengths)], [], [], 0
    for number, (length, (count, of)) in enumerate(zip(lengths, before, strict=True)):
        whole.append([*range(starts[of], starts[of] + count), *range(starts[number], starts[number] + length)])
        own += range(done + count, done := done + count + length)
    return [0, *itertools.accumulate(map(len, whole))], whole, own


def wanted(inputs: list[Tensor], rule: AttentionParams, case: str, sinks: Tensor | None = None) -> Tensor:
    """From documents that are written whole, in float64."""
    bounds, whole, own = apart(case)
    places = torch.tensor([place for places in whole for place in places])
    alone = [x.flatten(0, 1)[places][None] for x in inputs]
    return truth(alone, rule, bounds, sinks)[0][own].view(*inputs[0].shape[:3], -1)


def same(y: Tensor, right: Tensor, inputs: list[Tensor], limit: float = 2e-6) -> None:
    assert error(y.double(), right) < limit
    for mine, other in zip(gradients(y, inputs), gradients(right, inputs), strict=True):
        assert error(mine.double(), other.double()) < limit


@pytest.mark.parametrize("case", CASES)
def test_what_documents_see(case: str) -> None:
    found = shared_prefix.prefix_keys(SequenceLayout(*documents(case)), CPU)
    bounds, whole, _ = apart(case)
    assert found.offsets.dtype == torch.int32 and found.offsets.tolist() == bounds
    assert found.places.tolist() == [place for places in whole for place in places]


@pytest.mark.parametrize("form", [pytest.param("compiled", marks=needed), "torch"])
@pytest.mark.parametrize(("name", "case"), EVERY)
def test_as_if_written_whole(name: str, case: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "torch":
        monkeypatch.setattr(attention_cpu, "able", lambda: False)
    layout = SequenceLayout(*documents(case))
    inputs = made(torch.float32, 6, 2, 24, 20)
    y = attention.attention(*inputs, RULES[name], layout, None, shared_prefix.prefix_keys(layout, CPU))
    same(y, wanted(inputs, RULES[name], case), inputs)


@pytest.mark.parametrize("form", [pytest.param("compiled", marks=needed), "torch"])
@pytest.mark.parametrize("name", ["causal", "window and chunk"])
def test_sinks(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "torch":
        monkeypatch.setattr(attention_cpu, "able", lambda: False)
    layout = SequenceLayout(*documents("pairs"))
    inputs, sinks = made(torch.float32, 6, 2, 16, 16), sinks_of(6)
    y = attention.attention(*inputs, RULES[name], layout, sinks, shared_prefix.prefix_keys(layout, CPU))
    same(y, wanted(inputs, RULES[name], "pairs", sinks), [*inputs, sinks], 5e-6)


@needed
@pytest.mark.parametrize("name", RULES)
def test_bf16_is_as_near_as_documents_that_are_written_whole(name: str) -> None:
    layout, (bounds, whole, own) = SequenceLayout(*documents("pairs")), apart("pairs")
    inputs = made(torch.bfloat16, 6, 2, 64, 64)
    right = wanted(inputs, RULES[name], "pairs")
    mine = attention.attention(*inputs, RULES[name], layout, None, shared_prefix.prefix_keys(layout, CPU))
    places = torch.tensor([place for places in whole for place in places])
    copies = [x.flatten(0, 1)[places][None] for x in inputs]
    other = attention.attention(*copies, RULES[name], torch.tensor(bounds))[0][own].view_as(mine)
    assert spread(mine, right) <= 1.05 * spread(other, right)
    for a, b, c in zip(gradients(mine, inputs), gradients(other, inputs), gradients(right, inputs), strict=True):
        assert spread(a, c) <= 1.05 * spread(b, c)


@needed
def test_bits_do_not_depend_on_the_threads() -> None:
    layout = SequenceLayout(torch.tensor([0, 900, 1300, 1500]), torch.tensor([[0, 0], [700, 0], [899, 0]]))
    inputs, threads, results = made(torch.float32, 6, 2, 32, 32, 1500), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = attention.attention(*inputs, RULES["window"], layout, None, shared_prefix.prefix_keys(layout, CPU))
            results.append([y, *gradients(y, inputs)])
    finally:
        torch.set_num_threads(threads)
    for one, other in itertools.pairwise(results):
        assert all(map(torch.equal, one, other))


@needed
def test_compiled_once_for_all_documents() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=True)
    inputs, counts = made(torch.float32, 6, 2, 16, 16), []
    for case in ("pairs", "all of a beginning, and one token more", "many of one"):
        layout = SequenceLayout(*documents(case))
        args = *inputs, AttentionParams(0.3, window=9), layout, None, shared_prefix.prefix_keys(layout, CPU)
        assert torch.equal(compiled(*args), attention.attention(*args))
        counts.append(counter.frame_count)
    assert counts == [1, 1, 1]


@pytest.mark.parametrize(("name", "case", "sunk"), [*((*one, False) for one in EVERY), ("chunk", "many of one", True)])
def test_rows_that_ranks_share(name: str, case: str, sunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the queries of some stretches, and the keys of whole rows."""
    monkeypatch.setattr(attention, "BLOCK", 64)
    layout = SequenceLayout(*documents(case))
    inputs, sinks = made(torch.float32, 6, 2, 16, 16), sinks_of(6) if sunk else None
    right = wanted(inputs, RULES[name], case, sinks)
    own = torch.cat([torch.arange(n) for n in layout.cu_seqlens.diff()]).view(2, 300)
    counts, begins = shared_prefix.token_prefix_index(layout, own)
    positions, (q, k, v) = own + counts, inputs
    ranks = [ContextParallelSharding(MeshDim(None, 3, index)) for index in range(3)]  # type: ignore[arg-type] (nothing is sent)
    mine = []
    for rank in ranks:
        where = shared_prefix.PrefixIndex(rank.keep(counts), rank.keep(begins))
        args = RULES[name], rank.keep(positions), rank.stretches(300), sinks, where
        mine.append(attention_sharded(rank.keep(q), k, v, *args))
    for y, rank in zip(mine, ranks, strict=True):
        assert error(y.double(), rank.keep(right)) < 5e-6
    weight, learnt = torch.randn_like(right), [*inputs, *([] if sinks is None else [sinks])]
    ours = torch.autograd.grad(sum((y * rank.keep(weight)).sum() for y, rank in zip(mine, ranks, strict=True)), learnt)
    for a, b in zip(ours, torch.autograd.grad((right * weight).sum(), learnt), strict=True):
        assert error(a.double(), b.double()) < 5e-6


def pairs(rule: AttentionParams, case: str) -> Tensor:
    """Which keys (T, K), prefixes before each document's own, the written tokens see."""
    bounds, _, own = apart(case)
    return seen(rule, bounds)[own]


@pytest.mark.parametrize(("name", "case"), EVERY)
def test_blocks_on_a_gpu_are_all_that_anybody_sees(name: str, case: str) -> None:
    """And perhaps some between them, as of a prefix in front of a window."""
    rule, size, layout = RULES[name], attention_gpu.BLOCK, SequenceLayout(*documents(case))
    at = attention_gpu.cut(layout.cu_seqlens, layout.key_cu_seqlens, rule.chunk or 0)
    mask, right = attention_gpu.blocks(*at, rule.window or 0, CPU), pairs(rule, case)
    rows, columns = (-(-n // size) for n in right.shape)
    room = (0, columns * size - right.shape[1], 0, rows * size - right.shape[0])
    tiles = torch.nn.functional.pad(right, room).view(rows, size, columns, size)
    assert (mask.to_dense()[0, 0].bool() >= tiles.any(3).any(1)).all()
    for row in range(rows):
        whole = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]]
        assert all(right[row * size : (row + 1) * size, at * size : (at + 1) * size].all() for at in whole)
    query, key = (torch.arange(n) for n in right.shape)
    assert torch.equal(mask.mask_mod(0, 0, query[:, None], key), right)


@pytest.mark.parametrize(("name", "sunk"), [*((name, False) for name in RULES), ("window", True)])
def test_flex_on_a_gpu(name: str, sunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass, which there is on the CPU too."""
    monkeypatch.setattr(attention_gpu, "compiled", lambda: flex_attention)
    layout, sinks = SequenceLayout(*documents("pairs")), sinks_of(6).detach() if sunk else None
    q, k, v = inputs = [x.detach() for x in made(torch.float32, 6, 2, 24, 24)]
    found = shared_prefix.prefix_keys(layout, CPU)
    rule = RULES[name].numbers()
    y = attention_gpu.attention_gpu(q, found.take(k), found.take(v), rule, layout, sinks)
    assert error(y.double(), wanted(inputs, RULES[name], "pairs", sinks)) < 1e-6


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(("name", "case"), [one for one in EVERY if "softcap" not in one[0]])
def test_what_is_done_around_flash_attention(name: str, case: str, sunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel as it is written down, on the CPU."""
    monkeypatch.setattr(attention_gpu, "forward", flash_forward)
    monkeypatch.setattr(attention_gpu, "backward", flash_backward)
    monkeypatch.setattr(attention_gpu, "HALF_DTYPES", (torch.float32,))
    layout, sinks = SequenceLayout(*documents(case)), sinks_of(6) if sunk else None
    q, k, v = inputs = made(torch.float32, 6, 2, 16, 16)
    found = shared_prefix.prefix_keys(layout, CPU)
    rule = RULES[name].numbers()
    y = attention_gpu.attention_gpu(q, found.take(k), found.take(v), rule, layout, sinks)
    same(y, wanted(inputs, RULES[name], case, sinks), [*inputs, *([] if sinks is None else [sinks])], 5e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "case"), EVERY)
def test_on_a_gpu(name: str, case: str, dtype: torch.dtype) -> None:
    layout, inputs = SequenceLayout(*documents(case)), made(dtype, 6, 2, 64, 64)
    right, there = wanted(inputs, RULES[name], case), [x.detach().cuda().requires_grad_() for x in inputs]
    y = attention.attention(*there, RULES[name], layout, None, shared_prefix.prefix_keys(layout, there[0].device))
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert error(y.double().cpu(), right) < limit
    for mine, other in zip(gradients(y.cpu(), there), gradients(right, inputs), strict=True):
        assert error(mine.double().cpu(), other.double()) < limit
