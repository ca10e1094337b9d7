"""The HTTP application: authentication, limits, and the endpoints of OpenAI's protocol."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tunekit.data.chat_template.messages import reject_constant
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.stop_strings import StopStrings
from tunekit.serving.adapter_set import AdapterSet
from tunekit.serving.answering import Answering
from tunekit.serving.engine_thread import EngineThread
from tunekit.serving.errors import APIError, bad_request
from tunekit.serving.prompts import PromptMaker
from tunekit.serving.request_fields import (
    ChatRequest,
    CompletionRequest,
    Endpoint,
    Fields,
    parse_chat_request,
    parse_completion_request,
)
from tunekit.serving.responses import ResponseFormat

Handler = Callable[[Request], Awaitable[Response]]
NUM_ANSWERS = "tunekit.num_answers"  # of a request, in its scope


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits on requests. Keys: the keys that clients may use; empty: no authentication."""

    api_keys: tuple[str, ...] = ()
    max_concurrent_requests: int = 256  # each of the `n` answers to a prompt is one
    max_tokens: int | None = None  # of an answer
    max_request_bytes: int = 4 * 2**20


@dataclass
class ModelServer:
    """State of the server. `name` is that of the model without an adapter."""

    name: str
    tokenizers: Mapping[str | None, Tokenizer]  # of the model (None) and of the adapters
    engine: GenerationEngine
    adapters: AdapterSet
    limits: ServerLimits
    read_tokenizer: Callable[[str], Tokenizer] | None = None  # of adapters that clients load; None: they cannot
    num_active: int = 0  # answers that run or wait; a request counts as one until it is parsed
    is_draining: bool = False  # shutting down: new requests are refused
    adapter_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of loading and unloading
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def prompts(self) -> dict[str | None, PromptMaker]:
        """Prompt makers of the model (None) and of the adapters."""
        return {adapter: self.prompt_maker(tokenizer) for adapter, tokenizer in self.tokenizers.items()}

    def prompt_maker(self, tokenizer: Tokenizer) -> PromptMaker:
        return PromptMaker(tokenizer, self.engine.max_model_len, self.limits.max_tokens)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.thread = EngineThread(self.engine, self.adapters)
        yield
        for maker in self.prompts.values():
            maker.close()
        await asyncio.to_thread(self.thread.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. Counts the answers of requests until their response ends."""
        is_request = scope["type"] == "http" and scope["method"] == "POST"
        self.num_active += is_request
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_active -= scope.get(NUM_ANSWERS, is_request)

    @cached_property
    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.guarded(self.list_models)),
            Route("/v1/models/{name:path}", self.guarded(self.get_model)),
            Route("/v1/chat/completions", self.guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self.guarded(self.complete), methods=["POST"]),
        ]
        if self.read_tokenizer is not None:
            for path, endpoint in (("load", self.load_adapter), ("unload", self.unload_adapter)):
                routes.append(Route(f"/v1/{path}_lora_adapter", self.guarded(endpoint), methods=["POST"]))
        handlers = {HTTPException: http_error, Exception: server_error}
        return Starlette(routes=routes, lifespan=self.lifespan, exception_handlers=handlers)

    def guarded(self, endpoint: Handler) -> Handler:
        """The endpoint with authentication. Errors become responses."""

        async def run(request: Request) -> Response:
            try:
                self.check_key(request)
                self.check_capacity()
                return await endpoint(request)
            except APIError as error:
                headers = {"Retry-After": "1"} if error.status in (429, 503) else None
                return JSONResponse(error.body, error.status, headers)
            except ClientDisconnect:  # nothing reads the response
                return Response(status_code=499)

        return run

    def check_capacity(self, num_more: int = 0) -> None:
        """Refuse requests during the shutdown, and more answers than the limit, which includes those of this request.

        `num_more`: answers of this request besides the one that is counted already.
        """
        limit = self.limits.max_concurrent_requests
        if num_more >= limit:
            raise bad_request("n", f"this server allows at most {limit} answers, got {num_more + 1} for all prompts")
        if self.is_draining:
            raise APIError(503, "the server is shutting down", code="service_unavailable")
        if self.num_active + num_more > limit:
            problem = f"the limit of this server is {limit} answers at once; retry later"
            raise APIError(429, problem, code="rate_limit_exceeded")

    def check_key(self, request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        keys = [key.encode() for key in self.limits.api_keys]
        is_known = [hmac.compare_digest(key.strip().encode(), known) for known in keys]
        if keys and not (kind.lower() == "bearer" and any(is_known)):
            raise APIError(401, "missing or incorrect API key", code="invalid_api_key")

    # Endpoints

    async def health(self, request: Request) -> Response:
        is_ready = self.thread.is_alive and not self.is_draining
        status = "ok" if is_ready else "shutting down" if self.is_draining else "the engine has stopped"
        return JSONResponse({"status": status}, 200 if is_ready else 503)

    async def list_models(self, request: Request) -> Response:
        models = [self.describe_model(name) for name in (self.name, *self.adapters.states)]
        return JSONResponse({"object": "list", "data": models})

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.find_adapter(name)
        return JSONResponse(self.describe_model(name))

    def describe_model(self, name: str) -> dict[str, Any]:
        fields = {"id": name, "object": "model", "created": self.created, "owned_by": "tunekit"}
        return fields | {"root": self.name, "max_model_len": self.engine.max_model_len}

    def find_adapter(self, name: str) -> str | None:
        """The adapter of a model name; None for the model itself."""
        if name != self.name and name not in self.adapters.states:
            names = ", ".join((self.name, *self.adapters.states))
            raise APIError(404, f"the model {name!r} does not exist. Use one of: {names}", "model", "model_not_found")
        if name != self.name and name not in self.prompts:
            raise APIError(503, f"the model {name!r} is being loaded; retry later", "model", "service_unavailable")
        return None if name == self.name else name

    async def load_adapter(self, request: Request) -> Response:
        """vLLM's endpoint: load an adapter from a directory of this machine."""
        fields = Fields(await self.read_body(request))
        fields.check_names({"lora_name", "lora_path"})
        name, path = fields.name("lora_name"), fields.name("lora_path")
        async with self.adapter_lock:
            if name in (self.name, *self.adapters.states):
                raise APIError(400, f"the model {name!r} has already been loaded", "lora_name", "invalid_value")
            assert self.read_tokenizer is not None
            try:
                prompts = self.prompt_maker(await asyncio.to_thread(self.read_tokenizer, path))
                await asyncio.wrap_future(self.thread.load_adapter(name, path))
            except UserError as error:
                raise APIError(400, str(error), "lora_path", "invalid_value") from None
            self.prompts[name] = prompts
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """vLLM's endpoint: forget an adapter."""
        fields = Fields(await self.read_body(request))
        fields.check_names({"lora_name", "lora_int_id"})
        name = fields.name("lora_name")
        async with self.adapter_lock:
            if name not in self.adapters.states:
                raise APIError(404, f"the adapter {name!r} does not exist", "lora_name", "model_not_found")
            await asyncio.wrap_future(self.thread.unload_adapter(name))
            self.prompts.pop(name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def chat(self, request: Request) -> Response:
        return await self.answer(request, "chat", parse_chat_request(await self.read_body(request)))

    async def complete(self, request: Request) -> Response:
        return await self.answer(request, "completion", parse_completion_request(await self.read_body(request)))

    async def answer(self, request: Request, endpoint: Endpoint, parsed: ChatRequest | CompletionRequest) -> Response:
        options, adapter = parsed.options, self.find_adapter(parsed.options.model)
        maker = self.prompts[adapter]
        prompts = await asyncio.to_thread(maker.make_prompts, parsed)
        num_answers = sum(len(prompt.constraints) for prompt in prompts)
        self.check_capacity(num_answers - 1)
        self.num_active += num_answers - 1
        request.scope[NUM_ANSWERS] = num_answers
        response = ResponseFormat(endpoint, maker.tokenizer, options, sum(len(prompt.tokens) for prompt in prompts))
        stop = StopStrings(maker.tokenizer, options.sampling.stop_strings)
        answering = Answering(self.thread, response, stop, prompts, adapter)
        if options.is_stream:
            return StreamingResponse(answering.stream(), media_type="text/event-stream")
        return JSONResponse(await answering.complete(request))

    async def read_body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request. Raises APIError."""
        limit, size, chunks = self.limits.max_request_bytes, 0, []
        declared = request.headers.get("content-length", "0")
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit or int(declared if declared.isdecimal() else 0) > limit:
                raise APIError(413, f"the request is larger than {limit} bytes", code="request_too_large")
            chunks.append(chunk)
        try:
            body = json.loads(b"".join(chunks), parse_constant=reject_constant)
            json.dumps(body, ensure_ascii=False).encode()  # raises an error for half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise APIError(400, "the body must be a JSON object", code="invalid_json")
        return body


async def http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    problem = {404: "does not exist", 405: f"does not support {request.method}"}.get(status, "failed")
    return JSONResponse(APIError(status, f"{request.url.path} {problem}").body, status)


async def server_error(request: Request, error: Exception) -> Response:
    return JSONResponse(APIError(500, "internal error").body, 500)
