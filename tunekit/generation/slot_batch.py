"""Cache and state of the engine's rows on the device, and its forward passes."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tunekit.generation.requests import Answer
from tunekit.generation.slots import Passes, arrange_slots
from tunekit.generation.token_draw import LogprobsMode, RowState, SamplingGroup, TokenDraw, allowed_tokens, group_rows
from tunekit.kernels.device_tensors import copy_to_device
from tunekit.kernels.lora import FactorCache
from tunekit.models.decode import StepGraph, get_capture, is_sharded
from tunekit.models.decoder import Decoder
from tunekit.models.forward_context import KVCache, has_static_shapes

# Steps with their graphs, and those that were captured before: clients of a server choose sampling options freely
MAX_STEPS, MAX_CAPTURED = 64, 1024


class StepGraphs:
    """Steps with their graphs, for the layers and parameters that the model has now."""

    def __init__(self) -> None:
        self.steps: dict[Hashable, DecodeStep] = {}  # the last one was used last
        self.factors = FactorCache()  # casts of LoRA weights that the graphs read
        self.captured: set[Hashable] = set()  # keys of all steps that were captured, also for earlier caches

    def clear(self) -> None:
        """Free all graphs."""
        self.steps, self.factors = {}, FactorCache()


class DecodeStep:
    """Computes one token for each of the first rows. Static: depends on no host value except `cache.num_visible`."""

    def __init__(self, batch: "SlotBatch", size: int, sampling: SamplingGroup | None, num_logprobs: int) -> None:
        self.batch, self.size, self.sampling, self.num_logprobs = batch, size, sampling, num_logprobs
        self.cache = batch.view_cache(0, size)
        self.graph = StepGraph(self.run_step, batch.capture, captured=batch.graphs.captured)
        self.output = batch.state.tokens  # of the last step: that of the draw, or logits (B, vocab) without options

    def run_step(self) -> None:
        state = self.batch.state
        tokens, positions = state.tokens[: self.size], state.positions[: self.size]
        self.output = self.batch.run_model(tokens, positions, cache=self.cache)[:, -1]
        if self.sampling is not None:
            self.output = self.batch.draw(self.output, 0, [self.sampling], self.num_logprobs)


class SlotBatch:
    """The cache of all rows. Running answers occupy the first rows, so that a step computes a view of the cache."""

    def __init__(
        self, model: Decoder, num_slots: int, max_model_len: int, mode: LogprobsMode, graphs: StepGraphs
    ) -> None:
        self.model, self.num_slots, self.graphs = model, num_slots, graphs
        self.cache = model.make_cache(num_slots, max_model_len)
        model.begin_decoding(self.cache)
        self.state = RowState(num_slots, max_model_len, model.spec.outputs, model.device)
        self.draw = TokenDraw(self.state, mode)
        self.capture = get_capture(model)
        self.is_sharded = is_sharded(model)  # the parameters of a pass differ from those of the next one

    def run_model(self, *args: Any, **options: Any) -> Tensor:
        """A pass of the model, with the current weights."""
        with nullcontext() if self.is_sharded else self.graphs.factors.use():
            return self.model(*args, **options)

    def arrange(self, running: Sequence[Answer], admitted: Sequence[Answer], reserved: Sequence[Answer]) -> None:
        """Assign rows to answers and move what is in the cache."""
        longest = max((answer.num_cached for answer in [*running, *admitted, *reserved]), default=0)
        moves = arrange_slots(self.num_slots, running, admitted, reserved)
        if moves:
            source, target = copy_to_device(torch.tensor(moves), self.model.device).unbind(1)
            self.cache.copy_rows(source, target, longest)
            self.state.copy_rows(source, target)

    def view_cache(self, start: int, stop: int) -> KVCache:
        """Rows start to stop after their prefill pass."""
        view = self.cache.view_rows(start, stop)
        view.begin_decoding(self.cache.tables)
        return view

    def decode(self, answers: Sequence[Answer], num_reserved: int, num_logprobs: int, num_left: int) -> Tensor:
        """Outputs of the next token of answers in the first rows; see `TokenDraw`.

        On a GPU, sizes are powers of two, which limits the number of graphs, unless a reserved row is in the way.
        """
        num_rows, device = len(answers), self.model.device
        if has_static_shapes(device):
            num_rows = min(1 << (num_rows - 1).bit_length(), self.num_slots - num_reserved)
        self.state.clear_rows(len(answers), num_rows)
        groups, allowed = group_rows(answers, num_rows, device), allowed_tokens(answers, num_rows, self.state)
        group = groups[0] if len(groups) == 1 and allowed is None else None
        self.cache.cache_length = max(answer.num_cached for answer in answers) + 1
        num_visible = self.cache.num_visible(device)
        key = num_rows, group, num_logprobs, self.state.seen is None, 0 if self.capture is None else num_visible
        step = self.get_step(key, num_rows, group, num_logprobs)
        step.cache.cache_length = self.cache.cache_length
        step.graph.run(key, num_left)
        output = step.output if group is not None else self.draw(step.output, 0, groups, num_logprobs, allowed)
        for answer in answers:
            answer.num_cached += 1
            answer.num_launched += 1
        return output[: len(answers)]

    def get_step(self, key: Hashable, size: int, group: SamplingGroup | None, num_logprobs: int) -> DecodeStep:
        """The step for a batch, with its graph."""
        steps, captured = self.graphs.steps, self.graphs.captured
        step = steps.pop(key, None)
        if step is None or step.batch is not self:  # graphs read the cache with which they were captured
            step = DecodeStep(self, size, group, num_logprobs)
        steps[key] = step
        if len(steps) > MAX_STEPS:
            del steps[next(iter(steps))]  # the least recently used one
        if len(captured) > MAX_CAPTURED:
            captured.clear()
        return step

    def prefill(self, passes: Passes, start: int, num_logprobs: int) -> Tensor:
        """Fill rows from `start` with the tokens of answers, in the order of `passes.answers`; outputs of the next."""
        answers, logits, first = passes.answers, [], start
        for batch in passes.batches:
            logits.append(self.run_pass(batch, first))
            first += len(batch)
        all_logits = torch.cat(logits)
        if passes.copies:
            moves = torch.tensor([(original.slot, copy.slot) for original, copy in passes.copies])
            source, target = copy_to_device(moves, self.model.device).unbind(1)
            self.cache.copy_rows(source, target, max(original.num_missing for original, _ in passes.copies))
            all_logits = torch.cat([all_logits, all_logits[source - start]])
        self.state.set_rows(start, answers)
        groups, allowed = (
            group_rows(answers, len(answers), self.model.device),
            allowed_tokens(answers, len(answers), self.state),
        )
        for answer in answers:
            answer.num_cached = len(answer.all_tokens)
            answer.num_launched += 1
        return self.draw(all_logits, start, groups, num_logprobs, allowed)

    def run_pass(self, answers: Sequence[Answer], start: int) -> Tensor:
        """Add the missing tokens of answers to consecutive rows. Returns the logits (B, vocab) after the last ones."""
        device, longest = self.model.device, max(answer.num_missing for answer in answers)
        missing = [answer.all_tokens[answer.num_cached :] for answer in answers]
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in missing])
        counts = torch.tensor([[answer.num_missing, answer.num_cached] for answer in answers])
        lengths, offsets = copy_to_device(counts, device).unbind(1)
        stop = start + len(answers)
        if answers[0].num_cached == 0:
            cache, positions = self.cache.view_rows(start, stop), None
            cache.clear()
        else:
            cache = self.view_cache(start, stop)
            cache.cache_length = min(max(answer.num_cached for answer in answers) + longest, cache.num_slots)
            # No token has the last position: the last token of an answer does not enter the cache.
            positions = (offsets[:, None] + torch.arange(longest, device=device)).clamp(max=cache.num_slots - 1)

        def last(hidden: Tensor, head: nn.Module) -> Tensor:
            return head(hidden[torch.arange(len(answers), device=device), lengths - 1])

        return self.run_model(copy_to_device(tokens, device), positions, cache=cache, head_fn=last, lengths=lengths)

    def run_dummy_pass(self) -> None:
        """Take part in the communication of a pass of other ranks."""
        self.model(torch.zeros(1, 1, dtype=torch.long, device=self.model.device))
