"""A generation engine on a server with the OpenAI protocol, such as vLLM: token ids in, token ids out."""

import random
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

from tunekit.distributed.context import DistributedContext
from tunekit.errors import CaughtError
from tunekit.generation.requests import Answer, GenerationRequest, TokenOutput
from tunekit.generation.rollout_engine import RolloutEngine
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder
from tunekit.rollouts.completion import Completion, parse_completion
from tunekit.rollouts.openai_client import ResponseError
from tunekit.rollouts.served_model import ServedModel

WAIT_SECONDS = 0.05  # of a step for a response, while tools of other episodes run
SEED_BITS = 31

Result = Completion | BaseException  # an exception ends the run


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
        self.responses: SimpleQueue[tuple[Answer, Result]] = SimpleQueue()
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
        self.end_threads()
        self.served.release()

    def close(self) -> None:
        for answer in self.unfinished.values():
            answer.is_finished = True
        self.client.connections.close()
        self.end_threads()
        self.served.close()

    def end_threads(self) -> None:
        """Let the threads end after their requests."""
        for _ in range(self.num_threads):
            self.queue.put(None)
        self.num_threads = 0
        self.queue = SimpleQueue()

    # Responses

    def step(self) -> list[TokenOutput]:
        """Tokens of the answers that have arrived; waits a short time for the first one.

        Raises UserError if the server still fails after all retries, or returns something else.
        """
        responses = self.receive() if self.dist.rank == self.leader else []
        if self.is_sharded:
            ranks = self.dist.all_gather_objects(responses)
            responses = ranks[self.leader]
            for _, result in (response for rank in ranks for response in rank):
                if isinstance(result, BaseException):
                    raise result
        return [output for request_id, result in responses for output in self.finish(request_id, result)]

    def receive(self) -> list[tuple[str, Result]]:
        """Responses that have arrived to requests that were not aborted."""
        received = []
        try:
            received.append(self.responses.get(timeout=WAIT_SECONDS))
            while True:
                received.append(self.responses.get_nowait())
        except Empty:
            return [(answer.request.request_id, result) for answer, result in received if not answer.is_finished]

    def finish(self, request_id: str, result: Result) -> list[TokenOutput]:
        """Outputs of an answer up to its first stop condition."""
        if isinstance(result, BaseException):
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
            with CaughtError() as caught:
                self.responses.put((answer, self.complete(answer)))
            if caught.error is not None:
                self.responses.put((answer, caught.error))

    def complete(self, answer: Answer) -> Completion:
        """Response to a request."""
        for _ in range(self.client.max_retries + 1):
            model = self.served.name
            response = self.client.request("completions", completion_request(model, answer), self.served.restore)
            try:
                completion = parse_completion(response, answer, model, self.model.spec.vocab)
            except ResponseError as error:
                raise self.client.error(f"/completions: {error}") from None
            if completion is not None:
                return completion
        raise self.client.error("/completions: the server aborts the answers")

    def check(self, prompt: Sequence[int]) -> None:
        """Raise UserError if the server cannot answer with token ids and log-probabilities. Collective."""
        self.dist.run_on_main(lambda: self.served.check(self.max_model_len))
        sampling = SamplingConfig(temperature=1.0, max_new_tokens=1)
        answer = Answer(GenerationRequest("check", prompt, sampling), sampling, [*prompt], 1)
        with self.closing_on_error():
            self.sync_weights()
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
