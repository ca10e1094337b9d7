"""Continuous batching compared with greedy decoding of each prompt in transformers."""

from pathlib import Path

import pytest
import torch

from tests.helpers.random_checkpoints import load_model, load_transformers_model, make_checkpoint, random_tokens
from tunekit.distributed.context import DistributedContext
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig

# (tokens of the prompt, of the answer); a request arrives after every second step
REQUESTS = [(9, 12), (3, 5), (14, 20), (1, 9), (6, 16), (9, 3)]
FAMILIES = ["llama3.2", "qwen3-next", "qwen3.5", "bamba", "deepseek-v3", "gemma3", "phi3-long"]


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_that_arrive_one_by_one_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    model, reference = load_model(folder), load_transformers_model(folder)
    engine = GenerationEngine(model, 3, 64, DistributedContext(0, "cpu"))
    arriving = [
        GenerationRequest(f"{i}", random_tokens(1, length, seed=i)[0].tolist(), SamplingConfig(max_new_tokens=count))
        for i, (length, count) in enumerate(REQUESTS)
    ]
    requests, answers = [*arriving], {request.request_id: [] for request in arriving}
    while arriving or engine.has_unfinished_requests:
        if arriving:
            engine.add_request(arriving.pop(0))
        for output in (*engine.step(), *engine.step()):
            answers[output.request_id].append(output.token)
    for request in requests:
        # With a cache, transformers keeps the frequencies of short rows (LongRoPE).
        options = {"do_sample": False, "eos_token_id": None, "use_cache": not model.rope_switch_lengths}
        options |= {"max_new_tokens": request.sampling.max_new_tokens, "pad_token_id": 0}
        row = torch.tensor([request.prompt])
        expected = reference.generate(row, attention_mask=torch.ones_like(row), **options)
        assert answers[request.request_id] == expected[0, row.shape[1] :].tolist()
