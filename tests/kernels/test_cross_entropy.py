"""The loss in chunks against the loss on all logits: values and every gradient."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.checkpoints import batch, error, made, ours, shuffle_adapter, tokens
from tunekit.adapters import DoRA, LoRA
from tunekit.data.batch import IGNORE, Batch
from tunekit.kernels import cross_entropy
from tunekit.kernels.cross_entropy import chunked_loss
from tunekit.losses import CrossEntropy
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Linear

PLAIN = CrossEntropy()
LOSSES = [PLAIN, CrossEntropy(smoothing=0.1), CrossEntropy(z_loss=0.01), CrossEntropy(smoothing=0.2, z_loss=0.1)]


@pytest.fixture(autouse=True)
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "LOGITS", 1)


def whole(loss: CrossEntropy, logits: Tensor, targets: Tensor) -> Tensor:
    """The definition, token by token, in float64."""
    logs = logits.double().log_softmax(-1)
    right = logs.gather(-1, targets[:, None]).squeeze(1)
    spread = (1 - loss.smoothing) * right + loss.smoothing * logs.mean(-1)
    return (loss.z_loss * logits.double().logsumexp(-1).square() - spread).sum()


def agree(mine: Tensor, wanted: Tensor, inputs: list[Tensor], limit: float = 1e-5) -> None:
    assert mine.item() == pytest.approx(wanted.item(), rel=limit)
    found, truth = (torch.autograd.grad(loss * 0.7, inputs, allow_unused=True) for loss in (mine, wanted))
    for a, b in zip(found, truth, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < limit


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients(loss: CrossEntropy, count: int) -> None:
    torch.manual_seed(count)
    head, hidden = nn.Linear(10, 13), torch.randn(count, 10, requires_grad=True)
    head.weight.data.mul_(5)
    targets = torch.randint(0, 13, (count,))
    mine = chunked_loss(hidden, targets, head, 13, loss.measure)
    agree(mine, whole(loss, head(hidden), targets), [hidden, head.weight, head.bias])


@pytest.mark.parametrize("adapter", [LoRA(3), DoRA(3)])
def test_a_frozen_head_with_an_adapter(adapter: LoRA) -> None:
    head, hidden = Linear(10, 13, bias=False), torch.randn(11, 10, requires_grad=True)
    head.requires_grad_(False)
    adapter.attach(head, adapter.rank, adapter.alpha)
    head.lora_A.to_empty(device="cpu"), head.lora_B.to_empty(device="cpu")
    if isinstance(adapter, DoRA):
        head.lora_magnitude_vector = nn.Parameter(head.weight.norm(dim=1))
    shuffle_adapter(head)
    targets = torch.randint(0, 13, (11,))
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    assert len(inputs) == (4 if isinstance(adapter, DoRA) else 3)
    agree(chunked_loss(hidden, targets, head, 13, PLAIN.measure), whole(PLAIN, head(hidden), targets), inputs)


def test_a_frozen_head_costs_no_gradient() -> None:
    head, hidden = nn.Linear(10, 13).requires_grad_(False), torch.randn(11, 10, requires_grad=True)
    loss = chunked_loss(hidden, torch.randint(0, 13, (11,)), head, 13, PLAIN.measure)
    assert [tuple(t.shape) for t in loss.grad_fn.saved_tensors] == [(11, 10)]
    loss.backward()
    assert head.weight.grad is None


def test_without_gradients_nothing_is_kept() -> None:
    head, hidden = nn.Linear(10, 13), torch.randn(11, 10)
    targets = torch.randint(0, 13, (11,))
    seen = []

    def measure(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(logits.requires_grad)
        return PLAIN.measure(logits, targets)

    with torch.no_grad():
        loss = chunked_loss(hidden, targets, head, 13, measure)
    assert not loss.requires_grad
    assert not any(seen), "a trained head would take its gradient"
    assert loss.item() == pytest.approx(whole(PLAIN, head(hidden), targets).item(), rel=1e-5)


def test_nothing_to_learn_is_zero_with_gradients_of_zero() -> None:
    """A rank that has no rows left takes part all the same."""
    head, hidden = nn.Linear(10, 13), torch.randn(0, 10, requires_grad=True)
    loss = chunked_loss(hidden, torch.zeros(0, dtype=torch.long), head, 13, PLAIN.measure)
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()


def test_bf16() -> None:
    """Products in bf16, the loss itself in fp32, gradients of fp32 weights in fp32."""
    head, hidden = Linear(64, 50, bias=False), torch.randn(30, 64).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (30,))
    loss = chunked_loss(hidden, targets, head, 50, PLAIN.measure)
    assert loss.dtype == torch.float32
    exact = whole(PLAIN, hidden.float() @ head.weight.T, targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)
    found, truth = (torch.autograd.grad(one, [hidden, head.weight]) for one in (loss, exact))
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32]
    for a, b in zip(found, truth, strict=True):
        assert error(a.float(), b.float()) < 2e-2


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["llama3.2", "llama-biases"])
def test_through_a_model(name: str, loss: CrossEntropy, tmp_path: Path) -> None:
    """Also where the embedding is the head, and gets a gradient from both of its uses."""
    model = ours(made(tmp_path, name))
    part = batch(tokens(3, 11))
    parameters = list(model.parameters())
    agree(loss(model, part), whole_of(model, part, loss), parameters, 2e-5)


def whole_of(model: Decoder, part: Batch, loss: CrossEntropy) -> Tensor:
    targets = part.targets.flatten()
    learnt = targets != IGNORE
    logits = model(part.tokens, part.positions, part.offsets).flatten(0, 1)
    plain = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    exact = whole(loss, logits[learnt], targets[learnt])
    assert loss.smoothing or loss.z_loss or plain.item() == pytest.approx(exact.item(), rel=1e-5)
    return exact


def test_the_scale_of_a_gradient_is_not_rounded_to_bf16() -> None:
    grad, scale = torch.randn(5000, 3).bfloat16(), torch.tensor(1 / 300)
    assert scale.bfloat16().float() != scale
    assert torch.equal(cross_entropy.scaled(grad.clone(), scale), (grad.double() / 300).bfloat16())
