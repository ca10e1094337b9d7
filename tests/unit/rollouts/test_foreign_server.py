"""Responses of a server that is broken or hostile: one error within the limits, and nothing that keeps running."""

import gzip
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.completion_server import CompletionServer, run_server
from tests.helpers.rollouts import make_rollout
from tests.helpers.wait import wait_until
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.policy.engine_config import ServerEngineConfig
from tunekit.rewards.base import score_rollouts
from tunekit.rewards.llm_judge import LLMJudge
from tunekit.rollouts import openai_client
from tunekit.rollouts.openai_client import OpenAIClient
from tunekit.rollouts.served_model import ServedModel, list_models
from tunekit.rollouts.server_engine import ServerEngine

VOCAB = 100
DEEP = b"[" * 100_000
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
REQUESTS = [GenerationRequest(f"row {n}", [n + 1], SamplingConfig(temperature=1.0, max_new_tokens=4)) for n in range(3)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompletionServer]:
    monkeypatch.setattr(openai_client, "FIRST_DELAY", 0.01)
    with run_server() as server:
        yield server


def make_client(server: CompletionServer, timeout: float = 10.0, max_bytes: int = 2**20) -> OpenAIClient:
    return OpenAIClient("engine", server.url, "NO_KEY", timeout, 1, max_bytes)


def make_engine(client: OpenAIClient) -> ServerEngine:
    model: Any = SimpleNamespace(spec=SimpleNamespace(vocab=VOCAB), training=False, train=lambda mode: None)
    return ServerEngine(ServedModel(client, "base"), model, 2, 64, DistributedContext(0, "cpu"))


