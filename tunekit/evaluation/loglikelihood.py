"""Log-likelihood of given tokens. Rows of similar length share a forward pass; equal inputs are computed once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder

MAX_LOGITS = 2**24  # logits that are materialized at once


class LoglikelihoodRequest(NamedTuple):
    """A row of tokens, and the positions to score, from 1 on: each is predicted from the tokens before it."""

    tokens: Sequence[int]
    positions: Sequence[int]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens before the last scored position."""
        return tuple(self.tokens[: self.positions[-1]])


class LogLikelihood(NamedTuple):
    """Sum of the log-probabilities of the scored tokens in nats, and whether greedy decoding produces all of them."""

    logprob: float
    greedy: bool


def score_rows(
    model: Decoder, rows: Sequence[LoglikelihoodRequest], batch_size: int, dist: DistributedContext
) -> list[LogLikelihood]:
    """Scores of all rows, on every rank. A forward pass takes `batch_size` different inputs, the longest first.

    Ranks share the passes. Each rank runs the same number of them, because sharded weights are gathered in each pass.
    """
    numbers_by_inputs: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        numbers_by_inputs.setdefault(row.inputs, []).append(number)
    order = sorted(numbers_by_inputs, key=len, reverse=True)
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    local_scores: dict[int, LogLikelihood] = {}
    disable = None if dist.is_main_process else True
    for first in tqdm(range(0, len(batches), dist.dims.dp_size), "scoring", unit="batch", disable=disable, leave=False):
        inputs = batches[min(first + dist.dp_rank, len(batches) - 1)]
        numbers = [number for key in inputs for number in numbers_by_inputs[key]]
        input_indices = [index for index, key in enumerate(inputs) for _ in numbers_by_inputs[key]]
        scores = score_batch(model, inputs, [rows[number] for number in numbers], input_indices)
        local_scores.update(zip(numbers, scores, strict=True))
        dist.heartbeat.record(first, "score")
    scores = {number: score for gathered in dist.all_gather_objects(local_scores) for number, score in gathered.items()}
    return [scores[number] for number in range(len(rows))]


def score_batch(
    model: Decoder, inputs: Sequence[Sequence[int]], rows: Sequence[LoglikelihoodRequest], input_indices: Sequence[int]
) -> list[LogLikelihood]:
    """Scores of `rows` in one forward pass; row `i` has the input `input_indices[i]`."""
    device = model.device
    tokens = pad_sequence([torch.tensor(row) for row in inputs], batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in inputs], device=device)
    width = tokens.shape[1]
    positions = torch.tensor(
        [index * width + i - 1 for row, index in zip(rows, input_indices, strict=True) for i in row.positions]
    )
    targets = torch.tensor([row.tokens[i] for row in rows for i in row.positions])
    counts = [len(row.positions) for row in rows]

    def score_hidden(hidden: Tensor, head: nn.Module) -> Tensor:
        chunks = score_chunks(hidden.flatten(0, 1), head, positions.to(device), targets.to(device), model.spec.vocab)
        return torch.cat(list(chunks), dim=1)

    model.eval()
    # FSDP gathers weights into buffers that a later training step may write to, which inference tensors do not allow.
    with torch.no_grad() if isinstance(model, FSDPModule) else torch.inference_mode():
        logprobs, is_greedy = model(tokens, lengths=lengths, head_fn=score_hidden).cpu()
    scores = zip(logprobs.split(counts), is_greedy.split(counts), strict=True)
    return [LogLikelihood(float(logprob.sum()), bool(greedy.all())) for logprob, greedy in scores]


def score_chunks(hidden: Tensor, head: nn.Module, positions: Tensor, targets: Tensor, vocab: int) -> Iterator[Tensor]:
    """(2, n) per chunk of targets: log-probabilities, and 1 where the target is the most likely token."""
    size = max(1, MAX_LOGITS // vocab)
    for chunk, target in zip(positions.split(size), targets.split(size), strict=True):
        logits = head(hidden.index_select(0, chunk)).float()
        target_logits = logits.gather(1, target[:, None]).squeeze(1)
        yield torch.stack([target_logits - logits.logsumexp(1), (logits.argmax(1) == target).float()]).double()
