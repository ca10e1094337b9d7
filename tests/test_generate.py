"""How tokens are drawn, against exact probabilities and the warpers of transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.checkpoints import made, ours, tokens
from tunekit.errors import FieldError
from tunekit.generation.generate import SamplingConfig, generate_batch

CHOICES = [
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


def exact(sampling: SamplingConfig, logits: Tensor) -> Tensor:
    """Probabilities (vocab,) as transformers sets them."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("sampling", CHOICES)
def test_what_is_drawn_has_its_probability(sampling: SamplingConfig) -> None:
    """Evenly spaced numbers: the share of each token is exact to one part in their count."""
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(3))
    count = 20_000
    numbers = (torch.arange(count) + 0.5) / count
    drawn = sampling.choose(logits.expand(count, 12), numbers)
    shares = torch.bincount(drawn, minlength=12) / count
    wanted = exact(sampling, logits)
    assert (shares - wanted).abs().max() < 2 / count
    assert not shares[wanted == 0].any()


def test_the_ends_of_the_numbers_draw_what_may_be_drawn() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    for sampling in CHOICES:
        for number in (0.0, 1 - 2**-24):
            drawn = sampling.choose(logits, torch.full((5,), number))
            for row in range(5):
                assert exact(sampling, logits[row])[drawn[row]] > 0


def test_numbers_depend_on_seed_and_row_alone() -> None:
    sampling = SamplingConfig(1.0, max_new_tokens=200)
    numbers = sampling.numbers(6)
    assert torch.equal(sampling.numbers(2, first=3), numbers[3:5])
    assert torch.equal(SamplingConfig(1.0, max_new_tokens=50).numbers(6), numbers[:, :50])
    seeds = [SamplingConfig(1.0, max_new_tokens=200, seed=seed).numbers(6) for seed in (0, 1, 2, 2**32, 2**40)]
    assert torch.equal(seeds[0], numbers)
    rows = torch.cat(seeds)
    assert len(rows.unique(dim=0)) == len(rows), "no seed and no row repeats another"
    assert (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max() < 0.35
    assert 0 <= rows.min() < 0.01 < 0.99 < rows.max() < 1


@pytest.mark.parametrize("name", ["llama-biases", "mistral"])
def test_a_row_does_not_depend_on_the_others(name: str, tmp_path: Path) -> None:
    model = ours(made(tmp_path, name))
    sampling = SamplingConfig(1.3, top_k=20, top_p=0.95, max_new_tokens=10, seed=5)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (7, 1, 12, 3)]
    together = generate_batch(model, prompts, sampling, frozenset())
    for row, prompt in enumerate(prompts):
        assert generate_batch(model, [prompt], sampling, frozenset(), first=row) == [together[row]]
    assert generate_batch(model, prompts, SamplingConfig(1.3, max_new_tokens=10, seed=6), frozenset()) != together


def test_rows_end_at_their_own_stops(tmp_path: Path) -> None:
    model = ours(made(tmp_path, "qwen2"))
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (7, 2, 5)]
    whole = generate_batch(model, prompts, SamplingConfig(max_new_tokens=15), frozenset())
    stops = frozenset({whole[0][4], whole[2][0]})
    ended = generate_batch(model, prompts, SamplingConfig(max_new_tokens=15), stops)
    for long, short in zip(whole, ended, strict=True):
        first = next((i for i, token in enumerate(long) if token in stops), len(long))
        assert short == long[:first]
    assert ended[2] == []


@pytest.mark.parametrize(("values", "field"), [
    ({"temperature": -1.0}, "temperature"), ({"top_k": 0}, "top_k"), ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens"),
])  # fmt: skip
def test_values_that_make_no_sense(values: dict, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        SamplingConfig(**values)
    assert caught.value.field == field
