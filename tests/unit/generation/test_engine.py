"""Continuous batching: a request gets the same tokens alone, in any batch and in any row."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers import random_checkpoints
from tests.helpers.compare_layouts import DENSE
from tests.helpers.random_checkpoints import FP32, load_model, make_checkpoint, random_tokens, save
from tunekit import build
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NF4Config, NoQuantization

DIST = DistributedContext(0, "cpu")
Outputs = dict[str, list[TokenOutput]]
GREEDY = SamplingConfig(max_new_tokens=10)
SAMPLED = SamplingConfig(1.3, top_k=20, top_p=0.95, max_new_tokens=10, seed=5)
PROMPTS = [random_tokens(1, length, seed=length)[0].tolist() for length in (7, 1, 12, 3, 9)]
FAMILIES = ["llama3.2", "qwen3-next", "falcon-h1", "nemotron-h", "deepseek-v3", "gemma3", "gpt-oss", "lfm2-biases"]
FAMILIES += ["phi3-long", "gemma3n", "llama4"]  # LongRoPE from 8 tokens, keys of other layers, chunks


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    return load_model(make_checkpoint(tmp_path, "qwen2"))


def make_requests(sampling: SamplingConfig, **options: object) -> list[GenerationRequest]:
    return [GenerationRequest(f"row {i}", prompt, sampling, **options) for i, prompt in enumerate(PROMPTS)]


def answer(model: Decoder, requests: Sequence[GenerationRequest], max_num_seqs: int = 3) -> Outputs:
    return GenerationEngine(model, max_num_seqs, 64, DIST).generate(requests)


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    return [output.token for output in outputs]


@torch.no_grad()
def compute_logprobs(model: Decoder, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> list[float]:
    """Log-probability of each token, without a cache. LongRoPE depends on the length: one pass per token."""
    row = torch.tensor([[*prompt, *tokens]])
    ends = range(len(prompt), row.shape[1])
    if model.rope_switch_lengths:
        logits = torch.stack([model(row[:, :end])[0, -1] for end in ends])
    else:
        logits = model(row[:, :-1])[0, len(prompt) - 1 :]
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()


def check_logprobs(model: Decoder, prompt: Sequence[int], outputs: Sequence[TokenOutput], temperature: float) -> None:
    expected = compute_logprobs(model, prompt, tokens_of(outputs), temperature)
    assert [output.logprob for output in outputs] == pytest.approx(expected, abs=1e-4)


def drain(engine: GenerationEngine) -> Outputs:
    outputs: Outputs = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_get_the_same_tokens_alone_in_a_batch_and_in_used_rows(name: str, tmp_path: Path) -> None:
    """Requests with and without sampling alternate."""
    model = load_model(make_checkpoint(tmp_path, name))
    requests = make_requests(GREEDY)
    requests[::2] = make_requests(SAMPLED)[::2]
    alone = [answer(model, [request]) for request in requests[:2]]
    in_a_used_row, *batches = (answer(model, requests, max_num_seqs) for max_num_seqs in (1, 3, 8))
    for request in requests:
        name = request.request_id
        tokens = tokens_of(in_a_used_row[name])
        expected = compute_logprobs(model, request.prompt, tokens, request.sampling.temperature or 1)
        for outputs in (in_a_used_row, *batches, *(run for run in alone if name in run)):
            assert tokens_of(outputs[name]) == tokens
            assert [output.logprob for output in outputs[name]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_appended_tokens_continue_rows_of_different_lengths(name: str, tmp_path: Path) -> None:
    """Equal to a prompt that contains the appended tokens. Rows append 1 to 9 tokens, among other rows."""
    model = load_model(make_checkpoint(tmp_path, name))
    engine = GenerationEngine(model, 4, 64, DIST)
    requests = make_requests(SAMPLED, keep_cache=True)[:3]
    first = engine.generate(requests)
    engine.add_request(GenerationRequest("another", PROMPTS[3], replace(GREEDY, max_new_tokens=20)))
    engine.step()
    results = [random_tokens(1, length, seed=40 + length)[0].tolist() for length in (9, 1, 4)]
    for request, result in zip(requests, results, strict=True):
        engine.append_tokens(request.request_id, result, GREEDY)
    second = drain(engine)
    for request, result in zip(requests, results, strict=True):
        row = [*request.prompt, *tokens_of(first[request.request_id]), *result]
        outputs = second[request.request_id]
        fresh = answer(model, [GenerationRequest("fresh", row, GREEDY)])["fresh"]
        assert tokens_of(outputs) == tokens_of(fresh)
        check_logprobs(model, row, outputs, 1)
    alone = answer(model, [GenerationRequest("x", PROMPTS[3], replace(GREEDY, max_new_tokens=20))])["x"]
    assert tokens_of(second["another"]) == tokens_of(alone)[1:]
    assert len(engine.resumable) == 3


def test_a_turn_after_a_stop_token_and_new_random_numbers(model: Decoder) -> None:
    """Random numbers of a turn continue those of earlier turns; the stop token is an output."""
    unstopped = tokens_of(answer(model, make_requests(SAMPLED)[:1])["row 0"])
    stops = frozenset({unstopped[3]})
    request = GenerationRequest("row 0", PROMPTS[0], SAMPLED, stops, keep_cache=True)
    engine = GenerationEngine(model, 2, 64, DIST)
    first = engine.generate([request])["row 0"]
    end = unstopped.index(unstopped[3]) + 1
    assert tokens_of(first) == unstopped[:end]
    assert [output.finish_reason for output in first] == [None] * (end - 1) + ["stop"]
    engine.append_tokens("row 0", unstopped[end : end + 1])
    second = tokens_of(drain(engine)["row 0"])
    assert second[:1] != first[:1]


def test_reserved_rows_are_given_up_if_nothing_runs(model: Decoder) -> None:
    engine = GenerationEngine(model, 2, 64, DIST)
    requests = make_requests(GREEDY, keep_cache=True)
    outputs = engine.generate(requests)  # five requests, two rows
    for request in requests:
        engine.append_tokens(request.request_id, [5, 6])
    continued = drain(engine)
    for request in requests:
        row = [*request.prompt, *tokens_of(outputs[request.request_id]), 5, 6]
        assert tokens_of(continued[request.request_id]) == tokens_of(
            answer(model, [GenerationRequest("x", row, GREEDY)])["x"]
        )


def test_rows_with_different_options_share_a_batch(model: Decoder) -> None:
    samplings = [
        GREEDY,
        SAMPLED,
        SamplingConfig(0.7, min_p=0.1, max_new_tokens=4, seed=1),
        SamplingConfig(repetition_penalty=1.4, max_new_tokens=9),
        SamplingConfig(1.0, top_p=0.8, repetition_penalty=0.8, max_new_tokens=7, seed=9),
    ]
    requests = [
        GenerationRequest(f"row {i}", prompt, sampling, num_logprobs=i)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]
    for max_num_seqs in (5, 2):
        outputs = answer(model, requests, max_num_seqs)
        for i, request in enumerate(requests):
            row = outputs[request.request_id]
            assert tokens_of(row) == tokens_of(answer(model, [request])[request.request_id])
            assert len(row) == request.sampling.max_new_tokens and row[-1].finish_reason == "length"
            assert all(len(output.top_logprobs) == i for output in row)
            check_logprobs(model, request.prompt, row, request.sampling.temperature or 1)


def test_top_logprobs_are_those_of_the_logits(model: Decoder) -> None:
    for mode, temperature in (("raw_logprobs", 1.0), ("processed_logprobs", 0.5)):
        engine = GenerationEngine(model, 2, 64, DIST, mode)
        request = GenerationRequest("x", PROMPTS[0], SamplingConfig(0.5, top_k=2, max_new_tokens=1), num_logprobs=5)
        (output,) = engine.generate([request])["x"]
        with torch.no_grad():
            logprobs = (model(torch.tensor([PROMPTS[0]]))[0, -1] / temperature).log_softmax(-1)
        values, tokens = logprobs.topk(5)
        assert [token for token, _ in output.top_logprobs] == tokens.tolist()
        assert torch.allclose(torch.tensor([value for _, value in output.top_logprobs]), values, atol=1e-5)
        assert abs(output.logprob - logprobs[output.token].item()) < 1e-5


def test_equal_prompts_are_computed_once(model: Decoder) -> None:
    sizes: list[tuple[int, ...]] = []
    handle = model.register_forward_pre_hook(lambda module, args: sizes.append(tuple(args[0].shape)))
    requests = [GenerationRequest(f"{i}", PROMPTS[i % 2], SAMPLED) for i in range(6)]
    outputs = answer(model, requests, max_num_seqs=6)
    handle.remove()
    assert sizes == [(2, 7)] + [(6, 1)] * 9
    assert len({tuple(tokens_of(row)) for row in outputs.values()}) == 6, "samples of a group differ"
    for request in requests:
        assert tokens_of(answer(model, [request])[request.request_id]) == tokens_of(outputs[request.request_id])


def test_finished_rows_cost_nothing(model: Decoder) -> None:
    sizes: list[int] = []
    requests = [
        GenerationRequest(f"row {i}", PROMPTS[i], replace(GREEDY, max_new_tokens=count))
        for i, count in enumerate((3, 9, 5, 2, 6))
    ]
    handle = model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    answer(model, requests, max_num_seqs=5)
    handle.remove()
    decode_sizes = sizes[-8:]
    assert decode_sizes == [5, 4, 3, 3, 2, 1, 1, 1]


def test_requests_that_arrive_later_and_aborted_ones(model: Decoder) -> None:
    engine = GenerationEngine(model, 2, 64, DIST)
    requests = make_requests(SAMPLED)
    outputs: Outputs = {}
    for request in requests:
        engine.add_request(request)
        for _ in range(2):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
    engine.abort("row 2")
    engine.abort("nothing")
    before = len(outputs.get("row 2", []))
    for request_id, more in drain(engine).items():
        outputs.setdefault(request_id, []).extend(more)
    assert len(outputs.get("row 2", [])) == before < 10
    for request in requests:
        if request.request_id != "row 2":
            expected = answer(model, [request])[request.request_id]
            assert tokens_of(outputs[request.request_id]) == tokens_of(expected)
    assert not engine.has_unfinished_requests


def test_constrained_tokens(model: Decoder) -> None:
    """A mask for each position; log-probabilities are those of the model."""

    def allow(tokens: Sequence[int]) -> torch.Tensor | None:
        if len(tokens) == 2:
            return None
        mask = torch.zeros(model.spec.vocab, dtype=torch.bool)
        mask[10 + len(tokens)] = True
        return mask

    constrained = GenerationRequest("x", PROMPTS[0], replace(SAMPLED, max_new_tokens=5), allowed_tokens=allow)
    outputs = answer(model, [constrained, *make_requests(GREEDY)[1:3]])
    tokens = tokens_of(outputs["x"])
    assert [*tokens[:2], *tokens[3:]] == [10, 11, 13, 14]
    check_logprobs(model, PROMPTS[0], outputs["x"], SAMPLED.temperature)
    assert tokens_of(outputs["row 1"]) == tokens_of(answer(model, make_requests(GREEDY)[1:2])["row 1"])


def test_answers_end_at_max_model_len(model: Decoder) -> None:
    engine = GenerationEngine(model, 2, 12, DIST)
    outputs = engine.generate([GenerationRequest("x", PROMPTS[0], GREEDY, keep_cache=True)])["x"]
    assert len(outputs) == 5 and outputs[-1].finish_reason == "length"
    for action in (
        lambda: engine.add_request(GenerationRequest("y", PROMPTS[2], GREEDY)),
        lambda: engine.append_tokens("x", [1]),
    ):
        with pytest.raises(UserError):
            action()


@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4, 8.0, dropout=0.3), DoRAConfig(4)], ids=lambda x: x.kind)
@pytest.mark.parametrize("weights", [NoQuantization(), NF4Config()], ids=lambda x: x.kind)
def test_the_step_after_an_update_uses_the_new_weights(
    adapter: NoAdapter, weights: NoQuantization, tmp_path: Path
) -> None:
    """The engine has no copy of any weight."""
    folder = save(random_checkpoints.build(DENSE), tmp_path)
    model = build.build_model(HFCheckpoint.open(folder), weights, adapter, FP32, MemoryConfig(), DIST).train()
    if weights.kind != "none" and adapter.kind == "none":
        return  # nothing is trained
    engine, requests = GenerationEngine(model, 3, 64, DIST), make_requests(GREEDY)
    before = engine.generate(requests)
    assert model.training
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    after = engine.generate(requests)
    model.eval()
    for request in requests:
        check_logprobs(model, request.prompt, after[request.request_id], 1)
    assert before != after


def test_sleep_frees_the_cache_and_requests_can_be_continued(model: Decoder) -> None:
    engine = GenerationEngine(model, 2, 64, DIST)
    first = tokens_of(engine.generate([GenerationRequest("x", PROMPTS[0], GREEDY, keep_cache=True)])["x"])
    engine.sleep()
    assert engine.batch is None
    engine.append_tokens("x", [5, 6])
    row = [*PROMPTS[0], *first, 5, 6]
    assert tokens_of(drain(engine)["x"]) == tokens_of(answer(model, [GenerationRequest("y", row, GREEDY)])["y"])
