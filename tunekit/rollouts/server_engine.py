"""A generation engine on a server with the OpenAI protocol, such as vLLM: token ids in, token ids out."""

import random
import re
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.requests import Answer, FinishReason, GenerationRequest, TokenOutput
from tunekit.generation.rollout_engine import RolloutEngine
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder
from tunekit.rollouts.openai_client import OpenAIClient
from tunekit.rollouts.served_model import ServedModel

WAIT_SECONDS = 0.05  # of a step for a response, while tools of other episodes run
SEED_BITS = 31
TOKEN_ID = re.compile(r"token_id:(\d+)")  # a token in log-probabilities with return_tokens_as_token_ids
NO_TOKEN_IDS = (
    "the responses have no token ids (`token_ids` in choices, or tokens such as 'token_id:7'). Use vLLM, `tune serve`, "
    "or another server that supports return_token_ids or return_tokens_as_token_ids"
)


class Completion(NamedTuple):
    """The sampled tokens of a response, with their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]  # most likely tokens, best first; empty if none were requested
    finish_reason: FinishReason


Response = tuple[str, Completion | UserError]  # with the request id


class ServerEngine(RolloutEngine):
    """Answers requests on a server. Up to `max_num_seqs` requests of this rank are sent at once.

    All tokens of an answer are outputs of the same step. Ranks with the same requests (tensor and context parallel)
    get the responses of the first of them.
    """

    dist: DistributedContext

    def __init__(
        self, served: ServedModel, model: Decoder, max_num_seqs: int, max_model_len: int, dist: DistributedContext
    ) -> None:
        super().__init__(model, max_num_seqs, max_model_len, dist)
        self.served, self.client = served, served.client
        group_size = dist.dims.cp * dist.dims.tp
        self.leader = dist.rank // group_size * group_size
        self.is_sharded = group_size > 1
        self.queue: SimpleQueue[Answer | None] = SimpleQueue()  # None ends a thread
        self.responses: SimpleQueue[tuple[Answer, Completion | UserError]] = SimpleQueue()
        self.num_threads = 0

    # Requests

    def enqueue(self, answer: Answer) -> None:
        """Send a request. All tokens are sent; a server with a prefix cache computes the new ones only."""
        assert answer.request.allowed_tokens is None, "servers have no masks of allowed tokens"
        self.unfinished[answer.request.request_id] = answer
        if self.dist.rank == self.leader:
            self.queue.put(answer)
            if self.num_threads < min(self.max_num_seqs, len(self.unfinished)):
                self.num_threads += 1
                threading.Thread(target=self.send_requests, args=(self.queue,), daemon=True).start()

    @property
    def has_unfinished_requests(self) -> bool:
        has_unfinished = bool(self.unfinished)
        return bool(self.dist.max_over_ranks(has_unfinished)[0]) if self.is_sharded else has_unfinished

    def sync_weights(self) -> None:
        self.served.update(self.model)

    def sleep(self) -> None:
        """End the threads, and remove the weights from the server. Collective."""
        assert not self.unfinished, "requests are running"
        for _ in range(self.num_threads):
            self.queue.put(None)
        self.num_threads = 0
        self.queue = SimpleQueue()
        self.served.release()

    # Responses

    def step(self) -> list[TokenOutput]:
        """Tokens of the answers that have arrived; waits a short time for the first one.

        Raises UserError if the server still fails after all retries, or returns no token ids.
        """
        responses = self.receive() if self.dist.rank == self.leader else []
        if self.is_sharded:
            ranks = self.dist.all_gather_objects(responses)
            responses = ranks[self.leader]
            for _, result in (response for rank in ranks for response in rank):
                if isinstance(result, UserError):
                    raise result
        return [output for request_id, result in responses for output in self.finish(request_id, result)]

    def receive(self) -> list[Response]:
        """Responses that have arrived to requests that were not aborted."""
        received = []
        try:
            received.append(self.responses.get(timeout=WAIT_SECONDS))
            while True:
                received.append(self.responses.get_nowait())
        except Empty:
            return [(answer.request.request_id, result) for answer, result in received if not answer.is_finished]

    def finish(self, request_id: str, result: Completion | UserError) -> list[TokenOutput]:
        """Outputs of an answer up to its first stop condition."""
        if isinstance(result, UserError):
            raise result
        answer, outputs = self.unfinished.pop(request_id), []
        num_tokens = len(result.tokens)
        for index, (token, logprob) in enumerate(zip(result.tokens, result.logprobs, strict=True), start=1):
            reason = answer.add(token)
            if reason != "stop" and index == num_tokens:  # perhaps a stop condition or a limit of the server
                reason, answer.is_finished = result.finish_reason, True
            top = result.top_logprobs[index - 1] if result.top_logprobs else []
            outputs.append(TokenOutput(request_id, token, logprob, top, reason))
            if reason is not None:
                break
        if answer.request.keep_cache:
            self.resumable[request_id] = answer
        return outputs

    def send_requests(self, queue: "SimpleQueue[Answer | None]") -> None:
        """Send one request after the other. Runs in a thread; daemons do not delay the end of a failed run."""
        while (answer := queue.get()) is not None:
            if answer.is_finished:  # aborted
                continue
            try:
                result: Completion | UserError = self.complete(answer)
            except UserError as error:
                result = error
            self.responses.put((answer, result))

    def complete(self, answer: Answer) -> Completion:
        """Response to a request."""
        for _ in range(self.client.max_retries + 1):
            body = completion_request(self.served.name, answer)
            response = self.client.request("completions", body, self.served.restore)
            if (completion := parse_completion(self.client, response, answer.request.num_logprobs)) is not None:
                return completion
        raise self.client.error("/completions: the server aborts the answers")

    def check(self, prompt: Sequence[int]) -> None:
        """Raise UserError if the server cannot answer with token ids and log-probabilities. Collective."""
        self.dist.run_on_main(lambda: self.served.check(self.max_model_len))
        self.sync_weights()
        sampling = SamplingConfig(temperature=1.0, max_new_tokens=1)
        answer = Answer(GenerationRequest("check", prompt, sampling), sampling, [*prompt], 1)
        self.dist.run_on_main(lambda: self.complete(answer))
        self.served.release()


def completion_request(model: str, answer: Answer) -> dict[str, Any]:
    """Body of a request. All sampling options are set, as servers have defaults of the model for the others."""
    sampling, request = answer.sampling, answer.request
    seed = random.Random(f"{sampling.seed} {request.random_name} {answer.num_drawn}").getrandbits(SEED_BITS)
    return {
        "model": model,
        "prompt": answer.context,
        "max_tokens": answer.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.num_candidates or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed,
        "stop": [*sampling.stop_strings],
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are those of the request
        "logprobs": request.num_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # vLLM before 0.10.2
    }


def parse_completion(client: OpenAIClient, response: Any, num_logprobs: int) -> Completion | None:
    """Tokens of a response; None if the server has aborted the answer. Raises UserError if there are no token ids."""
    try:
        choice = response["choices"][0]
        reason, logprobs, ids = choice["finish_reason"], choice.get("logprobs") or {}, choice.get("token_ids")
    except (LookupError, TypeError, AttributeError):
        raise client.error("/completions: not a response of the OpenAI protocol") from None
    if reason not in ("stop", "length"):
        return None
    values = logprobs.get("token_logprobs")
    parsed = ids if ids is not None else [parse_token_id(text) for text in logprobs.get("tokens") or ()]
    tokens = [token for token in parsed if token is not None]
    if not tokens or len(tokens) < len(parsed):
        raise client.error(NO_TOKEN_IDS)
    if not values or any(value is None for value in values):
        raise client.error("/completions: the responses have no log-probabilities of the sampled tokens")
    if len(values) != len(tokens):
        problem = f"/completions: {len(tokens)} token ids have {len(values)} log-probabilities"
        raise client.error(f"{problem}: the server must report stop tokens in both")
    rows = logprobs.get("top_logprobs") or [] if num_logprobs else []
    return Completion(tokens, [*values], [parse_top_logprobs(client, row, num_logprobs) for row in rows], reason)


def parse_token_id(text: Any) -> int | None:
    match = TOKEN_ID.fullmatch(text) if isinstance(text, str) else None
    return int(match[1]) if match else None


def parse_top_logprobs(client: OpenAIClient, row: dict[str, float], count: int) -> list[tuple[int, float]]:
    """The most likely tokens of a position, best first."""
    pairs = [(token, logprob) for text, logprob in row.items() if (token := parse_token_id(text)) is not None]
    if len(pairs) < len(row):
        raise client.error(NO_TOKEN_IDS)
    return sorted(pairs, key=lambda pair: -pair[1])[:count]
