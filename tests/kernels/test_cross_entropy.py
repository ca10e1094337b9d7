"""The loss in chunks against the loss on all logits, in float64: values and every gradient."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.checkpoints import batch, error, made, ours, shuffle_adapter, tokens
from tests.interpreter import needs_loops
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
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decoder import Decoder, Head
from tunekit.models.spec import DecoderSpec

KERNEL = cross_entropy
BF16, FP32 = torch.bfloat16, torch.float32
LIMITS = {FP32: 1e-5, BF16: 1e-2, torch.half: 2e-3}
PLAIN = CrossEntropyTerms()
TERMS = [
    PLAIN,
    CrossEntropyTerms(smoothing=0.1),
    CrossEntropyTerms(z_loss=0.01),
    CrossEntropyTerms(scale=0.4),
    CrossEntropyTerms(softcap=3.0),
    CrossEntropyTerms(scale=2.5, softcap=7.0, smoothing=0.2, z_loss=0.1),
]


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "ROOM", {"cpu": 1})
    monkeypatch.setattr(cross_entropy, "SLICE", {"cpu": 30})  # three rows of a weight whose rows have ten numbers


def head_of(dim: int, vocab: int, terms: CrossEntropyTerms = PLAIN, dtype: torch.dtype = FP32) -> Head:
    """A head whose logits spread far enough for a cap to bite."""
    head = Head(DecoderSpec(vocab, dim, (), logit_scale=terms.scale, logit_softcap=terms.softcap))
    head.weight.data.normal_(std=2 * dim**-0.5)
    return head.to(dtype)


def each(terms: CrossEntropyTerms, logits: Tensor, targets: Tensor) -> Tensor:
    """The definition, token by token, in float64, of logits that are scaled and capped."""
    logs = logits.double().log_softmax(-1)
    right = logs.gather(-1, targets[:, None]).squeeze(1)
    spread = (1 - terms.smoothing) * right + terms.smoothing * logs.mean(-1)
    return terms.z_loss * logits.double().logsumexp(-1).square() - spread


def capped(terms: CrossEntropyTerms, raw: Tensor) -> Tensor:
    x = raw.double() * terms.scale
    return x if terms.softcap is None else (x / terms.softcap).tanh() * terms.softcap


def agree(mine: Tensor, wanted: Tensor, inputs: list[Tensor], limit: float = 1e-5) -> None:
    assert mine.dtype == FP32
    assert error(mine.double(), wanted.double()) < limit
    weights = torch.linspace(0.3, 1.7, mine.numel()).view(mine.shape)
    found, truth = (torch.autograd.grad((x * weights).sum(), inputs, allow_unused=True) for x in (mine, wanted))
    for a, b, x in zip(found, truth, inputs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == x.dtype and error(a.float(), b.float()) < limit)


def near(found: Tensor, wanted: Tensor) -> float:
    """The error where what is wanted may be zero."""
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=0.1)).item()


# The losses of a chunk's logits


def check_losses(
    of: Callable[..., Tensor], terms: CrossEntropyTerms, logits: Tensor, targets: Tensor, weights: Tensor | None
) -> None:
    """Losses, and the gradient in place of the logits."""
    numbers = [terms.scale, terms.softcap or 0.0, terms.smoothing, terms.z_loss]
    raw = logits.double().requires_grad_()
    real = targets >= 0
    wanted = each(terms, capped(terms, raw), targets.clamp(min=0)) * real
    (slope,) = torch.autograd.grad((wanted if weights is None else wanted * weights).sum(), raw)
    untouched = logits.clone()
    quietly = of(untouched, targets, weights, numbers, False)
    assert torch.equal(untouched, logits), "without gradients the logits stay"
    found = of(logits, targets, weights, numbers, True)
    assert torch.equal(found, quietly) and not found[~real].any() and not logits[~real].any()
    assert found.dtype == FP32 and near(found, wanted.detach()) < 1e-5
    assert near(logits, slope) < LIMITS[logits.dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 4096 + 37])
def test_losses_and_gradients_in_place(vocab: int, terms: CrossEntropyTerms, dtype: torch.dtype, way: None) -> None:
    torch.manual_seed(vocab)
    logits, targets = (torch.randn(9, vocab) * 4 + 1).to(dtype), torch.randint(0, vocab, (9,))
    targets[4] = IGNORE
    check_losses(token_losses, terms, logits.clone(), targets, None)
    check_losses(token_losses, terms, logits.clone(), targets, torch.rand(9) - 0.3)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    vocab=st.integers(2, 300),
    terms=st.sampled_from(TERMS),
    dtype=st.sampled_from([FP32, BF16]),
    size=st.floats(0.01, 30),
    seed=st.integers(0, 2**31),
)
def test_any_size(rows: int, vocab: int, terms: CrossEntropyTerms, dtype: torch.dtype, size: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=draw) * size).to(dtype)
    check_losses(token_losses, terms, logits, torch.randint(0, vocab, (rows,), generator=draw), None)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_extreme_logits(dtype: torch.dtype, way: None) -> None:
    """Far from zero, and far from each other."""
    torch.manual_seed(0)
    near = torch.randn(4, 50)
    rows = [near + 1e4, near - 1e4, near * 1e4, torch.zeros(4, 50), near * 1e-6, torch.full((4, 50), -1e4)]
    logits = torch.cat(rows).to(dtype)
    for terms in (PLAIN, CrossEntropyTerms(smoothing=0.1), CrossEntropyTerms(softcap=30.0)):
        check_losses(token_losses, terms, logits.clone(), torch.arange(24), None)


def test_what_is_no_number_stays_so(way: None) -> None:
    logits = torch.randn(3, 40)
    logits[0, 3], logits[1, 38] = float("nan"), float("inf")
    for terms in ([1.0, 0.0, 0.0, 0.0], [1.0, 5.0, 0.0, 0.0]):
        found = token_losses(logits.clone(), torch.tensor([3, 4, 5]), None, terms, True)
        assert found[0].isnan() and found[2].isfinite()
        assert found[1].isnan() or terms[1]  # a cap makes infinity a number


def test_a_target_beyond_the_vocabulary_is_an_error(way: None) -> None:
    with pytest.raises((IndexError, RuntimeError), match="beyond|out of bounds"):
        token_losses(torch.randn(3, 40), torch.tensor([3, 40, 5]), None, [1.0, 0.0, 0.0, 0.0], True)


def test_inputs_that_are_part_of_larger_ones(way: None) -> None:
    for logits in (torch.randn(6, 60)[:, 7:50], torch.randn(43, 6).T):
        targets, weights = torch.randint(0, 43, (6, 2))[:, 1], torch.rand(6, 3)[:, 2]
        check_losses(token_losses, TERMS[-1], logits, targets, weights)


def test_the_same_bits_whatever_the_threads() -> None:
    logits, targets = torch.randn(50, 5000).to(BF16), torch.randint(0, 5000, (50,))
    threads, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        made = logits.clone()
        found.append((token_losses(made, targets, None, [1.0, 9.0, 0.1, 0.1], True), made))
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


@needs_loops
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("most", [16, 8192])
def test_a_program_for_each_row(
    most: int, terms: CrossEntropyTerms, dtype, interpreted: ModuleType, monkeypatch
) -> None:
    monkeypatch.setattr(interpreted, "MOST", most)
    torch.manual_seed(most)
    logits, targets = (torch.randn(5, 90) * 4 + 1).to(dtype)[:, :77], torch.tensor([3, 76, IGNORE, 0, 16])
    check_losses(interpreted.token_losses, terms, logits.clone(), targets, None)
    check_losses(interpreted.token_losses, terms, logits, targets, torch.rand(5))


@needs_loops
def test_a_program_meets_extreme_logits(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "MOST", 16)
    near, of = torch.randn(2, 50), torch.tensor([4, 40, 7, 8, 9, 10])
    for terms in (PLAIN, CrossEntropyTerms(smoothing=0.1), CrossEntropyTerms(softcap=30.0)):
        check_losses(interpreted.token_losses, terms, torch.cat([near + 1e4, near * 1e4, near - 1e4]), of, None)
    bad = near.clone()
    bad[0, 3] = float("nan")
    for softcap in (0.0, 5.0):
        found = interpreted.token_losses(bad.clone(), torch.tensor([5, 50]), None, [1.0, softcap, 0.0, 0.0], True)
        assert found.isnan().all(), "nor is the loss of a target that the vocabulary does not have"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_a_gpu_gives_the_same(terms: CrossEntropyTerms, dtype: torch.dtype) -> None:
    def on_gpu(logits: Tensor, targets: Tensor, weights: Tensor | None, numbers: list[float], on: bool) -> Tensor:
        moved = logits.cuda()
        found = token_losses(moved, targets.cuda(), None if weights is None else weights.cuda(), numbers, on).cpu()
        logits.copy_(moved)
        return found

    logits, targets = (torch.randn(70, 50_001) * 4).to(dtype), torch.randint(0, 50_001, (70,))
    check_losses(on_gpu, terms, logits, targets, torch.rand(70))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("trained", [False, True])
def test_the_host_never_waits_for_a_gpu(trained: bool, tmp_path: Path) -> None:
    head = head_of(64, 5000, dtype=FP32 if trained else BF16).requires_grad_(trained).cuda()
    model, part = ours(made(tmp_path, "gemma2")).cuda(), batch(tokens(3, 40)).to("cuda")
    hidden, targets = torch.randn(300, 64, device="cuda").to(BF16).requires_grad_(), torch.arange(300, device="cuda")
    try:
        for mode in ("default", "error"):  # the first time, kernels are compiled
            torch.cuda.set_sync_debug_mode(mode)
            made_losses = [
                linear_cross_entropy(hidden, targets, head, PLAIN),
                -token_logps(hidden, targets, head).sum(),
            ]
            torch.autograd.backward([*made_losses, CrossEntropy()(model, part)])
    finally:  # in this mode later tests of the process would fail too
        torch.cuda.set_sync_debug_mode("default")
    wanted = each(PLAIN, head(hidden.double()), targets).sum()
    assert all(error(loss.double(), wanted) < 1e-2 for loss in made_losses)


# Head and loss


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_values_and_gradients(terms: CrossEntropyTerms, count: int, chunks_of_four: None, way: None) -> None:
    torch.manual_seed(count)
    head, hidden = head_of(10, 13, terms), torch.randn(count, 10, requires_grad=True)
    targets = torch.randint(0, 13, (count,))
    mine = linear_cross_entropy(hidden, targets, head, terms)
    agree(mine, each(terms, head(hidden.double()), targets).sum(), [hidden, head.weight])


def test_a_loss_of_ones_own_sees_the_logits_of_the_head(chunks_of_four: None) -> None:
    terms = CrossEntropyTerms(scale=1.5, softcap=4.0)
    head, hidden = head_of(10, 13, terms), torch.randn(11, 10, requires_grad=True)
    targets = torch.randint(0, 13, (11,))

    def measure(logits: Tensor, targets: Tensor) -> Tensor:
        assert logits.dtype == FP32
        return F.cross_entropy(logits, targets, reduction="none").square().sum()

    mine = linear_cross_entropy(hidden, targets, head, CustomChunkLoss(measure, head.finish))
    agree(mine, each(PLAIN, head(hidden.double()), targets).square().sum(), [hidden, head.weight])


@pytest.mark.parametrize("of", [linear_cross_entropy, token_logps])
def test_rows_that_count(of: Callable[..., Tensor], chunks_of_four: None) -> None:
    """The others have a gradient of zero."""
    head, hidden = head_of(10, 13), torch.randn(11, 10, requires_grad=True)
    targets, rows = torch.randint(0, 13, (11,)), torch.tensor([0, 2, 3, 7, 8, 10])
    targets[1] = IGNORE
    step = () if of is token_logps else (PLAIN,)
    wanted = each(PLAIN, head(hidden[rows].double()), targets[rows])
    agree(of(hidden, targets, head, *step, rows=rows), wanted.sum() if step else -wanted, [hidden, head.weight])


def adapted(adapter: LoRAConfig, head: Head) -> list[Tensor]:
    """Hang an adapter on a frozen head: what is trained."""
    head.requires_grad_(False)
    adapter.attach(head, adapter.rank, adapter.alpha)
    head.lora_A.to_empty(device="cpu"), head.lora_B.to_empty(device="cpu")
    if isinstance(adapter, DoRAConfig):
        head.lora_magnitude_vector = torch.nn.Parameter(head.weight.float().norm(dim=1))
    shuffle_adapter(head)
    trained = [p for p in head.parameters() if p.requires_grad]
    assert len(trained) == (3 if isinstance(adapter, DoRAConfig) else 2)
    return trained


@pytest.mark.parametrize("of", [linear_cross_entropy, token_logps])
@pytest.mark.parametrize("terms", [PLAIN, CrossEntropyTerms(scale=0.5, softcap=5.0)], ids=str)
@pytest.mark.parametrize("adapter", [LoRAConfig(3), DoRAConfig(3)])
def test_a_frozen_head_with_an_adapter(adapter: LoRAConfig, terms: CrossEntropyTerms, of, chunks_of_four: None) -> None:
    head, hidden = head_of(10, 13, terms), torch.randn(11, 10, requires_grad=True)
    inputs, targets = [hidden, *adapted(adapter, head)], torch.randint(0, 13, (11,))
    wanted = each(terms, head(hidden.double()), targets)
    if of is linear_cross_entropy:
        agree(linear_cross_entropy(hidden, targets, head, terms), wanted.sum(), inputs)
    else:
        agree(token_logps(hidden, targets, head), -wanted, inputs)


def test_dropout_falls_on_the_same_numbers_in_both_passes(chunks_of_four: None) -> None:
    head, hidden = head_of(10, 13), torch.randn(11, 10, requires_grad=True)
    trained, targets = adapted(LoRAConfig(3, dropout=0.5), head), torch.randint(0, 13, (11,))
    torch.manual_seed(3)
    mine = token_logps(hidden, targets, head)
    torch.manual_seed(3)
    drawn = [F.dropout(torch.ones(4, 10), 0.5) for _ in range(3)]
    kept = torch.cat(drawn)[:11]
    low = F.linear(F.linear(hidden * kept, head.lora_A.weight), head.lora_B.weight) * head.lora_scale
    wanted = F.linear(hidden, head.weight) + low
    before = torch.get_rng_state()
    agree(mine, -each(PLAIN, wanted, targets), [hidden, *trained])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_frozen_head_costs_no_gradient() -> None:
    head, hidden = head_of(10, 13).requires_grad_(False), torch.randn(11, 10, requires_grad=True)
    for loss in (
        linear_cross_entropy(hidden, torch.arange(11), head, PLAIN),
        -token_logps(hidden, torch.arange(11), head).sum(),
    ):
        loss.backward()
        assert head.weight.grad is None
    loss = linear_cross_entropy(hidden, torch.arange(11), head, PLAIN)
    assert [tuple(t.shape) for t in loss.grad_fn.saved_tensors] == [(11, 10)]


def test_without_gradients_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets = head_of(10, 13), torch.randn(11, 10, requires_grad=True), torch.arange(11)
    seen = []

    def watched(logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool) -> Tensor:
        seen.append(gradient)
        return PLAIN(logits, targets, weights, gradient)

    with torch.no_grad():
        loss, each_token = linear_cross_entropy(hidden, targets, head, watched), token_logps(hidden, targets, head)
        wanted = each(PLAIN, head(hidden.double()), targets)
    assert seen == [False] and not loss.requires_grad and not each_token.requires_grad
    assert error(loss.double(), wanted.sum()) < 1e-5 and error(each_token.double(), -wanted) < 1e-5


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_to_learn_is_zero_with_gradients_of_zero(trained: bool) -> None:
    """A rank that has no rows left takes part all the same."""
    head, hidden = head_of(10, 13).requires_grad_(trained), torch.randn(7, 10, requires_grad=True)
    none, targets = torch.zeros(0, dtype=torch.long), torch.full((7,), IGNORE)
    for _ in range(2):  # a second micro-batch adds to the first
        loss = linear_cross_entropy(hidden, targets, head, PLAIN, none)
        loss.backward()
        assert loss.item() == 0 and loss.dtype == FP32
    token_logps(hidden, targets, head, none).sum().backward()
    assert not hidden.grad.any()
    assert not trained or not head.weight.grad.any()


@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_bf16(terms: CrossEntropyTerms, weights: torch.dtype, chunks_of_four: None, way: None) -> None:
    """Products in bf16, the loss itself in fp32, gradients of fp32 weights in fp32."""
    torch.manual_seed(0)
    head, hidden = head_of(64, 50, terms, weights), torch.randn(30, 64).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (30,))
    wanted = each(terms, head(hidden.double()), targets)
    agree(linear_cross_entropy(hidden, targets, head, terms), wanted.sum(), [hidden, head.weight], 1e-2)
    if terms == CrossEntropyTerms(terms.scale, terms.softcap):
        agree(token_logps(hidden, targets, head), -each(terms, head(hidden.double()), targets), [hidden], 2e-2)


def test_the_gradient_of_bf16_weights_does_not_grow_worse_with_chunks(chunks_of_four: None) -> None:
    """Sums in bf16 over 75 chunks would be off by one part in a hundred."""
    torch.manual_seed(0)
    head, hidden = head_of(16, 20, dtype=BF16), torch.randn(300, 16).bfloat16()
    hidden, targets = (hidden.abs() + 1).requires_grad_(), torch.zeros(300, dtype=torch.long)
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, targets, head, PLAIN), head.weight)
    exact = head.weight.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(each(PLAIN, hidden.double() @ exact.T, targets).sum(), exact)
    assert error(found.double(), wanted) < 5e-3  # one rounding to bf16 is 4e-3


def test_twice_the_same_bits() -> None:
    head, hidden, targets = head_of(64, 50), torch.randn(130, 64).bfloat16().requires_grad_(), torch.arange(130) % 50
    runs = []
    for _ in range(2):
        loss = linear_cross_entropy(hidden, targets, head, PLAIN)
        runs.append([loss, *torch.autograd.grad(loss * 0.3, [hidden, head.weight])])
    assert all(map(torch.equal, *runs))


def test_under_checkpoint(chunks_of_four: None) -> None:
    head, hidden, targets = head_of(10, 13), torch.randn(11, 10, requires_grad=True), torch.arange(11)
    for of in (
        lambda h: linear_cross_entropy(h * 2, targets, head, PLAIN),
        lambda h: token_logps(h * 2, targets, head),
    ):
        agree(checkpoint(of, hidden, use_reentrant=False), of(hidden).double(), [hidden, head.weight])


def test_a_gradient_is_asked_for_once() -> None:
    """It is scaled in place: a second backward pass would scale it again, and says so."""
    head, hidden = head_of(10, 13), torch.randn(11, 10, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.arange(11), head, PLAIN) * 0.5
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_around() -> None:
    head, hidden, targets = head_of(10, 13), torch.randn(11, 10, requires_grad=True), torch.arange(11)

    def of(x: Tensor) -> Tensor:
        return linear_cross_entropy(x * 2, targets, head, PLAIN) + token_logps(x, targets, head).sum()

    agree(torch.compile(of, backend="aot_eager")(hidden), of(hidden).double(), [hidden, head.weight])


def test_registered_as_torch_wants_it() -> None:
    logits, targets = torch.randn(4, 9), torch.arange(4)
    for weights in (None, torch.rand(4)):
        torch.library.opcheck(token_losses, (logits, targets, weights, [1.0, 2.0, 0.1, 0.1], True))


class Largest(TorchDispatchMode):
    """Watches how many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.numbers = max(self.numbers, found.untyped_storage().nbytes() // found.itemsize)
        return found


@pytest.mark.parametrize("of", [linear_cross_entropy, token_logps])
@pytest.mark.parametrize("vocab", [2**15, 2**17, 2**18])
def test_memory_does_not_grow_with_the_vocabulary(vocab: int, of: Callable[..., Tensor]) -> None:
    """Of a frozen head: a trained one has a gradient."""
    head, hidden = head_of(4, vocab, dtype=BF16).requires_grad_(False), torch.randn(1100, 4).to(BF16).requires_grad_()
    with Largest() as seen:
        of(hidden, torch.arange(1100), head, *(() if of is token_logps else (PLAIN,))).sum().backward()
    assert hidden.grad.any() and 2 * seen.numbers <= cross_entropy.ROOM["cpu"] < 2 * 1100 * vocab


@dataclass(frozen=True)
class Definition(CrossEntropy):
    """The same, of the logits of a chunk in fp32."""

    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        return each(CrossEntropyTerms(smoothing=self.label_smoothing, z_loss=self.z_loss), logits, targets).sum()


@pytest.mark.parametrize("kind", [CrossEntropy, Definition])
@pytest.mark.parametrize("loss", [(), (0.1,), (0.0, 0.01), (0.2, 0.1)])
@pytest.mark.parametrize("name", ["llama3.2", "llama-biases", "gemma2", "granite"])
def test_through_a_model(name: str, loss: tuple[float, ...], kind, chunks_of_four: None, tmp_path: Path) -> None:
    """Also where the embedding is the head, and gets a gradient from both of its uses."""
    model = ours(made(tmp_path, name))
    part = batch(tokens(3, 11))
    agree(kind(*loss)(model, part), whole_of(model, part, CrossEntropy(*loss)), [*model.parameters()], 2e-5)


def whole_of(model: Decoder, part: Batch, loss: CrossEntropy) -> Tensor:
    targets = part.targets.flatten()
    learnt = targets != IGNORE
    logits = model(part.tokens, part.positions, part.layout).flatten(0, 1)
    plain = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    terms = CrossEntropyTerms(smoothing=loss.label_smoothing, z_loss=loss.z_loss)
    exact = each(terms, logits[learnt], targets[learnt]).sum()
    assert loss.label_smoothing or loss.z_loss or plain.item() == pytest.approx(exact.item(), rel=1e-5)
    return exact


def test_the_scale_of_a_gradient_is_not_rounded_to_bf16() -> None:
    grad, scale = torch.randn(5000, 3).bfloat16(), torch.tensor(1 / 300)
    assert scale.bfloat16().float() != scale
    assert torch.equal(cross_entropy.scaled(grad.clone(), scale), (grad.double() / 300).bfloat16())
    rows = torch.rand(5000, 1)
    assert torch.equal(cross_entropy.scaled(grad.clone(), rows), (grad.float() * rows).bfloat16())


@pytest.mark.parametrize(("count", "vocab"), [(0, 50), (1, 50), (64, 50), (2048, 49152), (2049, 49152), (500, 2**40)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_chunks_are_alike_and_have_room(count: int, vocab: int, dtype: torch.dtype) -> None:
    like = torch.empty(0, dtype=dtype)
    size, multiple = cross_entropy.chunk(count, vocab, like), cross_entropy.MULTIPLE
    assert size % multiple == 0
    assert size <= multiple or size * vocab * like.itemsize <= cross_entropy.ROOM["cpu"]
    assert 0 < size < max(count, 1) + multiple
    assert -(-count // size) * (size - multiple) < max(count, 1), "smaller ones would not do"


class Counted:
    """Of 97 ids, one rank's: what it asks of the others is counted, and left as it is."""

    total, most = 97, 49

    def __init__(self) -> None:
        self.start, self.asked = 0, 0

    def add(self, x: Tensor) -> Tensor:
        self.asked += 1
        return x

    largest = whole = add


def test_ranks_with_parts_of_other_sizes_ask_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 48 * 4 * 2 * cross_entropy.MULTIPLE  # for twice as many tokens where there are 48 ids as where there are 49
    monkeypatch.setitem(cross_entropy.ROOM, "cpu", room)
    hidden, targets, shares = torch.randn(128, 8), torch.randint(97, (128,)), []
    for ids in (49, 48):
        head, share = head_of(8, ids).requires_grad_(False), Counted()
        head.share = share  # type: ignore[assignment]
        linear_cross_entropy(hidden, targets, head, CrossEntropyTerms(share=share))
        shares.append(share)
    assert shares[0].asked == shares[1].asked > 2
