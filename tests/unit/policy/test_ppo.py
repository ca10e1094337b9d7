"""PPO steps of models with a value head, padded, packed and with adapters, compared with those from all logits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.random_checkpoints import SHAPES, save
from tests.helpers.random_checkpoints import build as build_random
from tests.unit.policy.test_objective import DIST, GENERATIONS, PACKED, PADDED, TEMPERATURE, make_rollouts
from tunekit import build
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint.final_checkpoint import save_final
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.losses.policy_gradient import RewardSignals
from tunekit.losses.ppo import PPO
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.policy.ppo import PPOObjective, PPOSamples
from tunekit.policy.samples import PolicyCollator, PolicySamples
from tunekit.quantization.config import NF4Config, NoQuantization

ADAPTERS = {
    "full": (NoAdapter(), NoQuantization()),
    "partial": (NoAdapter(trainable_modules="norms"), NoQuantization()),
    "lora": (LoRAConfig(4, bias="all"), NoQuantization()),
    "dora": (DoRAConfig(4), NoQuantization()),
    "qlora": (LoRAConfig(4), NF4Config()),
}
LOSS = PPO(vf_coef=0.3, gamma=0.9, cliprange=0.1, cliprange_value=0.1)


def load_model(source: HFCheckpoint, name: str = "full") -> Decoder:
    """A model with a value head, whose weights are not 0."""
    adapter, quantization = ADAPTERS[name]
    options = quantization, adapter, PrecisionConfig("fp32"), MemoryConfig()
    meta_model = build.build_meta_model(source, quantization, adapter, value_head=True)
    model = build.build_model(source, *options, DIST, model=meta_model)
    assert model.value_head is not None and not model.value_head.weight.any()
    generator = torch.Generator().manual_seed(0)
    for parameter in [p for p in model.parameters() if p.requires_grad and p.ndim == 2]:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def make_objective(collator: object = PADDED, shared: bool = False, loss: PPO = LOSS) -> PPOObjective:
    return PPOObjective(loss, PolicyCollator(collator, GENERATIONS, shared), TEMPERATURE, 16, DIST)  # pyright: ignore


def make_samples(model: Decoder) -> PPOSamples:
    """Samples whose log-probabilities and values at the time of sampling are near those of the model."""
    samples, generator = PolicySamples.from_rollouts(make_rollouts(), False), torch.Generator().manual_seed(1)
    logps, _, values = make_objective().score(model, samples)
    noise = torch.randn(2, *samples.tokens.shape, generator=generator) * samples.loss_mask
    logps, values = logps + 0.2 * noise[0], values + 0.2 * noise[1]
    rewards = torch.randn(len(samples), generator=generator)
    estimates = LOSS.advantages(RewardSignals(rewards, 1, samples.loss_mask, None, values))
    assert estimates.returns is not None
    samples = replace(samples, old_logps=logps, ref_logps=logps, sampling_logps=logps, advantages=estimates.values)
    return PPOSamples(**vars(samples), values=values, returns=estimates.returns)


def run_step(model: Decoder, objective: PPOObjective, samples: PPOSamples) -> tuple[dict[str, Tensor], Tensor]:
    """Metrics of a step, and the gradients of all trained weights."""
    model.zero_grad()
    step = objective.begin_step(model, samples, 1.0)
    for batch in step.batches:
        objective.token_loss(model, batch, step).backward()
    return objective.metrics(step), all_gradients(model)


def all_gradients(model: Decoder) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained])


def direct_loss(model: Decoder, samples: PPOSamples) -> Tensor:
    """The loss of the papers from all logits and hidden states of each answer alone."""
    total, head = torch.zeros(()), model.value_head
    assert head is not None
    for i in range(len(samples)):
        end = int(samples.lengths[i])
        tokens = samples.tokens[i : i + 1, :end].long()
        logits = model(tokens)[0] / TEMPERATURE
        hidden = model(tokens, head_fn=lambda hidden, _: hidden)[0]
        for t in samples.loss_mask[i, :end].nonzero().flatten().tolist():
            logp = logits[t - 1].log_softmax(-1)[tokens[0, t]]
            value = hidden[t - 1] @ head.weight[0] + head.bias[0]
            ratio, advantage = (logp - samples.old_logps[i, t]).exp(), samples.advantages[i, t]
            policy = -torch.min(ratio * advantage, ratio.clip(0.9, 1.1) * advantage)
            old, target = samples.values[i, t], samples.returns[i, t]
            errors = (value - target) ** 2, (value.clip(old - 0.1, old + 0.1) - target) ** 2
            total = total + policy + 0.3 * 0.5 * torch.max(*errors)
    return total / samples.num_tokens.sum()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> HFCheckpoint:
    shape = SHAPES["llama3.2"] | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16}
    return HFCheckpoint.open(save(build_random(shape), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("name", ADAPTERS)
def test_loss_and_gradients_are_those_of_all_logits(source: HFCheckpoint, name: str) -> None:
    model = load_model(source, name)
    samples = make_samples(model)
    metrics, gradients = run_step(model, make_objective(), samples)
    model.zero_grad()
    expected = direct_loss(model, samples)
    expected.backward()
    torch.testing.assert_close(metrics["loss"], expected.detach(), rtol=1e-5, atol=1e-6)
    assert model.value_head is not None and model.value_head.weight.grad is not None
    assert (gradients - all_gradients(model)).norm() < 1e-4 * gradients.norm() > 1e-6
    total = metrics["loss/policy_avg"] + 0.3 * metrics["loss/value_avg"]
    torch.testing.assert_close(metrics["loss"], total, rtol=1e-5, atol=1e-6)


def test_packed_rows_shared_prompts_and_micro_batches_change_nothing(source: HFCheckpoint) -> None:
    model = load_model(source)
    samples = make_samples(model)
    expected, gradients = run_step(model, make_objective(replace(PADDED, micro_batch_size=12)), samples)
    for collator, shared in ((PADDED, False), (PACKED, False), (PACKED, True)):
        metrics, other = run_step(model, make_objective(collator, shared), samples)
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
        assert (other - gradients).norm() < 1e-4 * gradients.norm()


def test_values_of_observations_are_not_learned(source: HFCheckpoint) -> None:
    """The gradient depends on returns and advantages of sampled tokens only."""
    model = load_model(source)
    samples = make_samples(model)
    _, gradients = run_step(model, make_objective(), samples)
    noise = 9 * ~samples.loss_mask
    changed = replace(samples, returns=samples.returns + noise, advantages=samples.advantages + noise)
    assert torch.equal(run_step(model, make_objective(), changed)[1], gradients)
    changed = replace(samples, returns=samples.returns + 9 * samples.loss_mask)
    assert not torch.equal(run_step(model, make_objective(), changed)[1], gradients)


def test_values_before_sampled_tokens(source: HFCheckpoint) -> None:
    """Values of a policy do not depend on the token that they precede."""
    model = load_model(source)
    samples = make_samples(model)
    values = make_objective().score(model, samples)[2]
    last = samples.loss_mask.long() * torch.arange(samples.tokens.shape[1])
    rows, ends = torch.arange(len(samples)), last.argmax(1)
    tokens = samples.tokens.clone()
    tokens[rows, ends] = (tokens[rows, ends] + 1) % 50
    other = make_objective().score(model, replace(samples, tokens=tokens))[2]
    assert torch.equal(values[rows, ends], other[rows, ends]) and values[samples.loss_mask].std() > 0.01


@pytest.mark.parametrize("name", ["full", "lora"])
def test_result_has_no_value_head(source: HFCheckpoint, name: str, tmp_path: Path) -> None:
    adapter, quantization = ADAPTERS[name]
    model = load_model(source, name)
    save_final(adapter, tmp_path, model, source)
    reloaded, loaded_adapter = build.resolve_checkpoint(str(tmp_path), build.download.READ)
    copy = build.build_model(reloaded, quantization, loaded_adapter, PrecisionConfig("fp32"), MemoryConfig(), DIST)
    assert copy.value_head is None
    tokens = torch.arange(2, 20)[None]
    torch.testing.assert_close(copy(tokens), model(tokens), rtol=1e-5, atol=1e-5)


def test_samples_survive_a_training_state(source: HFCheckpoint) -> None:
    samples = make_samples(load_model(source))
    restored = PPOSamples.from_state_dict(samples.state_dict())
    assert all(torch.equal(value, vars(restored)[name]) for name, value in vars(samples).items())
    assert isinstance(samples[torch.tensor([3, 1])].to(torch.device("cpu")), PPOSamples)
