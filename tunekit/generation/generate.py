"""Batched text generation with a KV cache."""

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

MIN_TOKENS_TO_SHRINK = 8  # finished rows are removed from a batch if at least this many tokens remain


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling options. The samples of a row depend on the seed and the index of the row, not on other rows."""

    temperature: float = 0.0  # Sampling temperature; 0: greedy decoding
    top_k: int | None = None  # Sample from the k most likely tokens; null: all
    top_p: float = 1.0  # Sample from the most likely tokens with this total probability (nucleus sampling)
    max_new_tokens: int = 256  # Maximum length of an answer in tokens
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise FieldError("temperature", f"must be >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise FieldError("top_k", f"must be >= 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise FieldError("top_p", f"must be > 0 and <= 1, got {self.top_p}")
        if self.max_new_tokens < 1:
            raise FieldError("max_new_tokens", f"must be >= 1, got {self.max_new_tokens}")

    def uniform_numbers(self, rows: int, first: int = 0) -> Tensor:
        """Uniform random numbers (rows, max_new_tokens); `first` is the index of the first row."""
        names = (f"row {first + row}" for row in range(rows))
        return torch.stack(
            [torch.rand(self.max_new_tokens, generator=named_generator(self.seed, name)) for name in names]
        )

    def sample(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Next tokens (B,) from logits (B, vocab) and a uniform number for each row (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = (logits.float() / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p == 1:
            return sample_index(probabilities, numbers)
        probabilities, tokens = self.sort_top_k(probabilities)
        preceding = probabilities.cumsum(-1) - probabilities  # total probability of more likely tokens
        nucleus = preceding < self.top_p * probabilities.sum(-1, keepdim=True)
        return tokens.gather(-1, sample_index(probabilities * nucleus, numbers)[:, None]).squeeze(-1)

    def sort_top_k(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and ids (B, top_k) in descending order; ties are sorted by id."""
        if self.top_k is None:
            return probabilities.sort(dim=-1, descending=True, stable=True)
        # The bits of positive floats are ordered like the floats. Appending the id makes all keys different, so that
        # topk has the same result on all devices.
        last = probabilities.shape[-1] - 1
        keys = (probabilities.view(torch.int32).long() << 32) + torch.arange(last, -1, -1, device=probabilities.device)
        tokens = last - (keys.topk(min(self.top_k, last + 1), dim=-1).values & 0xFFFFFFFF)
        return probabilities.gather(-1, tokens), tokens


