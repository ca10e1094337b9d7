"""Texts and token ids of answers to many prompts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import Message
from tunekit.data.tokenizer import TextStreamer, Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import FinishReason, GenerationRequest, TokenOutput, never_stop
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.stop_strings import StopStrings
from tunekit.loggers.progress import ProgressLogger
from tunekit.models.decoder import Decoder


class AnswerTokens(NamedTuple):
    """Token ids of an answer, without its stop token."""

    tokens: list[int]
    finish_reason: FinishReason


class GeneratedText(NamedTuple):
    """Text of an answer, up to the first stop string."""

    answer: str
    finish_reason: FinishReason


def check_prompt_length(where: str, num_tokens: int, context: int | None) -> None:
    """Raise UserError if a prompt leaves no space for an answer within the context length, if that is known."""
    if context is not None and num_tokens >= context:
        raise UserError(
            f"{where}: the prompt has {num_tokens:,} tokens, but the context length of the model is {context:,}. "
            "Shorten the prompt, or raise config_overrides.max_position_embeddings."
        )


def log_cut_answers(is_cut: Sequence[bool], context: int, dist: DistributedContext) -> None:
    """Warn about answers that ended because the context was full."""
    if any(is_cut):
        limit = f"the context length of the model, {context:,} tokens with the prompt"
        dist.log(f"warning: {sum(is_cut):,} of {len(is_cut):,} answers were cut off at {limit}")


def check_finite(output: TokenOutput) -> None:
    """Raise UserError for a token of logits with NaN."""
    if math.isnan(output.logprob):
        problem = "the model computes NaN: its weights or its adapter have NaN, or values too large for the dtype"
        raise UserError(f"{problem}. Check the files, or set precision.compute_dtype=fp32.")


def generate_rows(
    model: Decoder,
    prompts: Mapping[int, Sequence[int]],
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
    batch_size: int,
    is_finished: Callable[[Sequence[int]], bool] = never_stop,
) -> Iterator[tuple[int, AnswerTokens]]:
    """Yield the index and the answer of each row when it is finished. Answers end at the context length of the model.

    Indices name the random numbers. Ranks that share weights have the same rows.
    """
    if not prompts:
        return
    max_model_len = min(max(map(len, prompts.values())) + sampling.max_new_tokens, model.spec.context)
    engine = GenerationEngine(model, min(batch_size, len(prompts)), max_model_len, None)
    rows = {f"row {row}": row for row in prompts}
    answers: dict[str, list[int]] = {name: [] for name in rows}
    requests = [GenerationRequest(name, prompts[row], sampling, stop_ids, is_finished) for name, row in rows.items()]
    for output in engine.stream(requests):
        check_finite(output)
        name, token, _, _, finish_reason = output
        if token not in stop_ids:
            answers[name].append(token)
        if finish_reason is not None:
            yield rows[name], AnswerTokens(answers.pop(name), finish_reason)


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
    first: int = 0,
    is_finished: Callable[[Sequence[int]], bool] = never_stop,
) -> list[list[int]]:
    """Token ids of the answer to each prompt, up to a stop token (excluded) or until `is_finished(answer)`.

    `first` is the index of the first row, for its random numbers.
    """
    rows = dict(enumerate(prompts, start=first))
    answers = dict(generate_rows(model, rows, sampling, stop_ids, len(prompts), is_finished))
    return [answers[row].tokens for row in rows]


def generate_all(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
    batch_size: int,
    dist: DistributedContext,
    is_finished: Callable[[Sequence[int]], bool] = never_stop,
) -> list[AnswerTokens]:
    """Answers to all prompts in order, `batch_size` at once. Model replicas (dp_replicate) share the prompts."""
    rows = {row: prompts[row] for row in range(dist.coords.replicate, len(prompts), dist.dims.dp_replicate)}
    answers = generate_rows(model, rows, sampling, stop_ids, batch_size, is_finished)
    local = {}
    with ProgressLogger("answering", len(rows), "row", dist.is_main_process) as progress:
        for row, answer in answers:
            local[row] = answer
            dist.heartbeat.record(len(local), "answer")
            progress.update()
    merged = {row: answer for part in dist.all_gather_objects(local) for row, answer in part.items()}
    return [merged[row] for row in range(len(prompts))]


def generate_answers(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    batch_size: int,
    dist: DistributedContext,
) -> list[GeneratedText]:
    """Texts of the answers to all prompts, as `generate_all`. Warns about those that the context length cuts off."""
    stop = StopStrings(tokenizer, sampling.stop_strings)
    answers = generate_all(model, prompts, sampling, stop.token_ids, batch_size, dist, stop.is_finished)
    is_cut = [reason == "length" and len(tokens) < sampling.max_new_tokens for tokens, reason in answers]
    log_cut_answers(is_cut, model.spec.context, dist)
    return [GeneratedText(stop.cut(tokenizer.decode(tokens)), reason) for tokens, reason in answers]


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
    engine = GenerationEngine(model, 1, len(prompt) + min(max_tokens, sampling.max_new_tokens), None)
    for output in engine.stream([GenerationRequest(f"row {first}", prompt, sampling)]):
        check_finite(output)
        if answer is not None:
            answer.append(output.token)
        if output.token in stop.token_ids:
            break
        text += streamer.add(output.token)
        if stop.is_in(text):
            break
        printable = stop.printable(text)
        yield printable
        text = text[len(printable) :]
    yield stop.cut(text + streamer.flush())
