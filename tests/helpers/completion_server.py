"""A server with the endpoints of vLLM that rollouts use. Its answers are a function of the prompt and the seed."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

TokenFormat = Literal["token_ids", "token_id_texts", "texts"]
EOS = 2


def answer_tokens(prompt: list[int], seed: int, count: int) -> list[int]:
    """The answer to a prompt. Its tokens are from 3 on."""
    return [3 + (sum(prompt) + seed + index) % 50 for index in range(count)]


class CompletionServer(ThreadingHTTPServer):
    """Answers /v1/completions. `failures` are the statuses of the next requests; `delays` their durations."""

    daemon_threads = True

    def __init__(self, token_format: TokenFormat = "token_ids", port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.token_format: TokenFormat = token_format
        self.models: dict[str, str] = {"base": ""}  # path by name
        self.max_model_len = 100
        self.failures: list[int] = []
        self.delays: list[float] = []
        self.finish_reasons: list[str] = []
        self.refused_tokens: set[int] = set()  # in prompts
        self.change: Callable[[dict[str, Any]], object] = lambda reply: reply  # of completions
        self.raw: dict[str, Callable[[], Iterable[bytes]]] = {}  # the whole response to a path, headers included
        self.requests: list[tuple[str, Any, str | None]] = []  # path, body, authorization
        self.loaded: list[tuple[str, list[str]]] = []  # names of all adapters that were loaded, with their files
        self.lock, self.num_active, self.max_active = threading.Lock(), 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def completions(self) -> list[dict[str, Any]]:
        """Bodies of the requests for completions."""
        return [body for path, body, _ in self.requests if path == "/v1/completions"]

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients close connections after a timeout."""

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = answer_tokens(body["prompt"], body["seed"], body["max_tokens"])
        logprobs = [-token / 100 for token in tokens]
        names = [f"token_id:{token}" if self.token_format == "token_id_texts" else f"w{token}" for token in tokens]
        top = [{name: logprob, "token_id:0": -9.0} for name, logprob in zip(names, logprobs, strict=True)]
        reason = self.finish_reasons.pop(0) if self.finish_reasons else "length"
        choice: dict[str, Any] = {"index": 0, "text": "...", "finish_reason": reason}
        choice["logprobs"] = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top}
        if self.token_format == "token_ids":
            choice["token_ids"] = tokens
        return {"object": "text_completion", "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    server: CompletionServer

    def do_GET(self) -> None:  # noqa: N802
        if self.path in self.server.raw:
            self.reply_raw(self.server.raw[self.path]())
            return
        entries = [{"id": name, "max_model_len": self.server.max_model_len} for name in self.server.models]
        self.reply(200, {"object": "list", "data": entries})

    def do_POST(self) -> None:  # noqa: N802
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append((self.path, body, self.headers.get("Authorization")))
            server.num_active += 1
            server.max_active = max(server.max_active, server.num_active)
            status = server.failures.pop(0) if server.failures else 200
            delay = server.delays.pop(0) if server.delays else 0.0
        if self.path in server.raw:
            self.reply_raw(server.raw[self.path]())
            return
        time.sleep(delay)
        status, reply = self.answer(body) if status == 200 else (status, {"error": {"message": "overloaded"}})
        with server.lock:
            server.num_active -= 1
        self.reply(status, reply)

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        server = self.server
        if self.path == "/v1/completions":
            if body["model"] not in server.models:
                return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
            if server.refused_tokens & {*body["prompt"]}:
                return 400, {"error": {"message": "refused token"}}
            return 200, server.change(server.complete(body))
        if self.path == "/v1/load_lora_adapter":
            name, path = body["lora_name"], Path(body["lora_path"])
            if name in server.models or not (path / "adapter_config.json").is_file():
                return 400, {"error": {"message": f"The lora adapter '{name}' cannot be loaded."}}
            server.models[name] = str(path)
            server.loaded.append((name, sorted(file.name for file in path.iterdir())))
            return 200, "Success"
        if self.path == "/v1/unload_lora_adapter":
            return (200, "Success") if server.models.pop(body["lora_name"], None) else (404, {"message": "unknown"})
        return 404, {"detail": "Not Found"}

    def reply(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def reply_raw(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            self.wfile.write(chunk)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def run_server(token_format: TokenFormat = "token_ids", port: int = 0) -> Iterator[CompletionServer]:
    """A running server, until the end of the block."""
    with CompletionServer(token_format, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