def sample_index(weights: Tensor, numbers: Tensor) -> Tensor:
    """Sample an index (B,) from weights (B, N) with uniform numbers (B,). Indices of zero weights are never sampled."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    threshold = torch.minimum(numbers.to(sums)[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, threshold, right=True).squeeze(-1)


def generate_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    first: int = 0,
    finished: Collection[int] = (),
) -> Iterator[list[int]]:
    """Yield the next token of each row, up to `max_new_tokens` times.

    The caller may add row indices to `finished` between steps. Later tokens of these rows are meaningless and cheap.
    """
    # FSDP gathers weights into memory that later training steps write to, which inference tensors do not allow.
    mode = torch.no_grad() if isinstance(model, FSDPModule) else torch.inference_mode()
    return mode(decode_steps)(model, prompts, sampling, first, finished)


def decode_steps(
    model: Decoder, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, first: int, finished: Collection[int]
) -> Iterator[list[int]]:
    """Yield the next token of each row. Prompts are padded on the right; new tokens overwrite the padding in the cache.

    The GPU computes a token while the host processes the previous one.
    """
    model.eval()
    device = model.device
    configure_attention(device)
    launched = launch_steps(model, [list(prompt) for prompt in prompts], sampling, first, finished)
    max_pending = 1 if has_static_shapes(device) and not model.rope_switch_lengths else 0
    tokens, pending = dict.fromkeys(range(len(prompts)), 0), deque[DrawnTokens]()
    for sampled in launched:
        pending.append(sampled)
        if len(pending) > max_pending:
            tokens |= pending.popleft().read()
            yield [*tokens.values()]
    for sampled in pending:
        tokens |= sampled.read()
        yield [*tokens.values()]


def launch_steps(
    model: Decoder, rows: list[list[int]], sampling: SamplingConfig, first: int, finished: Collection[int]
) -> Iterator[DrawnTokens]:
    """Launch the decoding steps. Recomputes the cache at the lengths where the RoPE frequencies change (LongRoPE)."""
    slots, edges = max(map(len, rows)) + sampling.max_new_tokens, model.rope_switch_lengths
    lengths = [len(row) for row in rows]
    numbers = sampling.uniform_numbers(len(rows), first).to(model.device)
    logits, cache = prefill(model, rows, slots)
    loop = DecodeLoop(model, cache, lengths, numbers, sampling.sample)
    sampled = loop.take(logits)
    for i in range(1, sampling.max_new_tokens):
        yield sampled
        if edges:
            for row, token in sampled.read().items():
                rows[row].append(token)
        if any(length + i - 1 in edges for length in lengths):
            logits, cache = prefill(model, rows, slots)
            loop = DecodeLoop(model, cache, [len(row) for row in rows], numbers, sampling.sample, drawn=i)
            sampled = loop.take(logits)
            continue
        left = sampling.max_new_tokens - i
        if not edges and (selected := select_remaining(loop.rows, finished, left)):
            loop.select_rows(selected)
        sampled = loop.advance(left)
    yield sampled


def select_remaining(rows: Sequence[int], finished: Collection[int], left: int) -> list[int] | None:
    """Rows to continue with; None: all. Batch sizes shrink to powers of two, which limits the number of CUDA graphs."""
    unfinished = [row for row in rows if row not in finished]
    size = 1 << max(len(unfinished) - 1, 0).bit_length()
    if left < MIN_TOKENS_TO_SHRINK or 2 * size > len(rows):
        return None
    finished_rows = [row for row in rows if row in finished]
    return sorted([*unfinished, *finished_rows[: size - len(unfinished)]])


def prefill(model: Decoder, rows: Sequence[Sequence[int]], slots: int) -> tuple[Tensor, KVCache]:
    """Logits (B, vocab) after the last token of each row, and the KV cache of all tokens.

    Logits of other tokens are not computed.
    """
    device = model.device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    cache = model.make_cache(len(rows), slots)

    def last(hidden: Tensor, head: nn.Module) -> Tensor:
        return head(hidden[torch.arange(len(rows), device=device), lengths - 1])

    return model(tokens, cache=cache, head_fn=last, lengths=lengths), cache


def never_stop(answer: Sequence[int]) -> bool:
    """Stop condition that is never met."""
    return False


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
    first: int = 0,
    is_finished: Callable[[Sequence[int]], bool] = never_stop,
) -> list[list[int]]:
    """Token ids of the answer to each prompt, up to a stop token (excluded) or until `is_finished(answer)`."""
    answers: list[list[int]] = [[] for _ in prompts]
    finished: set[int] = set()
    for tokens in generate_tokens(model, prompts, sampling, first, finished):
        for row in set(range(len(prompts))) - finished:
            if tokens[row] in stop_ids:
                finished.add(row)
                continue
            answers[row].append(tokens[row])
            if is_finished(answers[row]):
                finished.add(row)
        if len(finished) == len(prompts):
            break
    return answers


def generate_all(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
    batch_size: int,
    dist: DistributedContext,
    is_finished: Callable[[Sequence[int]], bool] = never_stop,
) -> list[list[int]]:
    """Answers to all prompts in order, in batches. Model replicas (dp_replicate) share the batches."""
    starts = range(dist.coords.replicate * batch_size, len(prompts), dist.dims.dp_replicate * batch_size)
    quiet = None if dist.is_main_process else True
    local = {}
    for first in tqdm(starts, "answering", unit="batch", disable=quiet, leave=False):
        local[first] = generate_batch(
            model, prompts[first : first + batch_size], sampling, stop_ids, first, is_finished
        )
        dist.heartbeat.record(first, "answer")
    batches = {
        first: answers
        for answers_by_start in dist.all_gather_objects(local)
        for first, answers in answers_by_start.items()
    }
    return [answer for first in sorted(batches) for answer in batches[first]]


def stream_text(
    model: Decoder, tokenizer: Tokenizer, messages: Sequence[dict[str, str]], sampling: SamplingConfig
) -> Iterator[str]:
    """Yield the answer to a conversation as printable text chunks."""
    prompt = tokenizer.encode_prompt(messages)
    max_tokens = model.spec.context - len(prompt)
    if max_tokens < 1:
        raise UserError(
            f"the conversation has {len(prompt)} tokens, but the context length of the model is {model.spec.context}"
        )
    text = TextStreamer(tokenizer)
    for count, (token,) in enumerate(generate_tokens(model, [prompt], sampling), start=1):
        if token in tokenizer.stops:
            break
        yield text.add(token)
        if count == max_tokens:
            break
    yield text.flush()
