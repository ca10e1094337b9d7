"""The LLM judge against a server of the OpenAI protocol on this machine."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helpers.rollouts import make_rollout
from tunekit.errors import FieldError, UserError
from tunekit.rewards.base import check_rewards, score_rollouts
from tunekit.rewards.llm_judge import LLMJudge
from tunekit.rollouts import openai_client


class JudgeServer(ThreadingHTTPServer):
    """Answers with the next of `answers`: a text, or an HTTP status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[str | int] = []
        self.requests: list[tuple[str, Any, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        answer = self.server.answers.pop(0)
        status = answer if isinstance(answer, int) else 200
        reply = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply if status == 200 else {"error": "overloaded"}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(openai_client, "FIRST_DELAY", 0.01)
    with JudgeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_score_is_parsed(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-1")
    server.answers = ["Good. Score: 3 at first.\nScore: **8**"]
    judge = LLMJudge(server.url, "judge", prompt="{prompt}|{completion}|{level}|{{}}")
    check_rewards([judge], ["level"])
    assert score_rollouts([judge], [make_rollout("an {answer}", level=2)]).item() == pytest.approx(0.8)
    path, body, key = server.requests[0]
    assert path == "/v1/chat/completions" and key == "Bearer key-1" and body["model"] == "judge"
    assert body["messages"] == [{"role": "user", "content": "question|an {answer}|2|{}"}]


def test_errors_are_repeated_and_no_score_is_none(server: JudgeServer) -> None:
    server.answers = [503, 429, "Score: 10", "I cannot say."]
    judge = LLMJudge(server.url, "judge", num_workers=1)
    scores = score_rollouts([judge], [make_rollout("a"), make_rollout("b")])
    assert scores[0].item() == 1 and math.isnan(scores[1].item()) and len(server.requests) == 4


def test_lasting_errors_stop_with_one_line(server: JudgeServer) -> None:
    server.answers = [503, 503, 401]
    for judge, count in ((LLMJudge(server.url, "m", max_retries=1), 2), (LLMJudge(server.url, "m"), 3)):
        with pytest.raises(UserError, match="HTTP status") as error:
            score_rollouts([judge], [make_rollout("a")])
        assert "\n" not in str(error.value) and len(server.requests) == count
    with pytest.raises(UserError, match="base_url"):
        score_rollouts([LLMJudge("http://127.0.0.1:9/v1", "m", max_retries=0)], [make_rollout("a")])


def test_config_is_checked() -> None:
    for values in ({"base_url": "localhost"}, {"score_regex": "score"}, {"score_regex": "("}, {"prompt": "{"}):
        with pytest.raises(FieldError):
            LLMJudge(**({"base_url": "http://x", "model": "m"} | values))
    with pytest.raises(UserError, match="solution"):
        check_rewards([LLMJudge("http://x", "m", prompt="{solution}")], ["answer"])
