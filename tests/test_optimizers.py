"""Optimizers of our own against those of torch and against what they promise."""

import copy

import pytest
import torch
from torch import nn

from tunekit.optim.config import FEW, AdamW8bitConfig, AdamWConfig, MuonConfig
from tunekit.optim.container import AdamW8bit, Muon, orthogonal


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 40))


def trained(model: nn.Module, choice, steps: int) -> list[float]:
    """Losses of learning what follows what."""
    optimizer = choice.build([(list(model.parameters()), 1.0)], list(model[1:4].parameters()))
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(0, 40, (64,), generator=draw)
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 40)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_eight_bits_go_where_adamw_goes() -> None:
    whole, packed = net(), net()
    start = [p.detach().clone() for p in whole.parameters()]
    wanted, found = trained(whole, AdamWConfig(3e-3), 150), trained(packed, AdamW8bitConfig(3e-3), 150)
    assert wanted[-1] < 0.1 * wanted[0]
    assert found[50] == pytest.approx(wanted[50], rel=0.05)
    assert found[-1] == pytest.approx(wanted[-1], rel=0.1)
    for p, q, s in zip(whole.parameters(), packed.parameters(), start, strict=True):
        assert (p - q).norm() < 0.15 * (p - s).norm()


def test_state_of_eight_bits_is_two_bytes() -> None:
    model = nn.Linear(512, 512)
    optimizer = AdamW8bitConfig().build([(list(model.parameters()), 1.0)])
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    size = {p: sum(t.nbytes for t in optimizer.state[p].values()) for p in model.parameters()}
    assert size[model.weight] / model.weight.numel() == pytest.approx(2 + 8 / 256, abs=1e-3)
    assert size[model.bias] / 512 == pytest.approx(8, abs=0.1), f"below {FEW} numbers they stay as they are"


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (3, 48, 64), (2, 64, 8), (16, 16)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert values.min() > 0.6 and values.max() < 1.3
    assert not orthogonal(torch.zeros(shape)).any()


def test_muon_is_that_of_torch() -> None:
    ours, theirs = (nn.Parameter(torch.randn(48, 64, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    start = ours.detach().clone()
    mine = MuonConfig(lr=0.1, weight_decay=0.3).build([([ours], 1.0)], [ours])
    other = torch.optim.Muon([theirs], 0.1, 0.3, 0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for p, optimizer in ((ours, mine), (theirs, other)):
            p.grad = (p.detach() * 3 + step).sin()
            optimizer.step()
    assert (ours - theirs).norm() < 0.01 * (ours - start).norm(), "both multiply in bf16"


def test_every_expert_is_a_matrix() -> None:
    stack, alone = nn.Parameter(torch.randn(3, 32, 16)), []
    alone = [nn.Parameter(expert.clone()) for expert in stack.detach()]
    grad = torch.randn(3, 32, 16) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    for weights, grads in (([stack], [grad]), (alone, list(grad))):
        optimizer = MuonConfig(lr=0.1).build([(weights, 1.0)], weights)
        for weight, one in zip(weights, grads, strict=True):
            weight.grad = one
        optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]), rtol=0, atol=2e-3)


def test_muon_leaves_vectors_filters_and_the_rest_to_adamw() -> None:
    matrix, experts = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(2, 8, 4))
    vector, filters, outer = (nn.Parameter(torch.randn(*shape)) for shape in ((8,), (8, 1, 4), (16, 8)))
    weights = [matrix, experts, vector, filters, outer]
    both = [copy.deepcopy(weights), weights]
    muon = MuonConfig(lr=0.1, weight_decay=0.2).build([(weights, 1.0)], weights[:4])
    adamw = AdamWConfig(lr=0.1, weight_decay=0.2).build([(both[0], 1.0)])
    for optimizer, ps in ((adamw, both[0]), (muon, weights)):
        for p in ps:
            p.grad = p.detach().cos()
        optimizer.step()
    assert [torch.equal(p, q) for p, q in zip(*both, strict=True)] == [False, False, True, True, True]


def test_muon_learns() -> None:
    found = trained(net(), MuonConfig(lr=3e-3), 150)
    assert found[-1] < 0.1 * found[0]


def test_parts_look_like_one() -> None:
    """A schedule moves the rates of all, and states lie in one place."""
    model = net()
    choice = MuonConfig(lr=1.0)
    optimizer = choice.build([(list(model.parameters()), 1.0)], list(model[1:4].parameters()))
    assert {type(part) for part in optimizer.parts} == {Muon, torch.optim.AdamW}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    schedule.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), "a rate of 0 moves nothing"
    assert set(optimizer.state) == set(model.parameters())


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choice", [AdamW8bitConfig(1e-2), MuonConfig(1e-2)], ids=lambda c: type(c).__name__)
def test_a_state_that_is_loaded_goes_on_to_the_same_bits(choice, dtype) -> None:
    models = [net().to(dtype) for _ in range(2)]
    optimizers = [choice.build([([*m.parameters()], 1.0)], [*m[1:4].parameters()]) for m in models]
    for seed in range(3):
        moved(models[0], optimizers[0], seed)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for seed in range(3, 5):
        for model, optimizer in zip(models, optimizers, strict=True):
            moved(model, optimizer, seed)
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))


def test_a_gradient_may_lie_in_memory_as_it_likes() -> None:
    weights = [nn.Parameter(torch.ones(80, 80)) for _ in range(2)]
    grad = torch.randn(80, 80)
    for weight, given in zip(weights, (grad, grad.T.contiguous().T), strict=True):
        weight.grad = given
        AdamW8bitConfig().build([([weight], 1.0)]).step()
    assert torch.equal(*weights)


def test_what_has_no_gradient_stays() -> None:
    used, unused = nn.Parameter(torch.ones(80, 80)), nn.Parameter(torch.ones(80, 80))
    for choice in (AdamW8bitConfig(weight_decay=0.5), MuonConfig(weight_decay=0.5)):
        optimizer = choice.build([([used, unused], 1.0)], [used, unused])
        used.grad = torch.ones(80, 80)
        optimizer.step()
        assert torch.equal(unused, torch.ones(80, 80)) and not optimizer.state[unused]
        assert isinstance(optimizer.parts[0], AdamW8bit | Muon)