def change_choice(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda reply: {**reply, "choices": [{**reply["choices"][0], **fields}]}


def change_tokens(value: Any) -> Callable[[dict[str, Any]], object]:
    """Replace the last token id of an answer."""
    return lambda reply: change_choice(token_ids=[*reply["choices"][0]["token_ids"][:-1], value])(reply)


def change_logprobs(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda reply: change_choice(logprobs={**reply["choices"][0]["logprobs"], **fields})(reply)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"token {value!r:.20}": change_tokens(value) for value in (VOCAB, 2**70, -1, 3.0, "7", None, True, [3])},
    **{f"ids {value!r}": change_choice(token_ids=value) for value in ([], "3", {"0": 3}, 7)},
    "token_id texts": lambda reply: change_logprobs(tokens=[f"token_id:{2**70}"] * 4)(
        change_choice(token_ids=None)(reply)
    ),
    "a token_id text of 5,000 digits": lambda reply: change_logprobs(tokens=["token_id:" + "9" * 5000] * 4)(
        change_choice(token_ids=None)(reply)
    ),
    **{
        f"logprob {value!r:.20}": change_logprobs(token_logprobs=[-0.1, -0.1, -0.1, value])
        for value in (float("nan"), float("inf"), float("-inf"), 0.5, "-1", None, False, -(10**400), [0.0])
    },
    "fewer log-probabilities": change_logprobs(token_logprobs=[-0.1] * 3),
    "more log-probabilities": change_logprobs(token_logprobs=[-0.1] * 5),
    "no log-probabilities": change_choice(logprobs=None),
    "log-probabilities as a list": change_choice(logprobs=[-0.1] * 4),
    **{
        f"choices {value!r}": lambda reply, value=value: {"choices": value}
        for value in ([], None, {}, "x", [None], [[]])
    },
    "two choices": lambda reply: {**reply, "choices": reply["choices"] * 2},
    "another index": change_choice(index=1),
    "no object": lambda reply: [reply],
    "null": lambda reply: None,
    **{f"finish_reason {value!r}": change_choice(finish_reason=value) for value in ("tool_calls", None, 5, ["stop"])},
    "another model": lambda reply: {**reply, "model": "other"},
    "a changed prompt": change_choice(prompt_token_ids=[0, 1]),
    "a changed prompt of all choices": lambda reply: {**reply, "prompt_token_ids": "x"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_completion_is_one_error(server: CompletionServer, name: str) -> None:
    server.change = CHANGES[name]
    with pytest.raises(UserError) as error:
        make_engine(make_client(server)).generate(REQUESTS)
    assert server.url in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


def test_echoes_of_the_request_are_accepted(server: CompletionServer) -> None:
    def echo(reply: dict[str, Any]) -> object:
        prompt = server.completions[-1]["prompt"]
        return {**reply, "model": "base", "choices": [{**reply["choices"][0], "prompt_token_ids": prompt}]}

    server.change = echo
    assert all(len(answer) == 4 for answer in make_engine(make_client(server)).generate(REQUESTS[:1]).values())


def chunked(chunks: Iterable[bytes]) -> Iterator[bytes]:
    yield OK + b"Transfer-Encoding: chunked\r\n\r\n"
    for chunk in chunks:
        yield b"%x\r\n%s\r\n" % (len(chunk), chunk)


def slowly(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        time.sleep(0.02)


def with_length(body: bytes, headers: bytes = b"") -> list[bytes]:
    return [OK + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def endless(start: bytes, chunk: bytes = b" " * 65536) -> Iterator[bytes]:
    return itertools.chain([start], itertools.repeat(chunk))


RESPONSES: dict[str, tuple[Callable[[], Iterable[bytes]], str]] = {
    "nested JSON": (lambda: with_length(DEEP), "not JSON"),
    "invalid UTF-8": (lambda: with_length(b"\xff\xfe{"), "not JSON"),
    "5,000 digits": (lambda: with_length(b"9" * 5000), "not JSON"),
    "a gzip bomb that was not asked for": (
        lambda: with_length(gzip.compress(bytes(2**20)), b"Content-Encoding: gzip\r\n"),
        "not JSON",
    ),
    "nested JSON in an error": (lambda: [b"HTTP/1.1 400 Bad\r\n\r\n" + DEEP], "HTTP status 400"),
    "a redirect": (lambda: [b"HTTP/1.1 302 Found\r\nLocation: http://other/v1\r\n\r\n"], "redirects"),
    "an endless body": (lambda: endless(OK + b"\r\n"), "max_response_bytes"),
    "an endless chunked body": (lambda: chunked(itertools.repeat(b" " * 65536)), "max_response_bytes"),
    "an endless error": (lambda: endless(b"HTTP/1.1 400 Bad\r\n\r\n"), "max_response_bytes"),
    "endless headers": (lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 999), "max_response_bytes"),
    "a huge length": (lambda: [OK + b"Content-Length: %d\r\n\r\n[]" % 2**70], "Incomplete"),
    "a huge chunk": (lambda: [OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n[]"], "Incomplete"),
    "slow bytes": (lambda: slowly(endless(OK + b"\r\n[", b" ")), "timeout_seconds"),
    "slow chunks": (lambda: slowly(chunked(itertools.repeat(b" "))), "timeout_seconds"),
    "slow headers": (lambda: slowly(endless(OK, b"x")), "timeout_seconds"),
    "a slow status line": (lambda: slowly(endless(b"HTTP/1.1 200 ", b"x")), "timeout_seconds"),
}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize("name", RESPONSES)
def test_response_beyond_the_limits_is_one_error(server: CompletionServer, path: str, name: str) -> None:
    response, problem = RESPONSES[name]
    server.raw = {path: response}
    client = make_client(server, timeout=0.3 if problem == "timeout_seconds" else 60, max_bytes=2**18)
    with pytest.raises(UserError, match=problem) as error:
        list_models(client) if path == "/v1/models" else make_engine(client).generate(REQUESTS)
    assert "\n" not in str(error.value) and len(str(error.value)) < 800


def answer_one(server: CompletionServer, blocked: threading.Event) -> Callable[[], Iterator[bytes]]:
    """The first answer never ends; when it is requested, the others fail."""

    def respond() -> Iterator[bytes]:
        if len(server.requests) == 1:
            yield OK + b"\r\n["
            blocked.wait(60)
        else:
            yield from with_length(b"7")

    return respond


def test_failing_request_ends_the_others(server: CompletionServer) -> None:
    blocked = threading.Event()
    server.raw = {"/v1/completions": answer_one(server, blocked)}
    engine = make_engine(make_client(server, timeout=60))
    before = set(threading.enumerate())
    with pytest.raises(UserError, match="instead of an object"), engine.closing_on_error():
        engine.generate(REQUESTS)
    clients = {thread for thread in threading.enumerate() if "send_requests" in thread.name} - before
    wait_until(lambda: not any(thread.is_alive() for thread in clients))
    blocked.set()


def test_failing_judge_ends_the_other_requests(server: CompletionServer) -> None:
    blocked = threading.Event()
    server.raw = {"/v1/chat/completions": answer_one(server, blocked)}
    judge = LLMJudge(server.url, "m", max_retries=0, num_workers=2)
    with pytest.raises(UserError, match="instead of an object"):
        score_rollouts([judge], [make_rollout("a")] * 1000)
    assert len(server.requests) < 1000, "requests that wait are not sent"
    blocked.set()


CLEANUP_PROGRAM = """
import os, sys, time
from pathlib import Path
from tunekit.rollouts.openai_client import OpenAIClient
from tunekit.rollouts.adapter_cleanup import AdapterCleanup
AdapterCleanup(OpenAIClient("engine", sys.argv[1], "NO_KEY", 10, 0), "new", Path(sys.argv[2]))
exec(sys.argv[3])
"""


@pytest.mark.parametrize(
    "end", ["pass", "1 / 0", "os._exit(1)", "os.killpg(0, 9)", "os.killpg(0, 15)", "os.killpg(0, 2)"]
)
def test_adapter_is_unloaded_however_a_run_ends(server: CompletionServer, tmp_path: Path, end: str) -> None:
    directory = tmp_path / "new"
    directory.mkdir()
    server.models["new"] = str(directory)
    command = [sys.executable, "-c", CLEANUP_PROGRAM, server.url, str(directory), end]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False, start_new_session=True)
    wait_until(lambda: [*server.models] == ["base"] and not directory.exists())


def test_config_has_limits() -> None:
    for url in ("http://[::1", "http://host:99999", "http://host:x", "http://a b", "http://", "ftp://x"):
        with pytest.raises(FieldError, match="base_url"):
            ServerEngineConfig(url)
        with pytest.raises(FieldError, match="base_url"):
            LLMJudge(url, "m")
    for value in (0, -1):
        with pytest.raises(FieldError, match="max_response_bytes"):
            ServerEngineConfig("http://x", max_response_bytes=value)
