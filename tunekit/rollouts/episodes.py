"""Sampling of many conversations at once, alone or in an environment: what is sampled is what is trained.

Tokens are never tokenized again: tool results and observations are appended to the sampled tokens as the tokens that
the chat template writes between two answers.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import Message
from tunekit.data.chat_template.template_rewrites import find_rewrites
from tunekit.data.chat_template.tool_calls import ToolCallParser, tool_result_tokens
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.environments.base import get_tool_schemas
from tunekit.environments.config import EnvironmentConfig
from tunekit.errors import UserError
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.stop_strings import StopStrings
from tunekit.rollouts.engine import RolloutEngine
from tunekit.rollouts.episode import Episode, EpisodeEnvironment, TurnResult
from tunekit.rollouts.rollout import PromptRow, Rollout

WAIT_SECONDS = 0.05  # for tools, before ranks look again whether one of them has tokens to sample
TRUNCATED = "... (truncated)"


def generate_rollouts(  # noqa: PLR0913
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[PromptRow],
    num_generations: int,
    sampling: SamplingConfig,
    environment: EnvironmentConfig | None,
    step: int,
) -> list[Rollout]:
    """`num_generations` rollouts of each prompt, in the order of the prompts. Without environment: one answer each.

    `sampling.max_new_tokens` limits all tokens after the prompt, observations included. Samples depend on the seed, the
    step, the row and the index of the generation, not on other rows or on the number of ranks. If weights are sharded,
    all ranks must call this together. Raises UserError, with the row, if code of an environment raises.
    """
    training = engine.model.training
    runner = EpisodeRunner(engine, tokenizer, sampling, environment)
    rollouts = runner.run(make_episodes(prompts, num_generations, step))
    engine.model.train(training)
    return rollouts


def make_episodes(prompts: Sequence[PromptRow], num_generations: int, step: int) -> list[Episode]:
    """Episodes with ids that name the random numbers of their samples."""
    seen: Counter[str] = Counter()
    episodes = []
    for group, prompt in enumerate(prompts):
        seen[prompt.where] += 1
        repeat = f" #{seen[prompt.where]}" if seen[prompt.where] > 1 else ""  # the same row twice in a step
        ids = (f"step {step} {prompt.where}{repeat} {index}" for index in range(num_generations))
        episodes += [Episode(request_id, group, prompt) for request_id in ids]
    return episodes


class EpisodeRunner:
    """Runs episodes on an engine. Tools run in threads while other episodes continue.

    Ranks that share rows (tensor and context parallel) need the same observations at the same time: the first of them
    runs the environments, and all wait for it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        sampling: SamplingConfig,
        config: EnvironmentConfig | None,
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.config = engine, tokenizer, sampling, config
        self.dist = engine.dist or DistributedContext.single_process()
        self.stop = StopStrings(tokenizer, sampling.stop_strings)
        self.group_size = self.dist.dims.cp * self.dist.dims.tp  # ranks with the same rows
        self.is_leader = self.dist.rank % self.group_size == 0
        self.environments: dict[str, EpisodeEnvironment] = {}
        self.parsers: dict[str, ToolCallParser] = {}  # by the names of the tools
        self.pending: list[tuple[Episode, Future[TurnResult] | None]] = []  # episodes whose tools run
        self.running: dict[str, Episode] = {}  # episodes that are not finished, by request

    def run(self, episodes: Sequence[Episode]) -> list[Rollout]:
        """Rollouts of all episodes, in their order."""
        with ThreadPoolExecutor(1 if self.config is None else self.config.num_workers) as self.pool:
            self.reset(episodes)
            for episode in episodes:
                self.running[episode.request_id] = episode
                self.engine.add_request(self.make_request(episode))
            while self.any_rank(bool(self.running)):
                if self.engine.has_unfinished_requests:
                    for output in self.engine.step():
                        episode = self.running[output.request_id]
                        episode.add(output.token, output.logprob)
                        if output.finish_reason is not None:
                            self.end_answer(episode, output.finish_reason == "length")
                    self.collect(wait_seconds=0)
                else:
                    self.collect(WAIT_SECONDS)
        return [episode.to_rollout() for episode in episodes]

    def any_rank(self, value: bool) -> bool:
        """Whether a value is true on a rank that must call the engine together with this one."""
        is_shared = self.engine.is_sharded or self.group_size > 1
        return bool(self.dist.max_over_ranks(value)[0]) if is_shared else value

    def reset(self, episodes: Sequence[Episode]) -> None:
        """Start the environments, and put their texts and tools into the prompts."""
        if self.config is None:
            return
        starts = []
        if self.is_leader:
            self.environments = {item.request_id: EpisodeEnvironment(self.config, item.prompt) for item in episodes}
            starts = list(self.pool.map(EpisodeEnvironment.reset, self.environments.values()))
        if self.group_size > 1:
            starts = self.dist.all_gather_objects(starts)[self.dist.rank // self.group_size * self.group_size]
        encoded: dict[str, list[int]] = {}
        for episode, start in zip(episodes, starts, strict=True):
            key = repr((start.messages, start.tools))
            if key not in encoded:
                encoded[key] = self.encode_prompt(episode, list(start.messages), start.tools)
            episode.prompt = replace(episode.prompt, messages=start.messages, tools=start.tools, tokens=encoded[key])

    def encode_prompt(self, episode: Episode, messages: list[Message], tools: Sequence[dict] | None) -> list[int]:
        try:
            return encode_conversation(self.tokenizer, messages, None if tools is None else list(tools))
        except UserError as error:
            raise UserError(f"{episode.prompt.where}: {error}") from None

    def make_request(self, episode: Episode) -> GenerationRequest:
        return GenerationRequest(
            episode.request_id,
            episode.prompt.tokens,
            self.sampling,
            self.stop.token_ids,
            self.stop.is_finished,
            keep_cache=self.config is not None,
        )

    # Turns

    def end_answer(self, episode: Episode, is_cut: bool) -> None:
        """Parse a finished answer, and let the environment act on it."""
        episode.num_turns += 1
        message, error = self.parse(episode)
        episode.messages.append(message)
        calls = message.get("tool_calls", ())
        if self.config is None:
            episode.finish_reason = "length" if is_cut else "stop"
            del self.running[episode.request_id]
            return
        episode.num_tool_iterations += bool(calls or error)
        episode.num_tool_calls += len(calls)
        episode.num_failures += error is not None
        if is_cut or self.exceeds_turns(episode, bool(calls or error)):
            episode.finish_reason = "length"
        future = self.pool.submit(self.act, episode, message, error) if self.is_leader else None
        self.pending.append((episode, future))

    def parse(self, episode: Episode) -> tuple[Message, str | None]:
        """The answer as a message, and why its tool call is malformed."""
        tools = episode.prompt.tools
        if not tools:
            text = self.tokenizer.decode(episode.sampled)
            return {"role": "assistant", "content": self.stop.cut(text)}, None
        key = repr(tools)
        if key not in self.parsers:
            self.parsers[key] = ToolCallParser(self.tokenizer, list(tools))
        parsed = self.parsers[key].parse(episode.sampled)
        return {**parsed.message, "content": self.stop.cut(parsed.content)}, parsed.error

    def exceeds_turns(self, episode: Episode, has_calls: bool) -> bool:
        """Whether an answer that needs another one is the last that the limits allow."""
        assert self.config is not None
        limit = self.config.max_tool_calling_iterations
        return has_calls and (
            episode.num_turns >= self.config.max_turns or (limit is not None and episode.num_tool_iterations > limit)
        )

    def act(self, episode: Episode, message: Message, error: str | None) -> TurnResult:
        """Reply of the environment to an answer. Runs in a thread."""
        environment = self.environments[episode.request_id]
        if episode.finish_reason is not None:
            return environment.end(TurnResult())
        if error is not None:
            return TurnResult([{"role": "user", "content": error}])
        calls = message.get("tool_calls", ())
        result = environment.run_calls(calls) if calls else environment.step(str(message["content"]))
        return result if result.messages else environment.end(result)

    def collect(self, wait_seconds: float) -> None:
        """Continue or end the episodes whose environment has acted."""
        if self.group_size > 1:
            self.collect_in_group()
            return
        if wait_seconds:
            wait([future for _, future in self.pending if future is not None], wait_seconds, FIRST_COMPLETED)
        pending, self.pending = self.pending, []
        for episode, future in pending:
            if future is not None and future.done():
                self.continue_episode(episode, future.result())
            else:
                self.pending.append((episode, future))

    def collect_in_group(self) -> None:
        """Wait for all environments of the first rank with these rows."""
        if not self.any_rank(bool(self.pending)):
            return
        results = [future.result() for _, future in self.pending if future is not None]
        results = self.dist.all_gather_objects(results)[self.dist.rank // self.group_size * self.group_size]
        pending, self.pending = self.pending, []
        for (episode, _), result in zip(pending, results, strict=True):
            self.continue_episode(episode, result)

    def continue_episode(self, episode: Episode, result: TurnResult) -> None:
        """Append what the environment said, or end the episode."""
        episode.num_failures += result.num_failures
        is_ended = not result.messages
        if not is_ended:
            is_ended = not self.append(episode, result.messages)
            if is_ended:  # no space for another answer
                episode.finish_reason = "length"
                future = self.pool.submit(self.act, episode, {}, None) if self.is_leader else None
                self.pending.append((episode, future))
                return
        if is_ended:
            episode.reward, episode.metrics = result.reward, result.metrics
            episode.finish_reason = episode.finish_reason or "stop"
            self.engine.abort(episode.request_id)
            del self.running[episode.request_id]

    def append(self, episode: Episode, messages: Sequence[Message]) -> bool:
        """Append messages and the start of the next answer. Returns False, without a change, if there is no space."""
        assert self.config is not None
        if episode.num_turns >= self.config.max_turns:
            return False
        messages = [{**message, "content": self.clean(message["content"])} for message in messages]
        calls = episode.messages[-1].get("tool_calls", ())
        tools = None if episode.prompt.tools is None else list(episode.prompt.tools)
        try:
            tokens = tool_result_tokens(self.tokenizer, tools, messages, calls, episode.sampled[-1])
        except UserError as error:
            raise UserError(f"environment: {error}. Set chat_template to one that can.") from None
        num_left = self.sampling.max_new_tokens - len(episode.tokens) - len(tokens)
        num_free = self.engine.max_model_len - len(episode.prompt.tokens) - len(episode.tokens) - len(tokens)
        if min(num_left, num_free) < 1:
            return False
        episode.messages += messages
        episode.add_observation(tokens)
        self.engine.append_tokens(episode.request_id, tokens, replace(self.sampling, max_new_tokens=num_left))
        return True

    def clean(self, text: str) -> str:
        """A text without special tokens, which could end the message, cut to `max_tool_result_tokens`."""
        assert self.config is not None
        while (without := self.tokenizer.special_texts.sub("", text)) != text:  # what is left may form another one
            text = without
        tokens = self.tokenizer.encode(text)
        limit = self.config.max_tool_result_tokens
        return text if len(tokens) <= limit else self.tokenizer.decode(tokens[:limit]) + TRUNCATED


def describe_rewrites(tokenizer: Tokenizer, config: EnvironmentConfig) -> str:
    """Warning about parts of earlier turns that the chat template rewrites; empty if it keeps all of them."""
    tools = get_tool_schemas(config.create()) or None
    rewrites = ", ".join(name for name in find_rewrites(tokenizer, tools) if name != "whitespace")
    return rewrites and (
        f"{tokenizer.template(tools).name}: the chat template rewrites earlier turns ({rewrites}). Episodes keep the "
        "sampled tokens; a server that renders the conversation again shows the model another text"
    )
