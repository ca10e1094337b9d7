"""Log-probabilities and gradients of samples: padded, packed, with shared prompts, and computed from all logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.random_checkpoints import load_model, make_checkpoint
from tunekit.adapters.config import NoAdapter
from tunekit.data.dataloader.batch import Collator
from tunekit.distributed.context import DistributedContext
from tunekit.losses.policy_gradient import DAPO, GRPO, GSPO, RLOO, PolicyGradientLoss
from tunekit.models.decoder import Decoder
from tunekit.policy.objective import PolicyObjective
from tunekit.policy.samples import PolicyCollator, PolicySamples
from tunekit.rollouts.rollout import PromptRow, Rollout

VOCAB, GROUPS, GENERATIONS, TEMPERATURE = 60, 3, 4, 0.7
DIST = DistributedContext.single_process()
PADDED = Collator(GROUPS * GENERATIONS, 5, 0, 1, 0, None, with_document_ids=True)
PACKED = replace(PADDED, capacity=64, micro_batch_size=1)


def make_rollouts() -> list[Rollout]:
    """Rollouts of groups with prompts of different lengths, some with observations between sampled tokens."""
    rng, rollouts = np.random.default_rng(0), []
    for group in range(GROUPS):
        prompt = PromptRow(f"rows.jsonl:{group + 1}", [], rng.integers(2, VOCAB, 3 + 4 * group).tolist(), {})
        for index in range(GENERATIONS):
            length = int(rng.integers(2, 9))
            tokens = np.concatenate([prompt.tokens, rng.integers(2, VOCAB, length)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt.tokens)
            mask[len(prompt.tokens) + 1 : len(prompt.tokens) + 3] = index != 2  # observations
            logps = -rng.random(len(tokens)).astype(np.float32) * mask
            reason = "length" if index == 1 else "stop"
            rollouts.append(Rollout(prompt, group, tokens, mask, logps, reason, []))
    return rollouts


def make_objective(loss: PolicyGradientLoss, collator: Collator, shared: bool = False) -> PolicyObjective:
    return PolicyObjective(loss, PolicyCollator(collator, GENERATIONS, shared), TEMPERATURE, 16, DIST)


def make_samples(model: Decoder, mask_truncated: bool = False) -> PolicySamples:
    """Samples whose old log-probabilities are near those of the model."""
    samples = PolicySamples.from_rollouts(make_rollouts(), mask_truncated)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(len(samples), 1, generator=generator) * samples.loss_mask
    noise = torch.randn(*samples.tokens.shape, generator=generator)
    logps, _ = make_objective(DAPO(), PADDED).score(model, samples)
    old_logps = (logps + 0.2 * noise) * samples.loss_mask
    sampling_logps = (old_logps + 0.02 * noise) * samples.loss_mask
    values = {"old_logps": old_logps, "ref_logps": old_logps + 0.1, "sampling_logps": sampling_logps}
    return replace(samples, advantages=advantages, **values)


def run_step(model: Decoder, objective: PolicyObjective, samples: PolicySamples) -> tuple[dict[str, Tensor], Tensor]:
    """Metrics of a step, and the gradients of all weights."""
    model.zero_grad()
    step = objective.begin_step(model, samples, float(samples.num_tokens.sum()))
    for batch in step.batches:
        objective.token_loss(model, batch, step).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return objective.metrics(step), gradients


@pytest.fixture(params=["llama3.2", "gemma2", "granite"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Models with tied weights, a softcap, and scaled logits."""
    folder = make_checkpoint(Path(tmp_path_factory.mktemp("model")), request.param)
    return load_model(folder, NoAdapter())


def test_log_probabilities_are_those_of_divided_logits(model: Decoder) -> None:
    samples = make_samples(model)
    logps, entropies = make_objective(DAPO(), PADDED).score(model, samples)
    for row in range(len(samples)):
        tokens = samples.tokens[row : row + 1, : samples.lengths[row]].long()
        log_probs = (model(tokens)[0].detach() / TEMPERATURE).log_softmax(-1)
        expected = log_probs[:-1].gather(1, tokens[0, 1:, None]).squeeze(1)
        mask = samples.loss_mask[row, 1 : samples.lengths[row]]
        torch.testing.assert_close(logps[row, 1 : samples.lengths[row]][mask], expected[mask], rtol=1e-5, atol=1e-5)
        entropy = -(log_probs.exp() * log_probs).sum(-1)[:-1]
        torch.testing.assert_close(entropies[row, 1 : samples.lengths[row]][mask], entropy[mask], rtol=1e-5, atol=1e-5)
    assert not logps[~samples.loss_mask].any()


LOSSES = [DAPO(beta=0.1, top_entropy_quantile=0.5), GRPO(importance_sampling_correction=True), GSPO(), RLOO(beta=0.1)]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
def test_packed_rows_and_shared_prompts_change_nothing(model: Decoder, loss: PolicyGradientLoss) -> None:
    samples = make_samples(model)
    expected, gradients = run_step(model, make_objective(loss, PADDED), samples)
    assert gradients.abs().max() > 1e-4
    for shared in (False, True):
        objective = make_objective(loss, PACKED, shared)
        batches = objective.collator.micro_batches(samples)
        assert any(batch.shared_prefixes is not None for batch in batches) == shared
        metrics, other = run_step(model, objective, samples)
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
        assert (other - gradients).norm() < 1e-4 * gradients.norm()


def test_micro_batches_add_up(model: Decoder) -> None:
    samples = make_samples(model)
    expected, gradients = run_step(model, make_objective(GRPO(), replace(PADDED, micro_batch_size=12)), samples)
    metrics, other = run_step(model, make_objective(GRPO(), replace(PADDED, micro_batch_size=1)), samples)
    torch.testing.assert_close(metrics["loss"], expected["loss"])
    assert (other - gradients).norm() < 1e-5 * gradients.norm()


def test_tokens_of_the_environment_are_not_learned(model: Decoder) -> None:
    """Observations change the gradient as context only: their own predictions have no loss."""
    samples = make_samples(model)
    objective = make_objective(DAPO(), PADDED)
    for batch in objective.collator.micro_batches(samples):
        _, index, position = objective.token_outputs(model, batch)
        assert samples.loss_mask[index, position].all()
        assert len(index) == batch.num_target_tokens


def test_truncated_answers_do_not_train(model: Decoder) -> None:
    samples = make_samples(model, mask_truncated=True)
    assert not samples.loss_mask[1::GENERATIONS].any() and samples.loss_mask[::GENERATIONS].any()
    _, gradients = run_step(model, make_objective(DAPO(mask_truncated_completions=True), PADDED), samples)
    changed = replace(samples, advantages=samples.advantages.clone())
    changed.advantages[1::GENERATIONS] = 7.0
    _, other = run_step(model, make_objective(DAPO(mask_truncated_completions=True), PADDED), changed)
    assert torch.equal(gradients, other)
    nothing = replace(samples, loss_mask=torch.zeros_like(samples.loss_mask))
    metrics, gradients = run_step(model, make_objective(GRPO(), PACKED, True), nothing)
    assert metrics["loss"] == 0 and not gradients.any(), "all answers were truncated"


def test_samples_survive_a_training_state(model: Decoder) -> None:
    samples = make_samples(model)
    restored = PolicySamples.from_state_dict(samples.state_dict())
    assert all(torch.equal(value, vars(restored)[name]) for name, value in vars(samples).items())
