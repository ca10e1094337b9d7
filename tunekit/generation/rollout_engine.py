"""The base class of engines that answer requests: in this process, or on a server."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.requests import Answer, GenerationRequest, TokenOutput
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder


class RolloutEngine(ABC):
    """Answers requests with a model whose weights may change between steps.

    Up to `max_num_seqs` answers of at most `max_model_len` tokens, with the prompt, are generated at once. If
    `is_sharded`, all ranks must call `step` and `has_unfinished_requests` together.
    """

    is_sharded: bool

    def __init__(self, model: Decoder, max_num_seqs: int, max_model_len: int, dist: DistributedContext | None) -> None:
        self.model, self.dist = model, dist
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.unfinished: dict[str, Answer] = {}  # answers with further outputs, by request
        self.resumable: dict[str, Answer] = {}  # finished answers that may be continued

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request. Raises UserError if the prompt leaves no space for an answer."""
        assert request.prompt, "a prompt has at least one token"
        assert request.request_id not in self.unfinished, "another request has this id"
        self.resumable.pop(request.request_id, None)
        self.enqueue(self.make_answer(request, request.sampling, list(request.prompt), 0))

    def append_tokens(self, request_id: str, tokens: Sequence[int], sampling: SamplingConfig | None = None) -> None:
        """Continue a finished request that has `keep_cache`: its next output follows these tokens.

        Raises UserError if the tokens leave no space for an answer; the request may be aborted then.
        """
        assert tokens, "no tokens to append"
        last = self.resumable[request_id]
        assert last.is_finished, "the answer is not finished"
        num_drawn = last.num_drawn + len(last.tokens)
        answer = self.make_answer(last.request, sampling or last.sampling, [*last.all_tokens, *tokens], num_drawn)
        answer.slot, answer.num_cached = last.slot, last.num_cached
        del self.resumable[request_id]
        self.enqueue(answer)

    def make_answer(
        self, request: GenerationRequest, sampling: SamplingConfig, context: list[int], num_drawn: int
    ) -> Answer:
        space = self.max_model_len - len(context)
        if space < 1:
            raise UserError(
                f"request {request.request_id}: {len(context):,} tokens leave no space for an answer within "
                f"max_model_len={self.max_model_len:,}. Shorten the prompt, or raise max_model_len."
            )
        return Answer(request, sampling, context, min(space, sampling.max_new_tokens), num_drawn)

    def abort(self, request_id: str) -> None:
        """End a request without further outputs and free its cache. Unknown requests are ignored."""
        if (answer := self.unfinished.pop(request_id, None)) is not None:
            answer.is_finished = True
        self.resumable.pop(request_id, None)

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[str, list[TokenOutput]]:
        """Outputs by request, of unfinished requests too, after all have ended. The model keeps its mode."""
        outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
        for output in self.stream(requests):
            outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[TokenOutput]:
        """Yield the outputs of requests as soon as they are known. The model keeps its mode."""
        training = self.model.training
        for request in requests:
            self.add_request(request)
        try:
            while self.has_unfinished_requests:
                yield from self.step()
        finally:
            self.model.train(training)

    @abstractmethod
    def enqueue(self, answer: Answer) -> None:
        """Start an answer, or let it wait."""

    @property
    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do, on any rank that must call it together with this one."""

    @abstractmethod
    def step(self) -> list[TokenOutput]:
        """The next outputs. They have no particular order, except within a request."""

    @abstractmethod
    def sync_weights(self) -> None:
        """Use the weights of the model for the next requests. Collective."""

    @abstractmethod
    def sleep(self) -> None:
        """Free memory until the next request, whose weights may differ. Collective."""

    def close(self) -> None:  # noqa: B027
        """End all requests, and free what the engine has outside of this process. Not collective: after an error."""

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the engine if an exception leaves the block."""
        with ExitStack() as stack:
            stack.callback(self.close)
            yield
            stack.pop_all()
