"""Episodes on the engine with the bundled model: log-probabilities, and independence of the batch."""

import numpy as np
import pytest
import torch

from tunekit.build import load_for_inference
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.environments.config import GridWorldConfig
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.rollouts.episodes import generate_rollouts
from tunekit.rollouts.rollout import PromptRow, Rollout

GRIDS = (["S.#", "..G"], ["S..", "##G"], ["SG"])
SAMPLING = SamplingConfig(temperature=1.5, max_new_tokens=150, seed=3)
DIST = DistributedContext(0, "cpu")


@pytest.fixture(scope="module")
def loaded() -> tuple[Decoder, Tokenizer]:
    precision = PrecisionConfig(compute_dtype="fp32")
    return load_for_inference("tunekit/nano", precision, DIST)


def sample(loaded: tuple[Decoder, Tokenizer], numbers: tuple[int, ...], slots: int = 4) -> list[Rollout]:
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "Which way?"}]
    tokens = encode_conversation(tokenizer, messages)
    prompts = {n: PromptRow(f"rows:{n}", messages, tokens, {"grid": GRIDS[n]}) for n in numbers}
    engine = GenerationEngine(model, slots, 512, DIST)
    return generate_rollouts(engine, tokenizer, prompts, 2, SAMPLING, GridWorldConfig(max_turns=4), 7)


@torch.no_grad()
def test_logprobs_are_those_of_a_training_pass(loaded: tuple[Decoder, Tokenizer]) -> None:
    rollouts = sample(loaded, (0, 1, 2))
    assert max(rollout.metrics["num_turns"] for rollout in rollouts) > 1
    for rollout in rollouts:
        assert rollout.loss_mask.any() and len(rollout.completion_ids) <= SAMPLING.max_new_tokens
        tokens = torch.from_numpy(rollout.tokens).long()
        logprobs = (loaded[0](tokens[None])[0].float() / SAMPLING.temperature).log_softmax(-1)
        expected = logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy() * rollout.loss_mask[1:]
        np.testing.assert_allclose(rollout.logprobs[1:], expected, atol=2e-4)


def test_samples_do_not_depend_on_other_rows_or_slots(loaded: tuple[Decoder, Tokenizer]) -> None:
    together = sample(loaded, (0, 1, 2))
    alone = sample(loaded, (2,), slots=1)
    assert [rollout.tokens.tolist() for rollout in together[4:]] == [rollout.tokens.tolist() for rollout in alone]
    assert together[4].tokens.tolist() != together[5].tokens.tolist()
    assert [rollout.environment_reward for rollout in together[4:]] == [rollout.environment_reward for rollout in alone]
