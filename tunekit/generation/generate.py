"""Answers of a model: many prompts at once, with a cache of keys and values."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from tunekit.data.tokenizer import TextStreamer, Tokenizer
from tunekit.distributed.attention_setup import configure_attention
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.models.decode import DecodeLoop, DrawnTokens
from tunekit.models.decoder import Decoder
from tunekit.models.forward_context import KVCache, has_static_shapes
from tunekit.models.weight_init import named_generator

WORTH_SHRINKING = 8  # tokens that are still to come, at least, where finished rows are taken out of a batch


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. What a row draws depends on the seed and its own number, not on the other rows."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int | None = None  # draw from the likeliest k only
    top_p: float = 1.0  # of these, draw from the likeliest that have this share of the probability
    max_new_tokens: int = 256  # longest answer
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise FieldError("temperature", f"must not be below 0, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise FieldError("top_k", f"must be 1 or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise FieldError("top_p", f"a share above 0 and up to 1, not {self.top_p}")
        if self.max_new_tokens < 1:
            raise FieldError("max_new_tokens", f"must be 1 or more, not {self.max_new_tokens}")

    def numbers(self, rows: int, first: int = 0) -> Tensor:
        """One uniform number for each token of each row (rows, tokens); `first` is the number of the first row."""
        names = (f"row {first + row}" for row in range(rows))
        return torch.stack(
            [torch.rand(self.max_new_tokens, generator=named_generator(self.seed, name)) for name in names]
        )

    def choose(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Next tokens (B,) from logits (B, vocab) and a uniform number for each row (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        shares = (logits.float() / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p == 1:
            return draw(shares, numbers)
        probabilities, tokens = self.order(shares)
        before = probabilities.cumsum(-1) - probabilities  # what the likelier tokens have
        kept = before < self.top_p * probabilities.sum(-1, keepdim=True)
        return tokens.gather(-1, draw(probabilities * kept, numbers)[:, None]).squeeze(-1)

    def order(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and ids of the `top_k` likeliest tokens, or of all, likeliest first; of equals the first id."""
        if self.top_k is None:
            return shares.sort(dim=-1, descending=True, stable=True)
        # Bits of positive floats grow with them. With the id behind them no two keys are equal, so that devices agree.
        last = shares.shape[-1] - 1
        keys = (shares.view(torch.int32).long() << 32) + torch.arange(last, -1, -1, device=shares.device)
        tokens = last - (keys.topk(min(self.top_k, last + 1), dim=-1).values & 0xFFFFFFFF)
        return shares.gather(-1, tokens), tokens


def draw(shares: Tensor, numbers: Tensor) -> Tensor:
    """Index (B,) of the share (B, N) in which a uniform number (B,) falls; never one of a share of zero."""
    sums = shares.cumsum(-1)
    total = sums[:, -1:]
    place = torch.minimum(numbers.to(sums)[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, place, right=True).squeeze(-1)


def generate_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    first: int = 0,
    finished: Collection[int] = (),
) -> Iterator[list[int]]:
    """The next token of every row, again and again, until the caller has enough or the rows are as long as asked.

    The caller may add rows to `finished` between two steps: their tokens mean nothing from then on, and cost little.
    """
    # Divided weights are gathered into memory that a later training step may want to write to.
    mode = torch.no_grad() if isinstance(model, FSDPModule) else torch.inference_mode()
    return mode(decode_steps)(model, prompts, sampling, first, finished)


def decode_steps(
    model: Decoder, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, first: int, finished: Collection[int]
) -> Iterator[list[int]]:
    """Prompts are padded on the right: a row's own tokens overwrite its padding in the cache as they come.

    A GPU works on a token while the host looks at the one before.
    """
    model.eval()
    device = model.device
    configure_attention(device)
    work = launch_steps(model, [list(prompt) for prompt in prompts], sampling, first, finished)
    ahead = 1 if has_static_shapes(device) and not model.rope_switch_lengths else 0
    tokens, waiting = dict.fromkeys(range(len(prompts)), 0), deque[DrawnTokens]()
    for drawn in work:
        waiting.append(drawn)
        if len(waiting) > ahead:
            tokens |= waiting.popleft().read()
            yield [*tokens.values()]
    for drawn in waiting:
        tokens |= drawn.read()
        yield [*tokens.values()]


