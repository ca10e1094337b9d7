"""Answers of a model: many prompts at once, with a cache of keys and values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from tunekit.data.tokenizer import Stream, Tokenizer
from tunekit.errors import FieldError, UserError
from tunekit.models.decoder import Decoder
from tunekit.models.init import seeded
from tunekit.models.place import Cache
from tunekit.parallel.run import Run


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. What a row draws depends on the seed and its own number, not on the other rows."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int | None = None  # draw from the likeliest k only
    top_p: float = 1.0  # of these, draw from the likeliest that have this share of the probability
    tokens: int = 256  # longest answer
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise FieldError("temperature", f"must not be below 0, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise FieldError("top_k", f"must be 1 or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise FieldError("top_p", f"a share above 0 and up to 1, not {self.top_p}")
        if self.tokens < 1:
            raise FieldError("tokens", f"must be 1 or more, not {self.tokens}")

    def numbers(self, rows: int, first: int = 0) -> Tensor:
        """One uniform number for each token of each row (rows, tokens); `first` is the number of the first row."""
        names = (f"row {first + row}" for row in range(rows))
        return torch.stack([torch.rand(self.tokens, generator=seeded(self.seed, name)) for name in names])

    def choose(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Next tokens (B,) from logits (B, vocab) and a uniform number for each row (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        shares = (logits.float() / self.temperature).softmax(-1)
        probabilities, tokens = shares.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            probabilities, tokens = probabilities[:, : self.top_k], tokens[:, : self.top_k]
        before = probabilities.cumsum(-1) - probabilities  # what the likelier tokens have
        kept = before < self.top_p * probabilities.sum(-1, keepdim=True)
        sums = (probabilities * kept).cumsum(-1)
        index = torch.searchsorted(sums, numbers.to(sums)[:, None] * sums[:, -1:], right=True)
        return tokens.gather(-1, index.clamp(max=kept.sum(-1, keepdim=True) - 1)).squeeze(-1)


def steps(model: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling, first: int = 0) -> Iterator[list[int]]:
    """The next token of every row, again and again, until the caller has enough or the rows are as long as asked."""
    # Divided weights are gathered into memory that a later training step may want to write to.
    mode = torch.no_grad() if isinstance(model, FSDPModule) else torch.inference_mode()
    return mode(decoded)(model, prompts, sampling, first)


def decoded(model: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling, first: int) -> Iterator[list[int]]:
    """Prompts are padded on the right: a row's own tokens overwrite its padding in the cache as they come."""
    model.eval()
    rows = [list(prompt) for prompt in prompts]
    slots, edges = max(map(len, rows)) + sampling.tokens, model.edges
    logits, cache = prefill(model, rows, slots)
    numbers = sampling.numbers(len(rows), first).to(logits.device)
    for i in range(sampling.tokens):
        chosen = sampling.choose(logits, numbers[:, i])
        yield (tokens := chosen.tolist())
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        if i + 1 == sampling.tokens:
            return
        if any(len(row) - 1 in edges for row in rows):
            logits, cache = prefill(model, rows, slots)
        else:
            positions = torch.tensor([[len(row) - 1] for row in rows], device=logits.device)
            logits = model(chosen[:, None], positions, cache=cache)[:, -1]


def prefill(model: Decoder, rows: Sequence[Sequence[int]], slots: int) -> tuple[Tensor, Cache]:
    """Logits (B, vocab) behind the last token of each row, and a cache of all that came before.

    The logits of the other tokens are never made.
    """
    device = model.embed.weight.device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    cache = model.cache(len(rows), slots)

    def last(hidden: Tensor, head: nn.Module) -> Tensor:
        return head(hidden[torch.arange(len(rows), device=device), lengths - 1])

    return model(tokens, cache=cache, read=last, lengths=lengths), cache


def never(answer: Sequence[int]) -> bool:
    """No answer ends by what it says."""
    return False


def complete(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stops: frozenset[int],
    first: int = 0,
    ended: Callable[[Sequence[int]], bool] = never,
) -> list[list[int]]:
    """The answer of each prompt as token ids, without the token that ended it; or up to where it has `ended`."""
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    for tokens in steps(model, prompts, sampling, first):
        open_rows -= {row for row in open_rows if tokens[row] in stops}
        for row in open_rows:
            answers[row].append(tokens[row])
        open_rows -= {row for row in open_rows if ended(answers[row])}
        if not open_rows:
            break
    return answers


def answers(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stops: frozenset[int],
    batch: int,
    run: Run,
    ended: Callable[[Sequence[int]], bool] = never,
) -> list[list[int]]:
    """The answers to all prompts in their order, `batch` at once. Copies of the model share them, with a bar."""
    mine = range(run.place.replicate * batch, len(prompts), run.sizes.replicate * batch)
    quiet = None if run.is_main else True
    found = {}
    for first in tqdm(mine, "answering", unit="batch", disable=quiet, leave=False):
        found[first] = complete(model, prompts[first : first + batch], sampling, stops, first, ended)
        run.beats.beat(first, "answer")
    parts = {first: made for one in run.gather(found) for first, made in one.items()}
    return [answer for first in sorted(parts) for answer in parts[first]]


def stream(
    model: Decoder, tokenizer: Tokenizer, messages: Sequence[dict[str, str]], sampling: Sampling
) -> Iterator[str]:
    """The answer to a conversation, in pieces that can be printed."""
    prompt = tokenizer.prompt(messages)
    room = model.spec.context - len(prompt)
    if room < 1:
        raise UserError(f"the conversation has {len(prompt)} tokens, and the model was made for {model.spec.context}")
    text = Stream(tokenizer)
    for count, (token,) in enumerate(steps(model, [prompt], sampling), start=1):
        if token in tokenizer.stops:
            break
        yield text.add(token)
        if count == room:
            break
    yield text.end()
