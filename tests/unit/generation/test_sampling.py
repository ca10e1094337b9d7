"""Sampling of tokens, compared with exact probabilities and the logits warpers of transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.helpers.random_checkpoints import load_model, make_checkpoint, random_tokens
from tunekit.errors import FieldError, UserError
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig

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
    SamplingConfig(1.0, min_p=0.1),
    SamplingConfig(1.0, min_p=1.0),
    SamplingConfig(2.0, top_k=8, min_p=0.2),
    SamplingConfig(0.7, top_p=0.9, min_p=0.3),
    SamplingConfig(1.0, repetition_penalty=1.7),
    SamplingConfig(0.8, top_k=7, top_p=0.9, min_p=0.05, repetition_penalty=0.6),
]
SEEN = [3, 7, 7, 0]  # tokens of a row


def exact_probs(sampling: SamplingConfig, logits: Tensor) -> Tensor:
    """Probabilities (vocab,) after the tokens SEEN, of logits processors of transformers, in their order."""
    processors = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k or len(logits)),
        TopPLogitsWarper(sampling.top_p),
        MinPLogitsWarper(sampling.min_p),
    ]
    scores = logits[None]
    for processor in processors:
        scores = processor(torch.tensor([SEEN]), scores)
    return scores.softmax(-1)[0]


def seen_tokens(count: int) -> Tensor:
    seen = torch.zeros(count, 12, dtype=torch.bool)
    seen[:, SEEN] = True
    return seen


@pytest.mark.parametrize("sampling", SAMPLING_CONFIGS)
def test_token_frequencies_match_their_probabilities(sampling: SamplingConfig) -> None:
    """With evenly spaced random numbers, each frequency is exact to 1 / count."""
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(3))
    count = 20_000
    numbers = (torch.arange(count) + 0.5) / count
    sampled = sampling.sample(logits.expand(count, 12), numbers, seen_tokens(count))
    frequencies = torch.bincount(sampled, minlength=12) / count
    expected = exact_probs(sampling, logits)
    assert (frequencies - expected).abs().max() < 2 / count
    assert not frequencies[expected == 0].any()


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_of_transformers_and_vllm_for_all_tokens(off: int) -> None:
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(3)).expand(500, 12)
    numbers, every, limited = (torch.arange(500) + 0.5) / 500, SamplingConfig(1.0), SamplingConfig(1.0, top_k=2)
    sampled = SamplingConfig(1.0, top_k=off).sample(logits, numbers)
    assert torch.equal(sampled, every.sample(logits, numbers))
    assert not torch.equal(sampled, limited.sample(logits, numbers))


def test_extreme_random_numbers_select_allowed_tokens() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    for sampling in SAMPLING_CONFIGS:
        for number in (0.0, 1 - 2**-24):
            sampled = sampling.sample(logits, torch.full((5,), number), seen_tokens(5))
            for row in range(5):
                assert exact_probs(sampling, logits[row])[sampled[row]] > 0


@pytest.mark.parametrize("options", [
    {"top_p": 1e-300}, {"top_p": 5e-324}, {"top_p": 5e-324, "top_k": 3}, {"top_k": 1}, {"min_p": 1.0},
    {"temperature": 5e-324}, {"temperature": 1e-300}, {"top_p": 5e-324, "min_p": 1.0},
])  # fmt: skip
def test_extreme_options_leave_the_most_likely_token(options: dict[str, float]) -> None:
    logits = 30 * torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    sampling = SamplingConfig(**{"temperature": 1.0} | options)
    for number in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(sampling.sample(logits, torch.full((4,), number)), logits.argmax(-1))


@pytest.mark.parametrize("options", [
    {"min_p": 5e-324}, {"top_k": 10**9}, {"temperature": 1e300}, {"repetition_penalty": 100.0}
])  # fmt: skip
def test_extreme_options_give_tokens_of_the_vocabulary(options: dict[str, float]) -> None:
    logits = 30 * torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    sampling = SamplingConfig(**{"temperature": 1.0} | options)
    for number in (0.0, 0.5, 1 - 2**-24):
        sampled = sampling.sample(logits, torch.full((4,), number), seen_tokens(4))
        assert 0 <= sampled.min() <= sampled.max() < 12


@pytest.mark.parametrize(("name", "value"), [
    ("top_p", 0.0), ("top_p", float("nan")), ("temperature", float("nan")), ("temperature", float("inf")),
    ("min_p", float("nan")), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300),
    ("repetition_penalty", float("nan")),
])  # fmt: skip
def test_options_without_a_distribution_are_refused(name: str, value: float) -> None:
    with pytest.raises(FieldError) as error:
        SamplingConfig(**{name: value})
    assert error.value.field == name


def numbers_of(seed: int, stop: int = 200) -> Tensor:
    sampling = SamplingConfig(1.0, seed=seed)
    return torch.stack([sampling.uniform_numbers(f"row {row}", 0, stop) for row in range(6)])


def test_random_numbers_depend_only_on_seed_and_row() -> None:
    numbers = numbers_of(0)
    assert torch.equal(SamplingConfig().uniform_numbers("row 3", 17, 60), numbers[3, 17:60])
    assert torch.equal(numbers_of(0, 50), numbers[:, :50])
    rows = torch.cat([numbers_of(seed) for seed in (0, 1, 2, 2**32, 2**40)])
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_answers_of_nan_are_an_error(value: float, temperature: float, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen2"))
    with torch.no_grad():
        model.norm.weight[3] = value
    with pytest.raises(UserError):
        generate_batch(model, [[1, 2, 3]], SamplingConfig(temperature, max_new_tokens=3), frozenset())


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


def test_greedy_answers_with_a_penalty_equal_transformers(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen2")
    model, oracle = load_model(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (9, 1, 5)]
    answers = {}
    for penalty in (1.0, 1.3, 0.7):
        sampling = SamplingConfig(repetition_penalty=penalty, max_new_tokens=12)
        answers[penalty] = generate_batch(model, prompts, sampling, frozenset())
        for prompt, answer in zip(prompts, answers[penalty], strict=True):
            options = {"repetition_penalty": penalty, "max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
            ids = oracle.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
            assert answer == ids[0, len(prompt) :].tolist()
    assert answers[1.0] != answers[1.3] != answers[0.7]


def test_penalized_rows_keep_their_tokens_when_others_finish(tmp_path: Path) -> None:
    """Rows that are finished leave the batch, with their columns of the state."""
    model = load_model(make_checkpoint(tmp_path, "qwen2"))
    sampling = SamplingConfig(repetition_penalty=1.3, max_new_tokens=24)
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (9, 1, 5, 2)]
    together = generate_batch(model, prompts, sampling, frozenset())
    stopped = generate_batch(
        model, prompts, sampling, frozenset(), is_finished=lambda answer: answer[0] != together[1][0]
    )
    assert stopped[1] == together[1]


@pytest.mark.parametrize(("values", "field"), [
    ({"temperature": -1.0}, "temperature"), ({"top_k": -2}, "top_k"), ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens"), ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"), ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"stop_strings": ("",)}, "stop_strings"),
])  # fmt: skip
def test_invalid_values_name_their_field(values: dict, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        SamplingConfig(**values)
    assert caught.value.field == field
