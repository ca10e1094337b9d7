"""Rollouts from a server, against one on this machine: token ids, failures, and versions of adapters."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.completion_server import EOS, CompletionServer, TokenFormat, answer_tokens, run_server
from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.prompt_data import PromptDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.policy.engine_config import NativeEngineConfig, ServerEngineConfig
from tunekit.quantization.config import NoQuantization
from tunekit.recipes.grpo import GRPOConfig
from tunekit.rewards.answer_rewards import Length
from tunekit.rollouts import openai_client
from tunekit.rollouts.openai_client import OpenAIClient
from tunekit.rollouts.served_model import ServedAdapter, ServedModel
from tunekit.rollouts.server_engine import ServerEngine

DIST = DistributedContext(0, "cpu")
SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=5, seed=1)
LORA = LoRAConfig(rank=2)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "FIRST_DELAY", 0.01)


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with run_server() as server:
        yield server


@pytest.fixture(scope="module")
def adapted() -> tuple[Decoder, HFCheckpoint]:
    """tunekit/nano with an adapter."""
    checkpoint = HFCheckpoint.open(assets.MODELS["tunekit/nano"], "tunekit/nano")
    options = NoQuantization(), LORA, PrecisionConfig(), MemoryConfig()
    return build.build_model(checkpoint, *options, DIST), checkpoint


def make_client(url: str, timeout: float = 10.0, max_retries: int = 3) -> OpenAIClient:
    return OpenAIClient("engine", url, "STUB_API_KEY", timeout, max_retries)


def make_engine(client: OpenAIClient, model: Decoder, max_num_seqs: int = 4, name: str = "base") -> ServerEngine:
    return ServerEngine(ServedModel(client, name), model, max_num_seqs, 64, DIST)


def make_requests(count: int, **changes: object) -> list[GenerationRequest]:
    requests = [GenerationRequest(f"row {n}", [n + 1, n + 2, n + 3], SAMPLING, frozenset({EOS})) for n in range(count)]
    return [replace(request, **changes) for request in requests]  # type: ignore[arg-type]


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [output.token for output in outputs]


@pytest.mark.parametrize("token_format", ["token_ids", "token_id_texts"])
def test_token_ids_in_both_formats(adapted: tuple[Decoder, HFCheckpoint], token_format: TokenFormat) -> None:
    with run_server(token_format) as server:
        engine = make_engine(make_client(server.url), adapted[0])
        outputs = engine.generate(make_requests(6))
        engine.sleep()
        assert server.max_active <= 4 and len(server.completions) == 6
        bodies = {tuple(body["prompt"]): body for body in server.completions}
    assert len({body["seed"] for body in bodies.values()}) == 6
    for request in make_requests(6):
        body, answer = bodies[tuple(request.prompt)], outputs[request.request_id]
        assert tokens_of(answer) == answer_tokens(body["prompt"], body["seed"], 5)
        assert [output.logprob for output in answer] == [-token / 100 for token in tokens_of(answer)]
        assert [output.finish_reason for output in answer] == [None] * 4 + ["length"]
        options = {"model": "base", "temperature": 0.7, "top_p": 0.9, "top_k": -1, "stop_token_ids": [EOS]}
        assert options.items() <= body.items() and body["ignore_eos"] is True


def test_text_without_token_ids_is_refused(adapted: tuple[Decoder, HFCheckpoint]) -> None:
    with run_server("texts") as server, pytest.raises(UserError, match="return_token_ids"):
        make_engine(make_client(server.url), adapted[0]).generate(make_requests(1))


def test_the_most_likely_tokens_are_reported(adapted: tuple[Decoder, HFCheckpoint]) -> None:
    with run_server("token_id_texts") as server:
        outputs = make_engine(make_client(server.url), adapted[0]).generate(make_requests(1, num_logprobs=2))["row 0"]
        assert server.completions[0]["logprobs"] == 2
    assert [output.top_logprobs for output in outputs] == [[(output.token, output.logprob), (0, -9.0)]
                                                           for output in outputs]  # fmt: skip


def test_errors_of_the_server_are_repeated(adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer) -> None:
    engine = make_engine(make_client(server.url), adapted[0])
    server.failures = [500, 503, 429]
    server.finish_reasons = ["abort"]
    assert len(engine.generate(make_requests(1))["row 0"]) == 5
    assert len(server.completions) == 5
    seeds = {body["seed"] for body in server.completions}
    assert len(seeds) == 1, "a repeated request has the same answer"
    server.failures = [500] * 4
    with pytest.raises(UserError, match="HTTP status 500: overloaded") as error:
        engine.generate(make_requests(1))
    assert server.url in str(error.value) and "\n" not in str(error.value)
    server.failures = [400]
    with pytest.raises(UserError, match="HTTP status 400"):
        make_engine(make_client(server.url), adapted[0]).generate(make_requests(1))
    assert len(server.completions) == 10, "400 is not repeated"


def test_timeouts(adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer) -> None:
    server.delays = [1.0]
    engine = make_engine(make_client(server.url, timeout=0.2), adapted[0])
    assert len(engine.generate(make_requests(1))["row 0"]) == 5
    server.delays = [1.0]
    with pytest.raises(UserError, match="timed out"):
        make_engine(make_client(server.url, timeout=0.2, max_retries=0), adapted[0]).generate(make_requests(1))


def test_server_that_dies(adapted: tuple[Decoder, HFCheckpoint]) -> None:
    with run_server() as server:
        engine = make_engine(make_client(server.url), adapted[0])
        engine.generate(make_requests(2))
    with pytest.raises(UserError, match="refused") as error:
        engine.generate(make_requests(2))
    assert server.url in str(error.value)


def test_answers_end_at_the_first_stop_condition(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer
) -> None:
    engine = make_engine(make_client(server.url), adapted[0])
    expected = tokens_of(engine.generate(make_requests(1))["row 0"])
    for changes in ({"stop_token_ids": frozenset({expected[2]})}, {"is_finished": lambda tokens: len(tokens) == 3}):
        answer = engine.generate(make_requests(1, **changes))["row 0"]
        assert tokens_of(answer) == expected[:3] and answer[-1].finish_reason == "stop"
    server.finish_reasons = ["stop"]  # a stop condition of the server alone
    answer = engine.generate(make_requests(1))["row 0"]
    assert tokens_of(answer) == expected and answer[-1].finish_reason == "stop"


def test_appended_tokens_follow_all_earlier_ones(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer
) -> None:
    engine = make_engine(make_client(server.url), adapted[0])
    first = tokens_of(engine.generate(make_requests(1, keep_cache=True))["row 0"])
    engine.append_tokens("row 0", [7, 8], replace(SAMPLING, max_new_tokens=2))
    second: list[TokenOutput] = []
    while engine.has_unfinished_requests:
        second += engine.step()
    body = server.completions[1]
    assert body["prompt"] == [1, 2, 3, *first, 7, 8] and body["max_tokens"] == len(second) == 2
    assert body["seed"] != server.completions[0]["seed"]
    engine.append_tokens("row 0", [9] * 50)
    while engine.has_unfinished_requests:
        engine.step()
    assert server.completions[2]["max_tokens"] == 2, "the rest of max_model_len"
    with pytest.raises(UserError, match="leave no space"):
        engine.append_tokens("row 0", [9])


def test_aborted_requests_have_no_outputs(adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer) -> None:
    server.delays = [0.3]
    engine = make_engine(make_client(server.url), adapted[0], max_num_seqs=1)
    for request in make_requests(3):
        engine.add_request(request)
    engine.abort("row 0")
    engine.abort("row 1")
    names = set()
    while engine.has_unfinished_requests:
        names |= {output.request_id for output in engine.step()}
    assert names == {"row 2"}
    assert [body["prompt"][0] for body in server.completions] in ([1, 3], [3])


def open_adapter(server: CompletionServer, adapted: tuple[Decoder, HFCheckpoint], directory: Path) -> ServerEngine:
    served = ServedAdapter(make_client(server.url), "base", directory, LORA, adapted[1], DIST)
    return ServerEngine(served, adapted[0], 4, 64, DIST)


def test_each_version_of_an_adapter_has_a_name(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer, tmp_path: Path
) -> None:
    engine = open_adapter(server, adapted, tmp_path / "adapters")
    engine.check([1])
    for _ in range(2):
        engine.sync_weights()
        paths = [Path(path) for path in server.models.values() if path]
        assert [path.parent for path in paths] == [(tmp_path / "adapters").resolve()]
        engine.generate(make_requests(2))
        assert {body["model"] for body in server.completions[-2:]} == {server.loaded[-1][0]}
        engine.sleep()
        assert [*server.models] == ["base"] and not any((tmp_path / "adapters").iterdir())
    names = [name for name, _ in server.loaded]
    assert len({*names}) == 3 and all("adapter_model.safetensors" in files for _, files in server.loaded)


def test_adapter_is_removed_after_an_error(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer, tmp_path: Path
) -> None:
    server.change = lambda reply: None
    with pytest.raises(UserError):
        open_adapter(server, adapted, tmp_path).check([1])
    engine = open_adapter(server, adapted, tmp_path)
    with pytest.raises(UserError), engine.closing_on_error():
        engine.sync_weights()
        engine.generate(make_requests(2))
    assert len(server.loaded) == 2 and [*server.models] == ["base"] and not any(tmp_path.iterdir())


def test_restarted_server_loads_the_adapter_again(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer, tmp_path: Path
) -> None:
    engine = open_adapter(server, adapted, tmp_path)
    engine.sync_weights()
    server.models = {"base": ""}
    assert len(engine.generate(make_requests(4))) == 4
    assert [name for name, _ in server.loaded] == [server.loaded[0][0]] * 2
    engine.sleep()


def test_start_checks_name_length_and_connection(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer
) -> None:
    model = adapted[0]
    with pytest.raises(UserError, match="'other' .*: base"):
        make_engine(make_client(server.url), model, name="other").check([1])
    server.max_model_len = 32
    with pytest.raises(UserError, match="max_length is 64"):
        make_engine(make_client(server.url), model).check([1])
    start = time.monotonic()
    with pytest.raises(UserError, match="127.0.0.1:9/v1: /models: .*refused"):
        make_engine(make_client("http://127.0.0.1:9/v1", max_retries=20), model).check([1])
    assert time.monotonic() - start < 60, "a start is not repeated: 20 retries would take minutes"


def test_adapters_that_the_server_refuses(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer, tmp_path: Path
) -> None:
    server.failures = [404]
    with pytest.raises(UserError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        open_adapter(server, adapted, tmp_path).check([1])


def test_key_is_sent_and_is_no_part_of_the_config(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_API_KEY", "secret")
    make_engine(make_client(server.url), adapted[0]).generate(make_requests(1))
    assert server.requests[0][2] == "Bearer secret"
    assert "secret" not in repr(ServerEngineConfig(server.url, api_key_env="STUB_API_KEY"))


def test_config_is_checked() -> None:
    for values in ({"base_url": "localhost:8000"}, {"timeout_seconds": 0}, {"max_retries": -1}):
        with pytest.raises(FieldError):
            ServerEngineConfig(**({"base_url": "http://x"} | values))  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="adapter"):
        ServerEngineConfig("http://x").check(NoAdapter())
    ServerEngineConfig("http://x", sync="none").check(NoAdapter())
    for engine, count in ((ServerEngineConfig("http://x", sync="none"), 0), (NativeEngineConfig(), 64)):
        data, rewards = PromptDataset("rows.jsonl"), (Length(),)
        cfg = GRPOConfig(model="m", output_dir="o", data=data, rewards=rewards, engine=engine, max_num_seqs=64)
        assert cfg.num_cached_seqs == count, "the trainer has no cache for the answers of a server"


def test_saved_adapter_has_the_current_weights(
    adapted: tuple[Decoder, HFCheckpoint], server: CompletionServer, tmp_path: Path
) -> None:
    engine = open_adapter(server, adapted, tmp_path)
    saved = []
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in adapted[0].named_parameters():
                if "lora_B" in name:
                    parameter.add_(1.0)
        engine.sync_weights()
        saved.append(load_file(Path(server.models[server.loaded[-1][0]]) / "adapter_model.safetensors"))
        engine.sleep()
    deltas = [saved[1][name] - saved[0][name] for name in saved[0] if "lora_B" in name]
    assert deltas and all(torch.equal(delta, torch.ones_like(delta)) for delta in deltas)
