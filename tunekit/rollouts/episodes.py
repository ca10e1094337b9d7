"""Sampling of many conversations at once, alone or in an environment: what is sampled is what is trained.

Tokens are never tokenized again: tool results and observations are appended to the sampled tokens as the tokens that
the chat template writes between two answers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import Message
from tunekit.data.chat_template.template_rewrites import find_rewrites
from tunekit.data.chat_template.tool_calls import ToolCallParser, tool_result_tokens
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.environments.base import get_tool_schemas
from tunekit.environments.config import EnvironmentConfig
from tunekit.errors import DeferredError, UserError
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.rollout_engine import RolloutEngine
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.stop_strings import StopStrings
from tunekit.loggers.progress import ProgressLogger
from tunekit.rollouts.episode import Episode, EpisodeEnvironment, EpisodeStart, TurnResult
from tunekit.rollouts.rollout import PromptRow, Rollout

WAIT_SECONDS = 0.05  # for tools, before ranks look again whether one of them has tokens to sample
TRUNCATED = "... (truncated)"


def generate_rollouts(  # noqa: PLR0913
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    prompts: Mapping[int, PromptRow],
    num_generations: int,
    sampling: SamplingConfig,
    environment: EnvironmentConfig | None,
    step: int,
    progress: ProgressLogger | None = None,
) -> list[Rollout]:
    """`num_generations` rollouts of each prompt, in the order of the prompts. Without environment: one answer each.

    `prompts` are by position in the global batch, which is the group of their rollouts. Samples depend on the seed, the
    step, the position and the index of the generation, not on other rows or on the number of ranks.

    `sampling.max_new_tokens` limits all tokens after the prompt, observations included. At most `engine.max_num_seqs`
    environments are open at once, and all are closed in any case. If weights are sharded, all ranks must call this
    together, and all raise the error. Raises UserError, with the row, if code of an environment raises. `progress`
    counts the rollouts that have ended.
    """
    training = engine.model.training
    runner = EpisodeRunner(engine, tokenizer, sampling, environment, progress)
    rollouts = runner.run(
        Episode(f"{prompt.where} {position} {index}", f"step {step} row {position} {index}", position, prompt)
        for position, prompt in prompts.items()
        for index in range(num_generations)
    )
    engine.model.train(training)
    return rollouts


class EpisodeRunner:
    """Runs episodes on an engine. Tools run in threads while other episodes continue.

    With an environment, an episode starts when another one ends, so that as many are open as the engine has rows.

    Ranks that share rows (tensor and context parallel) need the same observations at the same time: the first of them
    runs the environments, and all wait for it. A UserError is raised when no other rank waits in a collective.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        sampling: SamplingConfig,
        config: EnvironmentConfig | None,
        progress: ProgressLogger | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.config = engine, tokenizer, sampling, config
        self.progress = progress
        self.dist = engine.dist or DistributedContext.single_process()
        self.stop = StopStrings(tokenizer, sampling.stop_strings)
        self.group_size = self.dist.dims.cp * self.dist.dims.tp  # ranks with the same rows
        self.is_leader = self.dist.rank % self.group_size == 0
        self.environments: dict[str, EpisodeEnvironment] = {}
        self.parsers: dict[str, ToolCallParser] = {}  # by the names of the tools
        self.pending: list[tuple[Episode, Future[EpisodeStart | TurnResult] | None]] = []  # whose environment acts
        self.waiting: deque[Episode] = deque()  # episodes that have not started
        self.running: dict[str, Episode] = {}  # episodes that are not finished, by request
        self.encoded: dict[str, list[int]] = {}  # tokens of prompts
        self.deferred = DeferredError()

    def run(self, episodes: Iterable[Episode]) -> list[Rollout]:
        """Rollouts of all episodes, in their order."""
        episodes = list(episodes)
        num_workers = 1 if self.config is None else self.config.num_workers
        with ThreadPoolExecutor(num_workers) as self.pool, ExitStack() as stack:
            stack.callback(self.close_environments)
            self.waiting.extend(episodes)
            self.deferred(self.admit)
            wait(self.futures)  # equal prompts enter the cache together
            is_running, is_pending = self.any_rank(bool(self.running), bool(self.pending))
            while is_running:
                wait_seconds = WAIT_SECONDS
                if self.engine.has_unfinished_requests:
                    outputs, wait_seconds = self.engine.step(), 0.0
                    self.deferred(partial(self.add_outputs, outputs))
                if is_pending:
                    self.collect(wait_seconds)
                self.deferred(self.admit)
                is_running, is_pending = self.any_rank(bool(self.running), bool(self.pending))
        return [episode.to_rollout() for episode in episodes]

    def any_rank(self, *values: bool) -> list[bool]:
        """Whether each value is true on a rank that must call the engine together with this one.

        Raises the UserError of any of these ranks. Those of a tensor parallel group have the same values and errors.
        """
        is_shared = self.engine.is_sharded or self.group_size > 1
        if not is_shared or self.dist.dims.is_tensor_parallel_only:
            self.deferred.raise_error()
            return [*values]
        has_error, *maxima = self.dist.max_over_ranks(self.deferred.error is not None, *values)
        if has_error:
            self.dist.run_on_all(self.deferred.raise_error)
        return [*map(bool, maxima)]

    # Start and end

    def admit(self) -> None:
        """Start waiting episodes."""
        limit = len(self.waiting) if self.config is None else self.engine.max_num_seqs - len(self.running)
        for _ in range(min(limit, len(self.waiting))):
            episode = self.waiting.popleft()
            self.running[episode.request_id] = episode
            if self.config is None:
                self.engine.add_request(self.make_request(episode))
            else:
                self.submit(episode, partial(self.open_environment, self.config, episode))

    def open_environment(self, config: EnvironmentConfig, episode: Episode) -> EpisodeStart:
        """Start an environment. Runs in a thread."""
        environment = EpisodeEnvironment(config, episode.prompt)
        self.environments[episode.request_id] = environment
        return environment.reset()

    def close_environments(self) -> None:
        """Close the environments that are still open after an error, when no thread uses them any more."""
        for future in self.futures:
            future.cancel()
        wait(self.futures)
        list(self.pool.map(EpisodeEnvironment.discard, self.environments.values()))

    def begin(self, episode: Episode, start: EpisodeStart) -> None:
        """Request the first answer to a prompt with the text and the tools of the environment."""
        key = repr((start.messages, start.tools))
        if key not in self.encoded:
            self.encoded[key] = self.encode_prompt(episode, list(start.messages), start.tools)
        tokens = self.encoded[key]
        episode.prompt = replace(episode.prompt, messages=start.messages, tools=start.tools, tokens=tokens)
        self.engine.add_request(self.make_request(episode))

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
            sample_name=episode.sample_name,
        )

    # Turns

    def add_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        """Add sampled tokens to their episodes."""
        for output in outputs:
            episode = self.running[output.request_id]
            episode.add(output.token, output.logprob)
            if output.finish_reason is not None:
                self.end_answer(episode, output.finish_reason == "length")

    def end_answer(self, episode: Episode, is_cut: bool) -> None:
        """Parse a finished answer, and let the environment act on it."""
        episode.num_turns += 1
        message, error = self.parse(episode)
        episode.messages.append(message)
        calls = message.get("tool_calls", ())
        if self.config is None:
            episode.finish_reason = "length" if is_cut else "stop"
            self.remove(episode)
            return
        episode.num_tool_iterations += bool(calls or error)
        episode.num_tool_calls += len(calls)
        episode.num_failures += error is not None
        if is_cut or self.exceeds_turns(episode, bool(calls or error)):
            episode.finish_reason = "length"
        self.submit(episode, partial(self.act, episode, message, error))

    def remove(self, episode: Episode) -> None:
        """Remove an episode that has ended."""
        del self.running[episode.request_id]
        if self.progress is not None:
            self.progress.update()

    def submit(self, episode: Episode, function: Callable[[], EpisodeStart | TurnResult]) -> None:
        """Let the environment of an episode act in a thread, on the first rank with this row."""
        self.pending.append((episode, self.pool.submit(function) if self.is_leader else None))

    @property
    def futures(self) -> list[Future[EpisodeStart | TurnResult]]:
        """Futures of the pending episodes on this rank."""
        return [future for _, future in self.pending if future is not None]

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
            wait(self.futures, wait_seconds, FIRST_COMPLETED)
        finished = [(episode, future) for episode, future in self.pending if future is not None and future.done()]
        self.pending = [item for item in self.pending if item not in finished]
        for episode, future in finished:
            self.deferred(lambda episode=episode, future=future: self.continue_episode(episode, future.result()))

    def collect_in_group(self) -> None:
        """Wait for all environments of the first rank with these rows. Collective."""
        ranks = self.dist.gather_results(lambda: [future.result() for future in self.futures])
        pending, self.pending = self.pending, []
        for (episode, _), result in zip(
            pending, ranks[self.dist.rank // self.group_size * self.group_size], strict=True
        ):
            self.deferred(partial(self.continue_episode, episode, result))

    def continue_episode(self, episode: Episode, result: EpisodeStart | TurnResult) -> None:
        """Start the episode, append what the environment said, or end the episode."""
        if isinstance(result, EpisodeStart):
            self.begin(episode, result)
            return
        episode.num_failures += result.num_failures
        if result.messages:
            if not self.append(episode, result.messages):  # no space for another answer
                episode.finish_reason = "length"
                self.submit(episode, partial(self.act, episode, {}, None))
            return
        episode.reward, episode.metrics = result.reward, result.metrics
        episode.finish_reason = episode.finish_reason or "stop"
        self.engine.abort(episode.request_id)
        self.remove(episode)
        if (environment := self.environments.pop(episode.request_id, None)) is not None:
            episode.environment = environment.environment

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
            raise UserError(f"environment: {error}. Set chat_template to a template that renders them.") from None
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
    with closing(config.create()) as environment:
        tools = get_tool_schemas(environment) or None
    rewrites = ", ".join(name for name in find_rewrites(tokenizer, tools) if name != "whitespace")
    return rewrites and (
        f"{tokenizer.template(tools).name}: the chat template rewrites earlier turns ({rewrites}). Episodes keep the "
        "sampled tokens; a server that renders the conversation again shows the model another text"
    )
