"""The interface of generation engines that sample rollouts."""

from collections.abc import Sequence
from typing import Protocol

from tunekit.distributed.context import DistributedContext
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder


class RolloutEngine(Protocol):
    """Samples answers of the model in training. See `GenerationEngine` for the methods.

    If `is_sharded`, all ranks must call `step` and `has_unfinished_requests` together.
    """

    @property
    def model(self) -> Decoder: ...
    @property
    def dist(self) -> DistributedContext | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def has_unfinished_requests(self) -> bool: ...

    def add_request(self, request: GenerationRequest) -> None: ...
    def append_tokens(self, request_id: str, tokens: Sequence[int], sampling: SamplingConfig | None = None) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[TokenOutput]: ...
    def generate(self, requests: Sequence[GenerationRequest]) -> dict[str, list[TokenOutput]]: ...

    def sync_weights(self) -> None:
        """Use the weights of the model for the next requests. Collective."""

    def sleep(self) -> None:
        """Free memory until the next request, whose weights may differ. Collective."""
