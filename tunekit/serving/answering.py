"""The life of a request: it enters the engine, its tokens become a response, and it leaves the engine in any case."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tunekit.generation.requests import GenerationRequest
from tunekit.generation.stop_strings import StopStrings
from tunekit.serving.choices import AnswerToken, Choice, new_id
from tunekit.serving.engine_thread import EngineThread, Output, QueuedRequest
from tunekit.serving.errors import APIError
from tunekit.serving.prompts import Prompt
from tunekit.serving.responses import DONE, ResponseFormat, format_event


class Answering:
    """Answers the prompts of one request. Choice i of prompt p has the index p * n + i."""

    def __init__(
        self,
        thread: EngineThread,
        response: ResponseFormat,
        stop: StopStrings,
        prompts: Sequence[Prompt],
        adapter: str | None,
    ) -> None:
        self.thread, self.response = thread, response
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.choices: list[Choice] = []
        self.requests: list[QueuedRequest] = []
        request_id, options = new_id("request"), response.options
        stop_tokens = options.stop_tokens(stop)
        for prompt in prompts:
            sampling = replace(options.sampling, max_new_tokens=prompt.max_tokens)
            for number, constraint in enumerate(prompt.constraints):
                request = GenerationRequest(
                    request_id=f"{request_id}/{len(self.choices)}",
                    prompt=prompt.tokens,
                    sampling=sampling,
                    stop_token_ids=stop_tokens,
                    is_finished=stop.is_finished,
                    num_logprobs=options.num_logprobs or 0,
                    allowed_tokens=constraint,
                    sample_name=f"choice {number}",  # equal requests with equal seeds have equal answers
                )
                self.requests.append(QueuedRequest(request, adapter, self.outputs))
                self.choices.append(Choice(response.tokenizer, options, stop, prompt.parser, prompt.tokens))
        self.indices = {item.request_id: index for index, item in enumerate(self.requests)}

    async def run(self) -> AsyncIterator[tuple[int, list[AnswerToken]]]:
        """Yield the indices of choices with their new tokens. Frees the engine when the caller stops."""
        self.thread.submit(self.requests)
        try:
            while any(choice.finish_reason is None for choice in self.choices):
                output = await self.outputs.get()
                if isinstance(output, Exception):
                    raise output
                choice = self.choices[index := self.indices[output.request_id]]
                num_tokens = len(choice.tokens)
                choice.add(output)
                yield index, choice.tokens[num_tokens:]
        finally:
            self.thread.abort(self.indices)

    async def stream(self) -> AsyncIterator[bytes]:
        """Events of a streaming response. The server closes the iterator when the client disconnects."""
        tokens = self.run()
        try:
            for chunk in self.response.first_chunks(len(self.choices)):
                yield chunk
            async for index, new in tokens:
                chunk = self.response.delta_chunk(index, self.choices[index], new)
                if chunk is not None:
                    yield chunk
            for chunk in self.response.last_chunks(self.choices):
                yield chunk
        except APIError as error:
            yield format_event(error.body)
            yield DONE
        finally:
            await tokens.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def complete(self, request: Request) -> dict[str, Any]:
        """The whole response. Raises ClientDisconnect if the client has left."""
        answer = asyncio.create_task(self.collect())
        disconnect = asyncio.create_task(wait_for_disconnect(request))
        try:
            await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return self.response.complete(await answer)
        finally:
            for task in (answer, disconnect):
                task.cancel()

    async def collect(self) -> Sequence[Choice]:
        tokens = self.run()
        try:
            async for _ in tokens:
                pass
        finally:
            await tokens.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        return self.choices


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
