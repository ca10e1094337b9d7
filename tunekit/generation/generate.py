"""Batched text generation with a KV cache."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import Message
from tunekit.data.tokenizer import TextStreamer, Tokenizer
from tunekit.distributed.attention_setup import configure_attention
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.stop_strings import StopStrings
from tunekit.models.decode import DecodeLoop, DrawnTokens
from tunekit.models.decoder import Decoder
from tunekit.models.forward_context import KVCache, has_static_shapes

MIN_TOKENS_TO_SHRINK = 8  # finished rows are removed from a batch if at least this many tokens remain


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
    seen = sampling.seen_tokens(rows, model.spec.vocab, model.device)
    logits, cache = prefill(model, rows, slots)
    loop = DecodeLoop(model, cache, lengths, sampling.sample, numbers, seen)
    sampled = loop.take(logits)
    for i in range(1, sampling.max_new_tokens):
        yield sampled
        if edges:
            for row, token in sampled.read().items():
                rows[row].append(token)
        if any(length + i - 1 in edges for length in lengths):
            logits, cache = prefill(model, rows, slots)
            loop = DecodeLoop(model, cache, [len(row) for row in rows], sampling.sample, numbers, seen, drawn=i)
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


def generate_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    batch_size: int,
    dist: DistributedContext,
) -> list[str]:
    """Texts of the answers to all prompts, up to the first stop string; otherwise as `generate_all`."""
    stop = StopStrings(tokenizer, sampling.stop_strings)
    answers = generate_all(model, prompts, sampling, stop.token_ids, batch_size, dist, stop.is_finished)
    return [stop.cut(tokenizer.decode(answer)) for answer in answers]


def stream_text(  # noqa: PLR0913
    model: Decoder,
    tokenizer: Tokenizer,
    messages: list[Message],
    sampling: SamplingConfig,
    tools: list[dict[str, Any]] | None = None,
    first: int = 0,
    answer: list[int] | None = None,
) -> Iterator[str]:
    """Yield the answer to a conversation as printable text chunks, and append its token ids to `answer`.

    `first` is the row index of its random numbers.
    """
    prompt = encode_conversation(tokenizer, messages, tools)
    max_tokens = model.spec.context - len(prompt)
    if max_tokens < 1:
        raise UserError(
            f"the conversation has {len(prompt)} tokens, but the context length of the model is {model.spec.context}"
        )
    stop = StopStrings(tokenizer, sampling.stop_strings)
    streamer, text = TextStreamer(tokenizer), ""
    for count, (token,) in enumerate(generate_tokens(model, [prompt], sampling, first), start=1):
        if answer is not None:
            answer.append(token)
        if token in stop.token_ids:
            break
        text += streamer.add(token)
        if stop.is_in(text):
            break
        printable = stop.printable(text)
        yield printable
        text = text[len(printable) :]
        if count == max_tokens:
            break
    yield stop.cut(text + streamer.flush())
