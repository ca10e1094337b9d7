"""Sampling of tokens, compared with exact probabilities and the logits warpers of transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.helpers.random_checkpoints import load_model, make_checkpoint, random_tokens
from tunekit.errors import FieldError
from tunekit.generation.generate import SamplingConfig, generate_batch

SAMPLING_CONFIGS = [
    SamplingConfig(1.0),
    SamplingConfig(0.5),
    SamplingConfig(2.0, top_k=4),
    SamplingConfig(1.0, top_k=1),
    SamplingConfig(1.0, top_k=50),
    SamplingConfig(0.8, top_p=0.7),
    SamplingConfig(1.5, top_p=0.01),
    SamplingConfig(1.0, top_k=5, top_p=0.8),
    SamplingConfig(3.0, top_k=6, top_p=0.5),
]


def exact_probs(sampling: SamplingConfig, logits: Tensor) -> Tensor:
    """Probabilities (vocab,) of the warpers of transformers."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("sampling", SAMPLING_CONFIGS)
def test_token_frequencies_match_their_probabilities(sampling: SamplingConfig) -> None:
    """With evenly spaced random numbers, each frequency is exact to 1 / count."""
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(3))
    count = 20_000
    numbers = (torch.arange(count) + 0.5) / count
    sampled = sampling.sample(logits.expand(count, 12), numbers)
    frequencies = torch.bincount(sampled, minlength=12) / count
    expected = exact_probs(sampling, logits)
    assert (frequencies - expected).abs().max() < 2 / count
    assert not frequencies[expected == 0].any()


def test_extreme_random_numbers_select_allowed_tokens() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    for sampling in SAMPLING_CONFIGS:
        for number in (0.0, 1 - 2**-24):
            sampled = sampling.sample(logits, torch.full((5,), number))
            for row in range(5):
                assert exact_probs(sampling, logits[row])[sampled[row]] > 0


def test_random_numbers_depend_only_on_seed_and_row() -> None:
    sampling = SamplingConfig(1.0, max_new_tokens=200)
    numbers = sampling.uniform_numbers(6)
    assert torch.equal(sampling.uniform_numbers(2, first=3), numbers[3:5])
    assert torch.equal(SamplingConfig(1.0, max_new_tokens=50).uniform_numbers(6), numbers[:, :50])
    seeds = [SamplingConfig(1.0, max_new_tokens=200, seed=seed).uniform_numbers(6) for seed in (0, 1, 2, 2**32, 2**40)]
    assert torch.equal(seeds[0], numbers)
    rows = torch.cat(seeds)
    assert len(rows.unique(dim=0)) == len(rows), "no seed and no row repeats another"
    assert (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max() < 0.35
    assert 0 <= rows.min() < 0.01 < 0.99 < rows.max() < 1


@pytest.mark.parametrize("name", ["llama-biases", "mistral"])
def test_answer_does_not_depend_on_other_rows(name: str, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, name))
    sampling = SamplingConfig(1.3, top_k=20, top_p=0.95, max_new_tokens=10, seed=5)
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (7, 1, 12, 3)]
    together = generate_batch(model, prompts, sampling, frozenset())
    for row, prompt in enumerate(prompts):
        assert generate_batch(model, [prompt], sampling, frozenset(), first=row) == [together[row]]
    assert generate_batch(model, prompts, SamplingConfig(1.3, max_new_tokens=10, seed=6), frozenset()) != together


def test_each_row_ends_at_its_first_stop_token(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen2"))
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (7, 2, 5)]
    unstopped = generate_batch(model, prompts, SamplingConfig(max_new_tokens=15), frozenset())
    stops = frozenset({unstopped[0][4], unstopped[2][0]})
    stopped = generate_batch(model, prompts, SamplingConfig(max_new_tokens=15), stops)
    for long, short in zip(unstopped, stopped, strict=True):
        end = next((i for i, token in enumerate(long) if token in stops), len(long))
        assert short == long[:end]
    assert stopped[2] == []


@pytest.mark.parametrize(("values", "field"), [
    ({"temperature": -1.0}, "temperature"), ({"top_k": 0}, "top_k"), ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens"),
])  # fmt: skip
def test_invalid_values_name_their_field(values: dict, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        SamplingConfig(**values)
    assert caught.value.field == field
