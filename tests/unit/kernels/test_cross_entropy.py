"""The chunked loss equals the float64 loss of full logits: values and all gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.helpers.largest_tensor import LargestTensor
from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import (
    load_model,
    make_batch,
    make_checkpoint,
    random_tokens,
    relative_error,
    shuffle_adapter,
)
from tests.helpers.triton_interpreter import requires_interpreter_loops
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.kernels import cross_entropy
from tunekit.kernels.cross_entropy import (
    CrossEntropyTerms,
    CustomChunkLoss,
    linear_cross_entropy,
    token_logps,
    token_losses,
)
from tunekit.kernels.loss_cases import TERMS, finish_logits, token_loss_definition
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decoder import Decoder, Head
from tunekit.models.spec import DecoderSpec

KERNEL = cross_entropy
BF16, FP32 = torch.bfloat16, torch.float32
LIMITS = {FP32: 1e-5, BF16: 2e-2, torch.half: 2e-3}
PLAIN = CrossEntropyTerms()


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "TOKEN_MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(cross_entropy, "GRAD_SLICE_SIZE", {"cpu": 30})  # three rows of a weight with 10 columns


def make_head(dim: int, vocab: int, terms: CrossEntropyTerms = PLAIN, dtype: torch.dtype = FP32) -> Head:
    """Build a head whose logits are large enough for a softcap to matter."""
    head = Head(DecoderSpec(vocab, dim, (), logit_scale=terms.scale, logit_softcap=terms.softcap))
    head.weight.data.normal_(std=2 * dim**-0.5)
    return head.to(dtype)


def assert_same(actual: Tensor, expected: Tensor, inputs: list[Tensor], limit: float = 1e-5) -> None:
    assert actual.dtype == FP32
    assert relative_error(actual.double(), expected.double()) < limit
    weights = torch.linspace(0.3, 1.7, actual.numel()).view(actual.shape)
    grads, expected_grads = (
        torch.autograd.grad((x * weights).sum(), inputs, allow_unused=True) for x in (actual, expected)
    )
    for a, b, x in zip(grads, expected_grads, inputs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == x.dtype and relative_error(a.float(), b.float()) < limit)


def clamped_error(actual: Tensor, expected: Tensor) -> float:
    """Relative error for values that may be zero."""
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()


# Losses of the logits of a chunk


def check_losses(
    loss_fn: Callable[..., Tensor], terms: CrossEntropyTerms, logits: Tensor, targets: Tensor, weights: Tensor | None
) -> None:
    """Check losses, and gradients that are written into the logits."""
    numbers = [terms.scale, terms.softcap or 0.0, terms.smoothing, terms.z_loss]
    raw = logits.double().requires_grad_()
    is_target = targets >= 0
    expected = (
        token_loss_definition(terms, finish_logits(raw, terms.scale, terms.softcap), targets.clamp(min=0)) * is_target
    )
    (expected_grad,) = torch.autograd.grad((expected if weights is None else expected * weights).sum(), raw)
    untouched = logits.clone()
    without_grad = loss_fn(untouched, targets, weights, numbers, False)
    assert torch.equal(untouched, logits), "without gradients the logits are unchanged"
    losses = loss_fn(logits, targets, weights, numbers, True)
    assert torch.equal(losses, without_grad) and not losses[~is_target].any() and not logits[~is_target].any()
    assert losses.dtype == FP32 and clamped_error(losses, expected.detach()) < 1e-5
    assert clamped_error(logits, expected_grad) < LIMITS[logits.dtype]


@pairwise(
    indirect=["backend"],
    backend=("fast", "reference"),
    vocab=[1, 5, 16, 33, 4096 + 37],
    terms=TERMS,
    dtype=LIMITS.keys(),
)
def test_losses_and_in_place_gradients(vocab: int, terms: CrossEntropyTerms, dtype: torch.dtype, backend: None) -> None:
    torch.manual_seed(vocab)
    logits, targets = (torch.randn(9, vocab) * 4 + 1).to(dtype), torch.randint(0, vocab, (9,))
    targets[4] = IGNORE
    check_losses(token_losses, terms, logits.clone(), targets, None)
    check_losses(token_losses, terms, logits.clone(), targets, torch.rand(9) - 0.3)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    vocab=st.integers(2, 300),
    terms=st.sampled_from([*TERMS.values()]),
    dtype=st.sampled_from([FP32, BF16]),
    size=st.floats(0.01, 30),
    seed=st.integers(0, 2**31),
)
def test_random_sizes(
    rows: int, vocab: int, terms: CrossEntropyTerms, dtype: torch.dtype, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * size).to(dtype)
    check_losses(token_losses, terms, logits, torch.randint(0, vocab, (rows,), generator=generator), None)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_extreme_logits(dtype: torch.dtype, backend: None) -> None:
    """Far from zero, and far from each other."""
    torch.manual_seed(0)
    ordinary = torch.randn(4, 50)
    rows = [
        ordinary + 1e4,
        ordinary - 1e4,
        ordinary * 1e4,
        torch.zeros(4, 50),
        ordinary * 1e-6,
        torch.full((4, 50), -1e4),
    ]
    logits = torch.cat(rows).to(dtype)
    for terms in (PLAIN, CrossEntropyTerms(smoothing=0.1), CrossEntropyTerms(softcap=30.0)):
        check_losses(token_losses, terms, logits.clone(), torch.arange(24), None)


def test_nan_and_inf_propagate(backend: None) -> None:
    logits = torch.randn(3, 40)
    logits[0, 3], logits[1, 38] = float("nan"), float("inf")
    for terms in ([1.0, 0.0, 0.0, 0.0], [1.0, 5.0, 0.0, 0.0]):
        losses = token_losses(logits.clone(), torch.tensor([3, 4, 5]), None, terms, True)
        assert losses[0].isnan() and losses[2].isfinite()
        assert losses[1].isnan() or terms[1]  # a softcap makes infinity finite


def test_target_beyond_vocabulary_is_an_error(backend: None) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        token_losses(torch.randn(3, 40), torch.tensor([3, 40, 5]), None, [1.0, 0.0, 0.0, 0.0], True)


def test_strided_inputs(backend: None) -> None:
    for logits in (torch.randn(6, 60)[:, 7:50], torch.randn(43, 6).T):
        targets, weights = torch.randint(0, 43, (6, 2))[:, 1], torch.rand(6, 3)[:, 2]
        check_losses(token_losses, TERMS["all terms"], logits, targets, weights)


def test_number_of_threads_does_not_change_bits() -> None:
    logits, targets = torch.randn(50, 5000).to(BF16), torch.randint(0, 5000, (50,))
    threads, results = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        grad_logits = logits.clone()
        results.append((token_losses(grad_logits, targets, None, [1.0, 9.0, 0.1, 0.1], True), grad_logits))
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


@requires_interpreter_loops
@pairwise(block_size=[16, 8192], terms=TERMS, dtype=LIMITS.keys())
def test_interpreted_kernel_equals_definition(
    block_size: int, terms: CrossEntropyTerms, dtype, interpreted: ModuleType, monkeypatch
) -> None:
    monkeypatch.setattr(interpreted, "MAX_BLOCK_SIZE", block_size)
    torch.manual_seed(block_size)
    logits, targets = (torch.randn(4, 50) * 4 + 1).to(dtype)[:, :37], torch.tensor([3, 36, IGNORE, 16])
    check_losses(interpreted.token_losses, terms, logits.clone(), targets, None)
    check_losses(interpreted.token_losses, terms, logits, targets, torch.rand(4))


@requires_interpreter_loops
def test_interpreted_kernel_with_extreme_logits(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "MAX_BLOCK_SIZE", 16)
    ordinary, targets = torch.randn(2, 50), torch.tensor([4, 40, 7, 8, 9, 10])
    for terms in (PLAIN, CrossEntropyTerms(smoothing=0.1), CrossEntropyTerms(softcap=30.0)):
        check_losses(
            interpreted.token_losses,
            terms,
            torch.cat([ordinary + 1e4, ordinary * 1e4, ordinary - 1e4]),
            targets,
            None,
        )
    with_nan = ordinary.clone()
    with_nan[0, 3] = float("nan")
    for softcap in (0.0, 5.0):
        losses = interpreted.token_losses(with_nan.clone(), torch.tensor([5, 50]), None, [1.0, softcap, 0.0, 0.0], True)
        assert losses.isnan().all(), "also for a target outside the vocabulary"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("trained", [False, True])
def test_loss_does_not_synchronize_with_the_gpu(trained: bool, tmp_path: Path) -> None:
    head = make_head(64, 5000, dtype=FP32 if trained else BF16).requires_grad_(trained).cuda()
    model, micro_batch = (
        load_model(make_checkpoint(tmp_path, "gemma2")).cuda(),
        make_batch(random_tokens(3, 40)).to("cuda"),
    )
    hidden, targets = torch.randn(300, 64, device="cuda").to(BF16).requires_grad_(), torch.arange(300, device="cuda")
    try:
        for mode in ("default", "error"):  # the first pass compiles kernels
            torch.cuda.set_sync_debug_mode(mode)
            losses = [
                linear_cross_entropy(hidden, targets, head, PLAIN),
                -token_logps(hidden, targets, head).sum(),
            ]
            torch.autograd.backward([*losses, CrossEntropy()(model, micro_batch)])
    finally:  # later tests of the process would fail in this mode
        torch.cuda.set_sync_debug_mode("default")
    expected = token_loss_definition(PLAIN, head(hidden.double()), targets).sum()
    assert all(relative_error(loss.double(), expected) < 1e-2 for loss in losses)


# Fused head and loss


@pairwise(indirect=["backend"], backend=("fast", "reference"), terms=TERMS, count=[1, 3, 4, 5, 8, 11])
def test_values_and_gradients(terms: CrossEntropyTerms, count: int, chunks_of_four: None, backend: None) -> None:
    torch.manual_seed(count)
    head, hidden = make_head(10, 13, terms), torch.randn(count, 10, requires_grad=True)
    targets = torch.randint(0, 13, (count,))
    mine = linear_cross_entropy(hidden, targets, head, terms)
    assert_same(mine, token_loss_definition(terms, head(hidden.double()), targets).sum(), [hidden, head.weight])


def test_custom_loss_gets_the_logits_of_the_head(chunks_of_four: None) -> None:
    terms = CrossEntropyTerms(scale=1.5, softcap=4.0)
    head, hidden = make_head(10, 13, terms), torch.randn(11, 10, requires_grad=True)
    targets = torch.randint(0, 13, (11,))

    def measure(logits: Tensor, targets: Tensor) -> Tensor:
        assert logits.dtype == FP32
        return F.cross_entropy(logits, targets, reduction="none").square().sum()

    loss = linear_cross_entropy(hidden, targets, head, CustomChunkLoss(measure, head.scale_logits))
    assert_same(
        loss, token_loss_definition(PLAIN, head(hidden.double()), targets).square().sum(), [hidden, head.weight]
    )


@pytest.mark.parametrize("fn", [linear_cross_entropy, token_logps])
def test_selected_rows(fn: Callable[..., Tensor], chunks_of_four: None) -> None:
    """Other rows have a zero gradient."""
    head, hidden = make_head(10, 13), torch.randn(11, 10, requires_grad=True)
    targets, rows = torch.randint(0, 13, (11,)), torch.tensor([0, 2, 3, 7, 8, 10])
    targets[1] = IGNORE
    terms = () if fn is token_logps else (PLAIN,)
    expected = token_loss_definition(PLAIN, head(hidden[rows].double()), targets[rows])
    assert_same(
        fn(hidden, targets, head, *terms, rows=rows), expected.sum() if terms else -expected, [hidden, head.weight]
    )


def add_adapter(adapter: LoRAConfig, head: Head) -> list[Tensor]:
    """Add an adapter to a frozen head and return its trained parameters."""
    head.requires_grad_(False)
    adapter.wrap_layer(head, adapter.rank, adapter.alpha)
    head.lora_A.to_empty(device="cpu"), head.lora_B.to_empty(device="cpu")
    if isinstance(adapter, DoRAConfig):
        head.lora_magnitude_vector = torch.nn.Parameter(head.weight.float().norm(dim=1))
    shuffle_adapter(head)
    trained = [p for p in head.parameters() if p.requires_grad]
    assert len(trained) == (3 if isinstance(adapter, DoRAConfig) else 2)
    return trained


@pairwise(
    adapter=[LoRAConfig(3), DoRAConfig(3)],
    terms=[PLAIN, CrossEntropyTerms(scale=0.5, softcap=5.0)],
    fn=[linear_cross_entropy, token_logps],
)
def test_frozen_head_with_adapter(adapter: LoRAConfig, terms: CrossEntropyTerms, fn, chunks_of_four: None) -> None:
    head, hidden = make_head(10, 13, terms), torch.randn(11, 10, requires_grad=True)
    inputs, targets = [hidden, *add_adapter(adapter, head)], torch.randint(0, 13, (11,))
    expected = token_loss_definition(terms, head(hidden.double()), targets)
    if fn is linear_cross_entropy:
        assert_same(linear_cross_entropy(hidden, targets, head, terms), expected.sum(), inputs)
    else:
        assert_same(token_logps(hidden, targets, head), -expected, inputs)


def test_dropout_mask_is_the_same_in_both_passes(chunks_of_four: None) -> None:
    head, hidden = make_head(10, 13), torch.randn(11, 10, requires_grad=True)
    trained, targets = add_adapter(LoRAConfig(3, dropout=0.5), head), torch.randint(0, 13, (11,))
    torch.manual_seed(3)
    actual = token_logps(hidden, targets, head)
    torch.manual_seed(3)
    masks = [F.dropout(torch.ones(4, 10), 0.5) for _ in range(3)]
    mask = torch.cat(masks)[:11]
    low = F.linear(F.linear(hidden * mask, head.lora_A.weight), head.lora_B.weight) * head.lora_scale
    expected = F.linear(hidden, head.weight) + low
    before = torch.get_rng_state()
    assert_same(actual, -token_loss_definition(PLAIN, expected, targets), [hidden, *trained])
    assert torch.equal(torch.get_rng_state(), before)


def test_frozen_head_has_no_gradient() -> None:
    head, hidden = make_head(10, 13).requires_grad_(False), torch.randn(11, 10, requires_grad=True)
    for loss in (
        linear_cross_entropy(hidden, torch.arange(11), head, PLAIN),
        -token_logps(hidden, torch.arange(11), head).sum(),
    ):
        loss.backward()
        assert head.weight.grad is None
    loss = linear_cross_entropy(hidden, torch.arange(11), head, PLAIN)
    assert [tuple(t.shape) for t in loss.grad_fn.saved_tensors] == [(11, 10)]


def test_no_grad_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets = make_head(10, 13), torch.randn(11, 10, requires_grad=True), torch.arange(11)
    gradient_flags = []

    def recording_loss(logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        gradient_flags.append(gradient)
        return PLAIN(logits, targets, weights, gradient)

    with torch.no_grad():
        loss, logps = linear_cross_entropy(hidden, targets, head, recording_loss), token_logps(hidden, targets, head)
        expected = token_loss_definition(PLAIN, head(hidden.double()), targets)
    assert gradient_flags == [False] and not loss.requires_grad and not logps.requires_grad
    assert relative_error(loss.double(), expected.sum()) < 1e-5 and relative_error(logps.double(), -expected) < 1e-5


@pytest.mark.parametrize("trained", [False, True])
def test_no_targets_give_zero_loss_and_gradients(trained: bool) -> None:
    """A rank without rows takes part anyway."""
    head, hidden = make_head(10, 13).requires_grad_(trained), torch.randn(7, 10, requires_grad=True)
    no_rows, targets = torch.zeros(0, dtype=torch.long), torch.full((7,), IGNORE)
    for _ in range(2):  # a second micro-batch accumulates
        loss = linear_cross_entropy(hidden, targets, head, PLAIN, no_rows)
        loss.backward()
        assert loss.item() == 0 and loss.dtype == FP32
    token_logps(hidden, targets, head, no_rows).sum().backward()
    assert not hidden.grad.any()
    assert not trained or not head.weight.grad.any()


@pairwise(indirect=["backend"], backend=("fast", "reference"), terms=TERMS, weights=[FP32, BF16])
def test_bf16(terms: CrossEntropyTerms, weights: torch.dtype, chunks_of_four: None, backend: None) -> None:
    """Matmuls in bf16, the loss in fp32, and gradients of fp32 weights in fp32."""
    torch.manual_seed(0)
    head, hidden = make_head(64, 50, terms, weights), torch.randn(30, 64).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (30,))
    expected = token_loss_definition(terms, head(hidden.double()), targets)
    assert_same(linear_cross_entropy(hidden, targets, head, terms), expected.sum(), [hidden, head.weight], 2e-2)
    if terms == CrossEntropyTerms(terms.scale, terms.softcap):
        assert_same(
            token_logps(hidden, targets, head),
            -token_loss_definition(terms, head(hidden.double()), targets),
            [hidden],
            2e-2,
        )


def test_gradient_of_bf16_weights_accumulates_in_fp32(chunks_of_four: None) -> None:
    """Accumulating 75 chunks in bf16 would give an error of 1%."""
    torch.manual_seed(0)
    head, hidden = make_head(16, 20, dtype=BF16), torch.randn(300, 16).bfloat16()
    hidden, targets = (hidden.abs() + 1).requires_grad_(), torch.zeros(300, dtype=torch.long)
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, targets, head, PLAIN), head.weight)
    exact = head.weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(token_loss_definition(PLAIN, hidden.double() @ exact.T, targets).sum(), exact)
    assert relative_error(grad.double(), expected) < 5e-3  # one rounding to bf16 is 4e-3


def test_repeated_runs_give_the_same_bits() -> None:
    head, hidden, targets = make_head(64, 50), torch.randn(130, 64).bfloat16().requires_grad_(), torch.arange(130) % 50
    runs = []
    for _ in range(2):
        loss = linear_cross_entropy(hidden, targets, head, PLAIN)
        runs.append([loss, *torch.autograd.grad(loss * 0.3, [hidden, head.weight])])
    assert all(map(torch.equal, *runs))


def test_activation_checkpointing(chunks_of_four: None) -> None:
    head, hidden, targets = make_head(10, 13), torch.randn(11, 10, requires_grad=True), torch.arange(11)
    for fn in (
        lambda h: linear_cross_entropy(h * 2, targets, head, PLAIN),
        lambda h: token_logps(h * 2, targets, head),
    ):
        assert_same(checkpoint(fn, hidden, use_reentrant=False), fn(hidden).double(), [hidden, head.weight])


def test_second_backward_pass_is_an_error() -> None:
    """The gradient is scaled in place, so a second backward pass is an error."""
    head, hidden = make_head(10, 13), torch.randn(11, 10, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.arange(11), head, PLAIN) * 0.5
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_compile_around_the_loss() -> None:
    head, hidden, targets = make_head(10, 13), torch.randn(11, 10, requires_grad=True), torch.arange(11)

    def fn(x: Tensor) -> Tensor:
        return linear_cross_entropy(x * 2, targets, head, PLAIN) + token_logps(x, targets, head).sum()

    assert_same(torch.compile(fn, backend="aot_eager")(hidden), fn(hidden).double(), [hidden, head.weight])


def test_operator_is_registered_consistently() -> None:
    logits, targets = torch.randn(4, 9), torch.arange(4)
    for weights in (None, torch.rand(4)):
        torch.library.opcheck(token_losses, (logits, targets, weights, [1.0, 2.0, 0.1, 0.1], True))


@pytest.mark.parametrize("fn", [linear_cross_entropy, token_logps])
@pytest.mark.parametrize("vocab", [2**15, 2**17, 2**18])
def test_memory_does_not_grow_with_the_vocabulary(vocab: int, fn: Callable[..., Tensor]) -> None:
    """With a frozen head: a trained one has a gradient of its size."""
    head, hidden = make_head(4, vocab, dtype=BF16).requires_grad_(False), torch.randn(1100, 4).to(BF16).requires_grad_()
    with LargestTensor() as largest:
        fn(hidden, torch.arange(1100), head, *(() if fn is token_logps else (PLAIN,))).sum().backward()
    assert hidden.grad.any() and 2 * largest.numel <= cross_entropy.CHUNK_BYTES["cpu"] < 2 * 1100 * vocab


@dataclass(frozen=True)
class Definition(CrossEntropy):
    """The definition, applied to the fp32 logits of a chunk."""

    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_loss_definition(
            CrossEntropyTerms(smoothing=self.label_smoothing, z_loss=self.z_loss), logits, targets
        ).sum()


@pairwise(
    name=["llama3.2", "llama-biases", "gemma2", "granite"],
    loss=[(), (0.1,), (0.0, 0.01), (0.2, 0.1)],
    kind=[CrossEntropy, Definition],
)
def test_loss_of_a_model_equals_definition(
    name: str, loss: tuple[float, ...], kind, chunks_of_four: None, tmp_path: Path
) -> None:
    """Includes tied embeddings, which get a gradient from both uses."""
    model = load_model(make_checkpoint(tmp_path, name))
    micro_batch = make_batch(random_tokens(3, 11))
    assert_same(
        kind(*loss)(model, micro_batch), full_loss(model, micro_batch, CrossEntropy(*loss)), [*model.parameters()], 2e-5
    )


def full_loss(model: Decoder, micro_batch: Batch, loss: CrossEntropy) -> Tensor:
    targets = micro_batch.targets.flatten()
    is_target = targets != IGNORE
    logits = model(micro_batch.tokens, micro_batch.positions, micro_batch.layout).flatten(0, 1)
    torch_loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    terms = CrossEntropyTerms(smoothing=loss.label_smoothing, z_loss=loss.z_loss)
    expected = token_loss_definition(terms, logits[is_target], targets[is_target]).sum()
    assert loss.label_smoothing or loss.z_loss or torch_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    return expected


def test_gradient_scale_is_not_rounded_to_bf16() -> None:
    grad, scale = torch.randn(5000, 3).bfloat16(), torch.tensor(1 / 300)
    assert scale.bfloat16().float() != scale
    assert torch.equal(cross_entropy.scale_gradient(grad.clone(), scale), (grad.double() / 300).bfloat16())
    rows = torch.rand(5000, 1)
    assert torch.equal(cross_entropy.scale_gradient(grad.clone(), rows), (grad.float() * rows).bfloat16())


@pytest.mark.parametrize(("count", "vocab"), [(0, 50), (1, 50), (64, 50), (2048, 49152), (2049, 49152), (500, 2**40)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_chunks_have_equal_size_within_the_limit(count: int, vocab: int, dtype: torch.dtype) -> None:
    like = torch.empty(0, dtype=dtype)
    size, multiple = cross_entropy.chunk_size(count, vocab, like), cross_entropy.TOKEN_MULTIPLE
    assert size % multiple == 0
    assert size <= multiple or size * vocab * like.itemsize <= cross_entropy.CHUNK_BYTES["cpu"]
    assert 0 < size < max(count, 1) + multiple
    assert -(-count // size) * (size - multiple) < max(count, 1), "smaller chunks would not do"


class CountingSharding:
    """Sharding of 97 token ids on one of two ranks that counts collectives and returns their input."""

    total, max_size = 97, 49

    def __init__(self) -> None:
        self.start, self.num_collectives = 0, 0

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        self.num_collectives += 1
        return x

    all_reduce_max = all_gather = all_reduce_sum


def test_ranks_with_different_shards_use_the_same_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 48 * 4 * 2 * cross_entropy.TOKEN_MULTIPLE  # twice as many tokens with 48 ids as with 49
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", limit)
    hidden, targets, shardings = torch.randn(128, 8), torch.randint(97, (128,)), []
    for ids in (49, 48):
        head, sharding = make_head(8, ids).requires_grad_(False), CountingSharding()
        head.vocab_shard = sharding  # type: ignore[assignment]
        linear_cross_entropy(hidden, targets, head, CrossEntropyTerms(vocab_shard=sharding))
        shardings.append(sharding)
    assert shardings[0].num_collectives == shardings[1].num_collectives > 2