def launch_steps(
    model: Decoder, rows: list[list[int]], sampling: SamplingConfig, first: int, finished: Collection[int]
) -> Iterator[DrawnTokens]:
    """Start the work of each token. Rows are read back where positions turn otherwise beyond a length."""
    slots, edges = max(map(len, rows)) + sampling.max_new_tokens, model.rope_switch_lengths
    lengths = [len(row) for row in rows]
    numbers = sampling.numbers(len(rows), first).to(model.device)
    logits, cache = prefill(model, rows, slots)
    loop = DecodeLoop(model, cache, lengths, numbers, sampling.choose)
    drawn = loop.take(logits)
    for i in range(1, sampling.max_new_tokens):
        yield drawn
        if edges:
            for row, token in drawn.read().items():
                rows[row].append(token)
        if any(length + i - 1 in edges for length in lengths):
            logits, cache = prefill(model, rows, slots)
            loop = DecodeLoop(model, cache, [len(row) for row in rows], numbers, sampling.choose, drawn=i)
            drawn = loop.take(logits)
            continue
        left = sampling.max_new_tokens - i
        if not edges and (selected := select_remaining(loop.rows, finished, left)):
            loop.select_rows(selected)
        drawn = loop.advance(left)
    yield drawn


def select_remaining(rows: Sequence[int], finished: Collection[int], left: int) -> list[int] | None:
    """The rows to go on with; None: all. Batches shrink to powers of two, of which each captures one graph."""
    unfinished = [row for row in rows if row not in finished]
    size = 1 << max(len(unfinished) - 1, 0).bit_length()
    if left < WORTH_SHRINKING or 2 * size > len(rows):
        return None
    others = [row for row in rows if row in finished]
    return sorted([*unfinished, *others[: size - len(unfinished)]])


def prefill(model: Decoder, rows: Sequence[Sequence[int]], slots: int) -> tuple[Tensor, KVCache]:
    """Logits (B, vocab) behind the last token of each row, and a cache of all that came before.

    The logits of the other tokens are never made.
    """
    device = model.device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    cache = model.make_cache(len(rows), slots)

    def last(hidden: Tensor, head: nn.Module) -> Tensor:
        return head(hidden[torch.arange(len(rows), device=device), lengths - 1])

    return model(tokens, cache=cache, read=last, lengths=lengths), cache


def never_stop(answer: Sequence[int]) -> bool:
    """No answer ends by what it says."""
    return False


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    stops: frozenset[int],
    first: int = 0,
    ended: Callable[[Sequence[int]], bool] = never_stop,
) -> list[list[int]]:
    """The answer of each prompt as token ids, without the token that ended it; or up to where it has `ended`."""
    answers: list[list[int]] = [[] for _ in prompts]
    finished: set[int] = set()
    for tokens in generate_tokens(model, prompts, sampling, first, finished):
        for row in set(range(len(prompts))) - finished:
            if tokens[row] in stops:
                finished.add(row)
                continue
            answers[row].append(tokens[row])
            if ended(answers[row]):
                finished.add(row)
        if len(finished) == len(prompts):
            break
    return answers


def generate_all(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    stops: frozenset[int],
    batch: int,
    run: DistributedContext,
    ended: Callable[[Sequence[int]], bool] = never_stop,
) -> list[list[int]]:
    """The answers to all prompts in their order, `batch` at once. Copies of the model share them, with a bar."""
    mine = range(run.coords.replicate * batch, len(prompts), run.dims.dp_replicate * batch)
    quiet = None if run.is_main_process else True
    found = {}
    for first in tqdm(mine, "answering", unit="batch", disable=quiet, leave=False):
        found[first] = generate_batch(model, prompts[first : first + batch], sampling, stops, first, ended)
        run.heartbeat.beat(first, "answer")
    parts = {first: made for one in run.all_gather_objects(found) for first, made in one.items()}
    return [answer for first in sorted(parts) for answer in parts[first]]


def stream_text(
    model: Decoder, tokenizer: Tokenizer, messages: Sequence[dict[str, str]], sampling: SamplingConfig
) -> Iterator[str]:
    """The answer to a conversation, in pieces that can be printed."""
    prompt = tokenizer.encode_prompt(messages)
    room = model.spec.context - len(prompt)
    if room < 1:
        raise UserError(f"the conversation has {len(prompt)} tokens, and the model was made for {model.spec.context}")
    text = TextStreamer(tokenizer)
    for count, (token,) in enumerate(generate_tokens(model, [prompt], sampling), start=1):
        if token in tokenizer.stops:
            break
        yield text.add(token)
        if count == room:
            break
    yield text.flush()
