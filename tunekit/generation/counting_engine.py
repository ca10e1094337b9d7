"""A generation engine that shows how many requests are finished."""

from tunekit.distributed.context import DistributedContext
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import TokenOutput
from tunekit.loggers.progress import ProgressLogger
from tunekit.models.decoder import Decoder


class CountingEngine(GenerationEngine):
    """Counts the finished requests of this rank. Those with `keep_cache` are finished when they are aborted."""

    def __init__(
        self,
        model: Decoder,
        max_num_seqs: int,
        max_model_len: int,
        dist: DistributedContext | None,
        progress: ProgressLogger,
    ) -> None:
        super().__init__(model, max_num_seqs, max_model_len, dist)
        self.progress = progress

    def step(self) -> list[TokenOutput]:
        outputs = super().step()
        for output in outputs:
            if output.finish_reason is not None and output.request_id not in self.resumable:
                self.progress.update()
        return outputs

    def abort(self, request_id: str) -> None:
        is_kept = request_id in self.resumable
        super().abort(request_id)
        if is_kept:
            self.progress.update()
