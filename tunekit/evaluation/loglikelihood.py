"""How likely a model finds tokens that are given. Rows of like length share a pass, and equal rows are read once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder

ROOM = 2**24  # logits that are made at once


class ScoredTokens(NamedTuple):
    """A row of tokens, and the places of those that are scored: from 1 on, each seen from the tokens before it."""

    tokens: Sequence[int]
    at: Sequence[int]

    @property
    def seen(self) -> tuple[int, ...]:
        """What a pass must read: nothing from the last scored token on."""
        return tuple(self.tokens[: self.at[-1]])


class LogLikelihood(NamedTuple):
    """The log-likelihood of the scored tokens in nats, and whether each of them was the likeliest."""

    logprob: float
    greedy: bool


def score_rows(
    model: Decoder, rows: Sequence[ScoredTokens], batch: int, run: DistributedContext
) -> list[LogLikelihood]:
    """The score of each row, on all ranks; `batch` different rows are read in one pass, the longest first.

    Ranks share the passes, and all take equally many: where weights are divided, each pass needs all of them.
    """
    asking: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        asking.setdefault(row.seen, []).append(number)
    order = sorted(asking, key=len, reverse=True)
    parts = [order[first : first + batch] for first in range(0, len(order), batch)]
    found: dict[int, LogLikelihood] = {}
    quiet = None if run.is_main else True
    for first in tqdm(range(0, len(parts), run.sizes.readers), "scoring", unit="batch", disable=quiet, leave=False):
        part = parts[min(first + run.reader, len(parts) - 1)]
        numbers = [number for seen in part for number in asking[seen]]
        places = [place for place, seen in enumerate(part) for _ in asking[seen]]
        made = read(model, part, [rows[number] for number in numbers], places)
        found.update(zip(numbers, made, strict=True))
        run.beats.beat(first, "score")
    whole = {number: score for one in run.gather(found) for number, score in one.items()}
    return [whole[number] for number in range(len(rows))]


def read(
    model: Decoder, seen: Sequence[Sequence[int]], rows: Sequence[ScoredTokens], places: Sequence[int]
) -> list[LogLikelihood]:
    """One pass: `places` says which of the `seen` rows each of the `rows` goes on from."""
    device = model.device
    tokens = pad_sequence([torch.tensor(row) for row in seen], batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in seen], device=device)
    width = tokens.shape[1]
    before = torch.tensor([place * width + at - 1 for row, place in zip(rows, places, strict=True) for at in row.at])
    targets = torch.tensor([row.tokens[at] for row in rows for at in row.at])
    counts = [len(row.at) for row in rows]

    def look(hidden: Tensor, head: nn.Module) -> Tensor:
        parts = chunks(hidden.flatten(0, 1), head, before.to(device), targets.to(device), model.spec.vocab)
        return torch.cat(list(parts), dim=1)

    model.eval()
    # Divided weights are gathered into memory that a later training step may want to write to.
    with torch.no_grad() if isinstance(model, FSDPModule) else torch.inference_mode():
        logprobs, greedy = model(tokens, lengths=lengths, read=look).cpu()
    each = zip(logprobs.split(counts), greedy.split(counts), strict=True)
    return [LogLikelihood(float(logprob.sum()), bool(likeliest.all())) for logprob, likeliest in each]


def chunks(hidden: Tensor, head: nn.Module, before: Tensor, targets: Tensor, vocab: int) -> Iterator[Tensor]:
    """(2, n) of some targets at a time: their log-probabilities, and 1 where a target is the likeliest token."""
    size = max(1, ROOM // vocab)
    for places, wanted in zip(before.split(size), targets.split(size), strict=True):
        logits = head(hidden.index_select(0, places)).float()
        own = logits.gather(1, wanted[:, None]).squeeze(1)
        yield torch.stack([own - logits.logsumexp(1), (logits.argmax(1) == wanted).float()]).double()
