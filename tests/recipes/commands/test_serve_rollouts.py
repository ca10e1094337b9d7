"""`tune serve` as the source of rollouts: the tokens, log-probabilities and weights of the engine in the trainer."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.servers import ServerProcess, write_random_adapter
from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import main as cli
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import Answer, GenerationRequest, TokenOutput
from tunekit.generation.rollout_engine import RolloutEngine
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.stop_strings import StopStrings
from tunekit.loggers import metrics_file
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.rollouts.openai_client import OpenAIClient
from tunekit.rollouts.served_model import ServedAdapter
from tunekit.rollouts.server_engine import ServerEngine, completion_request

MODEL = "tunekit/nano"
DIST = DistributedContext(0, "cpu")
SAMPLING = SamplingConfig(temperature=1.3, max_new_tokens=24, stop_strings=(" the",), seed=5)
FLAGS = ("--dtype", "fp32", "--logprobs-mode", "processed_logprobs", "--allow-runtime-lora-updating")
CONFIG = """\
recipe: grpo
model: tunekit/nano
data: {source: prompts.jsonl, max_length: 64}
rewards: [{kind: function, function: rewards.py:vowels}]
loss: reinforce_pp
adapter: {kind: lora, rank: 4}
optimizer: {kind: adamw, lr: 3e-3}
precision: {compute_dtype: fp32}
device: cpu
global_batch_size: 4
num_generations: 2
sampling: {max_new_tokens: 8, top_k: 1}
max_steps: 3
log_every: 1
"""
# The answers to a prompt are the same with top_k=1, so advantages compare the prompts of a step (reinforce_pp).
REWARDS = """\
def vowels(completions, **kwargs):
    return [sum(char in "aeiou" for char in completion[0]["content"]) for completion in completions]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(*FLAGS, TUNEKIT_API_KEY="secret")
    yield process
    process.end()


@pytest.fixture
def client(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> OpenAIClient:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    return OpenAIClient("engine", f"{server.url}/v1", "VLLM_API_KEY", 60, 0)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, HFCheckpoint, Tokenizer]:
    """The bundled model with an adapter that changes its answers."""
    path = write_random_adapter(tmp_path_factory.mktemp("adapters") / "random", LoRAConfig(rank=4), 1)
    model, tokenizer = build.load_for_inference(str(path), PrecisionConfig(compute_dtype="fp32"), DIST)
    return model, HFCheckpoint.open(assets.MODELS[MODEL], MODEL), tokenizer


def served_request(request: GenerationRequest, context: list[int], num_drawn: int) -> GenerationRequest:
    """The request as the server hands it to its engine."""
    answer = Answer(request, request.sampling, context, request.sampling.max_new_tokens, num_drawn)
    sampling = replace(request.sampling, seed=completion_request("", answer)["seed"])
    return replace(request, prompt=context, sampling=sampling, sample_name="choice 0")


def assert_same(outputs: list[TokenOutput], expected: list[TokenOutput]) -> None:
    assert [(output.token, output.finish_reason) for output in outputs] == [
        (output.token, output.finish_reason) for output in expected
    ]
    logprobs = torch.tensor([[a.logprob, b.logprob] for a, b in zip(outputs, expected, strict=True)])
    torch.testing.assert_close(logprobs[:, 0], logprobs[:, 1], rtol=0, atol=1e-4)


