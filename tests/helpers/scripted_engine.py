"""An engine without a model: each answer of a request is the next one of a script."""

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from tunekit.distributed.context import DistributedContext
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.sampling import SamplingConfig


class ScriptedEngine:
    """Has the interface of `GenerationEngine`. `script(request_id, turn)` returns the token ids of an answer."""

    def __init__(
        self, script: Callable[[str, int], Sequence[int]], max_model_len: int = 100_000, max_num_seqs: int = 8
    ) -> None:
        self.script, self.max_model_len, self.max_num_seqs = script, max_model_len, max_num_seqs
        self.dist, self.is_sharded = DistributedContext(0, "cpu"), False
        self.model = SimpleNamespace(training=False, train=lambda mode: None)
        self.requests: dict[str, GenerationRequest] = {}
        self.appended: dict[str, list[list[int]]] = {}
        self.left: dict[str, deque[int]] = {}
        self.limits: dict[str, int] = {}
        self.num_answered: dict[str, int] = {}  # sampled tokens

    def add_request(self, request: GenerationRequest) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id], self.appended[request.request_id] = request, []
        self.start(request.request_id, request.sampling.max_new_tokens)

    def append_tokens(self, request_id: str, tokens: Sequence[int], sampling: SamplingConfig | None = None) -> None:
        assert request_id in self.requests and request_id not in self.left
        self.appended[request_id].append([*tokens])
        self.start(request_id, (sampling or self.requests[request_id].sampling).max_new_tokens)

    def start(self, request_id: str, limit: int) -> None:
        self.left[request_id] = deque(self.script(request_id, len(self.appended[request_id])))
        request = self.requests[request_id]
        context = len(request.prompt) + sum(map(len, self.appended[request_id])) + self.num_answered.get(request_id, 0)
        self.limits[request_id] = min(limit, self.max_model_len - context)
        assert self.limits[request_id] > 0

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.left.pop(request_id, None)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[TokenOutput]:
        outputs = []
        for request_id, tokens in [*self.left.items()]:
            token = tokens.popleft()
            self.limits[request_id] -= 1
            self.num_answered[request_id] = self.num_answered.get(request_id, 0) + 1
            reason = "stop" if token in self.requests[request_id].stop_token_ids else None
            reason = reason or ("length" if not tokens or self.limits[request_id] == 0 else None)
            outputs.append(TokenOutput(request_id, token, -0.5, [], reason))
            if reason is not None:
                del self.left[request_id]
        return outputs
