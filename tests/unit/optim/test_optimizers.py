"""Our optimizers, compared with those of torch and with their specification."""

import copy

import pytest
import torch
from torch import nn

from tunekit.optim.config import (
    MIN_QUANTIZED_SIZE,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from tunekit.optim.container import AdamW8bit, Muon, orthogonalize


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 40))


def train_losses(model: nn.Module, config, steps: int) -> list[float]:
    """Losses while learning a permutation of tokens."""
    optimizer = config.build([(list(model.parameters()), 1.0)], list(model[1:4].parameters()))
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(0, 40, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 40)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adamw8bit_converges_like_adamw() -> None:
    full_model, model_8bit = make_model(), make_model()
    start = [p.detach().clone() for p in full_model.parameters()]
    expected, actual = (
        train_losses(full_model, AdamWConfig(3e-3), 150),
        train_losses(model_8bit, AdamW8bitConfig(3e-3), 150),
    )
    assert expected[-1] < 0.1 * expected[0]
    assert actual[50] == pytest.approx(expected[50], rel=0.05)
    assert actual[-1] == pytest.approx(expected[-1], rel=0.1)
    for p, q, initial in zip(full_model.parameters(), model_8bit.parameters(), start, strict=True):
        assert (p - q).norm() < 0.15 * (p - initial).norm()


@pytest.mark.parametrize(
    "config",
    [AdamWConfig(), AdamW8bitConfig(), MuonConfig(), SGDConfig(), SGDConfig(momentum=0.9)],
    ids=["adamw", "adamw8bit", "muon", "sgd", "momentum"],
)
def test_state_bytes_are_those_of_the_state(config: OptimizerConfig) -> None:
    model, large = make_model(), nn.Linear(MIN_QUANTIZED_SIZE // 100, 130)
    weights = [*model.parameters(), *large.parameters()]
    inner = {*model[1:4].parameters()}
    optimizer = config.build([(weights, 1.0)], inner)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight in weights:
        tensors = [
            value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor) and value.ndim
        ]
        assert config.state_bytes(weight, weight in inner) == sum(value.nbytes for value in tensors)


def test_adamw8bit_state_is_two_bytes_per_parameter() -> None:
    model = nn.Linear(512, 512)
    optimizer = AdamW8bitConfig().build([(list(model.parameters()), 1.0)])
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    size = {p: sum(t.nbytes for t in optimizer.state[p].values()) for p in model.parameters()}
    assert size[model.weight] / model.weight.numel() == pytest.approx(2 + 8 / 256, abs=1e-3)
    assert size[model.bias] / 512 == pytest.approx(8, abs=0.1), f"below {MIN_QUANTIZED_SIZE} values: not quantized"


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (3, 48, 64), (2, 64, 8), (16, 16)])
def test_orthogonal_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)).float())
    assert values.min() > 0.6 and values.max() < 1.3
    assert not orthogonalize(torch.zeros(shape)).any()


def test_muon_matches_torch() -> None:
    ours, theirs = (nn.Parameter(torch.randn(48, 64, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    start = ours.detach().clone()
    our_optimizer = MuonConfig(lr=0.1, weight_decay=0.3).build([([ours], 1.0)], [ours])
    torch_optimizer = torch.optim.Muon([theirs], 0.1, 0.3, 0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for p, optimizer in ((ours, our_optimizer), (theirs, torch_optimizer)):
            p.grad = (p.detach() * 3 + step).sin()
            optimizer.step()
    assert (ours - theirs).norm() < 0.01 * (ours - start).norm(), "both multiply in bf16"


def test_muon_treats_each_expert_as_a_matrix() -> None:
    stack, experts = nn.Parameter(torch.randn(3, 32, 16)), []
    experts = [nn.Parameter(expert.clone()) for expert in stack.detach()]
    grad = torch.randn(3, 32, 16) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    for weights, grads in (([stack], [grad]), (experts, list(grad))):
        optimizer = MuonConfig(lr=0.1).build([(weights, 1.0)], weights)
        for weight, grad_of_weight in zip(weights, grads, strict=True):
            weight.grad = grad_of_weight
        optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in experts]), rtol=0, atol=2e-3)


def test_muon_uses_adamw_for_all_but_hidden_matrices() -> None:
    matrix, experts = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(2, 8, 4))
    vector, filters, embedding = (nn.Parameter(torch.randn(*shape)) for shape in ((8,), (8, 1, 4), (16, 8)))
    weights = [matrix, experts, vector, filters, embedding]
    weight_sets = [copy.deepcopy(weights), weights]
    muon = MuonConfig(lr=0.1, weight_decay=0.2).build([(weights, 1.0)], weights[:4])
    adamw = AdamWConfig(lr=0.1, weight_decay=0.2).build([(weight_sets[0], 1.0)])
    for optimizer, ps in ((adamw, weight_sets[0]), (muon, weights)):
        for p in ps:
            p.grad = p.detach().cos()
        optimizer.step()
    assert [torch.equal(p, q) for p, q in zip(*weight_sets, strict=True)] == [False, False, True, True, True]


def test_muon_reduces_the_loss() -> None:
    losses = train_losses(make_model(), MuonConfig(lr=3e-3), 150)
    assert losses[-1] < 0.1 * losses[0]


def test_combined_optimizer_acts_as_one() -> None:
    """One schedule sets the rates of all members, and all states are in one mapping."""
    model = make_model()
    config = MuonConfig(lr=1.0)
    optimizer = config.build([(list(model.parameters()), 1.0)], list(model[1:4].parameters()))
    assert {type(member) for member in optimizer.optimizers} == {Muon, torch.optim.AdamW}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    schedule.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), (
        "a rate of 0 changes nothing"
    )
    assert set(optimizer.state) == set(model.parameters())


def step_with_random_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [AdamW8bitConfig(1e-2), MuonConfig(1e-2)], ids=lambda c: type(c).__name__)
def test_loaded_state_continues_bit_exactly(config, dtype) -> None:
    models = [make_model().to(dtype) for _ in range(2)]
    optimizers = [config.build([([*m.parameters()], 1.0)], [*m[1:4].parameters()]) for m in models]
    for seed in range(3):
        step_with_random_gradients(models[0], optimizers[0], seed)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for seed in range(3, 5):
        for model, optimizer in zip(models, optimizers, strict=True):
            step_with_random_gradients(model, optimizer, seed)
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))


def test_gradient_strides_do_not_matter() -> None:
    weights = [nn.Parameter(torch.ones(80, 80)) for _ in range(2)]
    grad = torch.randn(80, 80)
    for weight, strided_grad in zip(weights, (grad, grad.T.contiguous().T), strict=True):
        weight.grad = strided_grad
        AdamW8bitConfig().build([([weight], 1.0)]).step()
    assert torch.equal(*weights)


def test_parameter_without_gradient_is_unchanged() -> None:
    used, unused = nn.Parameter(torch.ones(80, 80)), nn.Parameter(torch.ones(80, 80))
    for config in (AdamW8bitConfig(weight_decay=0.5), MuonConfig(weight_decay=0.5)):
        optimizer = config.build([([used, unused], 1.0)], [used, unused])
        used.grad = torch.ones(80, 80)
        optimizer.step()
        assert torch.equal(unused, torch.ones(80, 80)) and not optimizer.state[unused]
        assert isinstance(optimizer.optimizers[0], AdamW8bit | Muon)