def test_tokens_and_logprobs_are_those_of_the_engine(
    client: OpenAIClient, adapted: tuple[Decoder, HFCheckpoint, Tokenizer], tmp_path: Path
) -> None:
    model, checkpoint, tokenizer = adapted
    stop = StopStrings(tokenizer, SAMPLING.stop_strings)
    texts = ["What is 3 plus 4?", "A story about a fox, please.", "Hello!", "Name three rivers."]
    prompts = [encode_conversation(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    requests = [
        GenerationRequest(f"row {index}", prompt, SAMPLING, stop.token_ids, stop.is_finished, keep_cache=True)
        for index, prompt in enumerate(prompts)
    ]
    served = ServedAdapter(client, MODEL, tmp_path, LoRAConfig(rank=4), checkpoint, DIST)
    engine: RolloutEngine = ServerEngine(served, model, 4, 256, DIST)
    native: RolloutEngine = GenerationEngine(model, 4, 256, DIST)
    engine.check([1])
    engine.sync_weights()
    outputs = engine.generate(requests)
    expected = native.generate([served_request(request, [*request.prompt], 0) for request in requests])
    for request in requests:
        assert_same(outputs[request.request_id], expected[request.request_id])
    reasons = {answer[-1].finish_reason for answer in outputs.values()}
    assert "stop" in reasons, "no stop token or stop string was compared"

    first = [output.token for output in outputs["row 0"]]
    observation = tokenizer.encode("More, please")
    engine.append_tokens("row 0", observation)
    second: list[TokenOutput] = []
    while engine.has_unfinished_requests:
        second += engine.step()
    context = [*prompts[0], *first, *observation]
    native.abort("row 0")
    assert_same(second, native.generate([served_request(requests[0], context, len(first))])["row 0"])
    engine.sleep()


def test_training_is_that_of_the_engine(client: OpenAIClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {n} words"} for n in range(6)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(REWARDS)
    Path("grpo.yaml").write_text(CONFIG)
    engine = f"engine={{kind: server, base_url: '{client.base_url}'}}"
    assert cli.main(("run", "grpo", "grpo.yaml", "output_dir=native")) == 0
    assert cli.main(("run", "grpo", "grpo.yaml", "output_dir=served", engine)) == 0
    native, served = (
        [line for line in metrics_file.read_metrics(Path(name)) if "loss" in line] for name in ("native", "served")
    )
    assert len(native) == len(served) == 3 and all(line["grad_norm"] > 0.01 for line in native)
    for a, b in zip(native, served, strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward"):
            assert b[key] == pytest.approx(a[key], abs=1e-4), key
        assert b["sampling/logprob_diff"] < 1e-5, "the server has other weights"
    completions = [
        [json.loads(line)["completion"] for line in Path(name, "completions.jsonl").read_text().splitlines()]
        for name in ("native", "served")
    ]
    assert completions[0] == completions[1] and len({*completions[0]}) > 1
    assert [entry["id"] for entry in client.request("models")["data"]] == [MODEL], "adapters are left on the server"
    assert "secret" not in Path("served/config.yaml").read_text()


def test_adapters_are_loaded_and_unloaded(client: OpenAIClient, tmp_path: Path) -> None:
    path = write_random_adapter(tmp_path / "random", LoRAConfig(rank=2), 3)
    load = {"lora_name": "random", "lora_path": str(path)}
    prompt = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    base = client.request("completions", {"model": MODEL, **prompt})["choices"][0]
    client.request("load_lora_adapter", load)
    changed = client.request("completions", {"model": "random", **prompt})["choices"][0]
    assert changed["token_ids"] != base["token_ids"] and base["prompt_token_ids"] == [5, 6, 7]
    for body in (load, {**load, "lora_name": MODEL}, {**load, "lora_name": "x", "lora_path": str(tmp_path / "no")},
                 {**load, "lora_name": "x", "lora_path": MODEL}, {"lora_name": "x"}):  # fmt: skip
        with pytest.raises(UserError, match="HTTP status 400"):
            client.request("load_lora_adapter", body)
    assert client.request("completions", {"model": "random", **prompt})["choices"][0] == changed
    client.request("unload_lora_adapter", {"lora_name": "random"})
    for path_and_body in (
        ("unload_lora_adapter", {"lora_name": "random"}),
        ("completions", {"model": "random", **prompt}),
    ):
        with pytest.raises(UserError, match="HTTP status 404"):
            client.request(*path_and_body)
    assert client.request("completions", {"model": MODEL, **prompt})["choices"][0] == base


def test_token_ids_are_fields_or_names(client: OpenAIClient) -> None:
    """Stop tokens have no text, but an id and a log-probability."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 6, "logprobs": 1}
    ids = client.request("completions", {**body, "return_token_ids": True})["choices"][0]["token_ids"]
    stop = {**body, "stop_token_ids": [ids[2]], "ignore_eos": True, "return_tokens_as_token_ids": True}
    choice = client.request("completions", stop)["choices"][0]
    count = ids.index(ids[2]) + 1
    assert choice["finish_reason"] == "stop" and "token_ids" not in choice
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids[:count]]
    assert [*choice["logprobs"]["top_logprobs"][0]] == [f"token_id:{ids[0]}"]
    plain = client.request("completions", {**stop, "return_tokens_as_token_ids": False})["choices"][0]
    assert plain["text"] == choice["text"] and len(plain["logprobs"]["tokens"]) == count - 1
    with pytest.raises(UserError, match="stop_token_ids"):
        client.request("completions", {**body, "stop_token_ids": ["a"]})
