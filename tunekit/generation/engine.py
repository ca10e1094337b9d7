"""Generation with continuous batching: requests share the batch of each step and are replaced when they end."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from tunekit.distributed.attention_setup import configure_attention
from tunekit.distributed.context import DistributedContext
from tunekit.generation.requests import Answer, TokenOutput
from tunekit.generation.rollout_engine import RolloutEngine
from tunekit.generation.slot_batch import SlotBatch, StepGraphs
from tunekit.generation.slots import plan_passes
from tunekit.generation.token_draw import LogprobsMode, read_output
from tunekit.kernels.device_tensors import HostCopy
from tunekit.models.decode import is_sharded
from tunekit.models.decoder import Decoder
from tunekit.models.forward_context import has_static_shapes


class Launch(NamedTuple):
    """Tokens of some answers that the device computes."""

    answers: Sequence[Answer]
    outputs: HostCopy


def without_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of the engine without gradients.

    FSDP gathers weights into memory that later training steps write to, which inference tensors do not allow.
    """

    @wraps(method)
    def run(self: "GenerationEngine", *args: Any) -> Any:
        with torch.no_grad() if isinstance(self.model, FSDPModule) else torch.inference_mode():
            return method(self, *args)

    return run


class GenerationEngine(RolloutEngine):
    """Answers requests with the model in this process.

        engine = GenerationEngine(model, max_num_seqs=64, max_model_len=2048, dist=dist)
        outputs = engine.generate([GenerationRequest("1", prompt, SamplingConfig(max_new_tokens=64), stop_ids)])

    More requests than `max_num_seqs` wait. `logprobs_mode`: log-probabilities of the logits divided by the temperature,
    or of the logits. Both are before top-k, top-p, min-p and penalties. Leaves the model in eval mode.

    Ranks of a tensor or context parallel group have the same requests. `dist` is None if all ranks that share weights
    do.
    """

    def __init__(
        self,
        model: Decoder,
        max_num_seqs: int,
        max_model_len: int,
        dist: DistributedContext | None,
        logprobs_mode: LogprobsMode = "processed_logprobs",
    ) -> None:
        super().__init__(model, max_num_seqs, max_model_len, dist)
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.is_sharded = is_sharded(model)
        self.rope_switch_lengths = model.rope_switch_lengths
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []  # by slot, from 0
        self.launches: deque[Launch] = deque()
        self.batch: SlotBatch | None = None  # allocated by the first step
        self.graphs = StepGraphs()
        configure_attention(model.device)

    # Requests

    def enqueue(self, answer: Answer) -> None:
        self.waiting.append(answer)
        self.unfinished[answer.request.request_id] = answer

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.waiting = deque(answer for answer in self.waiting if not answer.is_finished)
        self.running = [answer for answer in self.running if not answer.is_finished]

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.max_over_ranks(bool(self.unfinished))[0])

    def max_over_ranks(self, *counts: int) -> list[int]:
        """Maxima over the ranks that share weights. Those of a tensor parallel group have the same counts."""
        if self.dist is None or not self.is_sharded or self.dist.dims.is_tensor_parallel_only:
            return [*counts]
        return [*map(int, self.dist.max_over_ranks(*counts))]

    def sync_weights(self) -> None:
        """Weights are those of the model, so there is nothing to do."""

    def sleep(self) -> None:
        """Free the memory of the cache until the next request. Caches of finished requests are computed again."""
        assert not self.unfinished, "requests are running"
        self.launches.clear()
        for answer in self.resumable.values():
            answer.drop_cache()
        self.graphs.clear()
        self.batch = None

    def replace_graphs(self, graphs: StepGraphs) -> StepGraphs:
        """Use the graphs of another adapter, which is active now. Returns those of the last one."""
        self.graphs, last = graphs, self.graphs
        if self.batch is not None:
            self.batch.graphs = graphs
        return last

    # Steps

    @without_gradients
    def step(self) -> list[TokenOutput]:
        """Compute one token of each running answer, and the first ones of waiting answers that find a free row.

        Outputs have no particular order, except within a request. A GPU computes these tokens while the host processes
        those of the previous step, which are returned then.
        """
        batch = self.prepare()
        outdated = self.take_outdated()
        admitted = [*outdated, *self.admit(self.max_num_seqs - len(self.running) - len(outdated) - len(self.reserved))]
        passes = plan_passes(admitted)
        answers = [*self.running, *admitted]
        num_logprobs = max((answer.request.num_logprobs for answer in answers), default=0)
        num_launches = bool(self.running), len(passes.batches)
        num_passes = sum(self.max_over_ranks(*num_launches))
        launched, outputs = [], []
        if self.running:
            reserved = [*self.reserved, *(answer for answer in admitted if answer.slot is not None)]
            batch.arrange(self.running, [], reserved)
            self.running.sort(key=lambda answer: answer.slot or 0)
            launched += self.running
            outputs.append(batch.decode(self.running, len(reserved), num_logprobs, self.num_left))
            self.retire(self.running)
        if passes.batches:
            batch.arrange(self.running, passes.answers, self.reserved)
            launched += passes.answers
            outputs.append(batch.prefill(passes, len(self.running), num_logprobs))
            self.running += passes.answers
            self.retire(passes.answers)
        for _ in range(num_passes - sum(num_launches)):
            batch.run_dummy_pass()
        if outputs:
            self.launches.append(Launch(launched, HostCopy(outputs[0] if len(outputs) == 1 else torch.cat(outputs))))
        return self.read_launches(self.max_pending(launched))

    def prepare(self) -> SlotBatch:
        """Allocate the cache. After training, captured graphs might have other adapters or weights."""
        if self.batch is None:
            limits = self.max_num_seqs, self.max_model_len
            self.batch = SlotBatch(self.model, *limits, self.logprobs_mode, self.graphs)
        if self.model.training:
            self.model.eval()
            self.graphs.clear()
        return self.batch

    @property
    def reserved(self) -> list[Answer]:
        """Answers with a row in the cache that are not running."""
        return [answer for answer in (*self.resumable.values(), *self.waiting) if answer.slot is not None]

    @property
    def num_left(self) -> int:
        """Number of steps after which the batch is smaller, at most."""
        waiting = sum(answer.max_tokens for answer in self.waiting)
        return waiting + max(answer.max_tokens - answer.num_launched for answer in self.running)

    def take_outdated(self) -> list[Answer]:
        """Remove the answers whose cache has the RoPE frequencies of shorter rows (LongRoPE), to compute them again."""
        if not self.rope_switch_lengths:
            return []
        outdated = [answer for answer in self.running if self.crosses_switch(answer)]
        self.running = [answer for answer in self.running if answer not in outdated]
        for answer in outdated:
            answer.drop_cache()
        return outdated

    def crosses_switch(self, answer: Answer) -> bool:
        """Whether RoPE frequencies for all tokens of an answer differ from those of the cached ones."""
        num_tokens = len(answer.context) + len(answer.tokens)
        return any(answer.num_cached <= length < num_tokens for length in self.rope_switch_lengths)

    def admit(self, num_free: int) -> list[Answer]:
        """Remove the answers from the queue that find a row. Reserved rows are given up only if nothing runs."""
        continued = [answer for answer in self.waiting if answer.slot is not None]
        others = [answer for answer in self.waiting if answer.slot is None]
        if others and num_free == 0 and len(self.reserved) == self.max_num_seqs and not continued:
            for answer in self.reserved[: len(others)]:
                answer.drop_cache()
                num_free += 1
        self.waiting = deque(others[num_free:])
        for answer in filter(self.crosses_switch, continued):
            answer.drop_cache()
        return [*continued, *others[:num_free]]

    def retire(self, answers: Sequence[Answer]) -> None:
        """Free or reserve the rows of answers that need no further step."""
        self.resumable |= {
            answer.request.request_id: answer
            for answer in answers
            if answer.request.keep_cache and not answer.is_running
        }
        self.running = [answer for answer in self.running if answer.is_running]

    def max_pending(self, answers: Sequence[Answer]) -> int:
        """Number of steps whose tokens the host may read later."""
        is_read_now = any(answer.request.allowed_tokens for answer in answers) or self.rope_switch_lengths
        return 1 if answers and has_static_shapes(self.model.device) and not is_read_now else 0

    def read_launches(self, num_pending: int) -> list[TokenOutput]:
        """Outputs of all launches but the last `num_pending`."""
        outputs: list[TokenOutput] = []
        while len(self.launches) > num_pending:
            answers, numbers = self.launches.popleft()
            ended = []
            for answer, row in zip(answers, numbers.read(), strict=True):
                if answer.is_finished:  # by an earlier token
                    continue
                token, logprob, top = read_output(row, answer.request.num_logprobs)
                reason = answer.add(token)
                outputs.append(TokenOutput(answer.request.request_id, token, logprob, top, reason))
                if reason is not None:
                    ended.append(answer)
                    del self.unfinished[answer.request.request_id]
            self.retire(ended)
        return outputs
