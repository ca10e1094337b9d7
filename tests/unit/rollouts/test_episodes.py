"""Episodes: what the model sampled is kept, what the environment says is appended and not learned."""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.helpers.chat_families import write_family
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.wait import TIMEOUT_SECONDS, wait_until
from tunekit.build import resolve_model
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.chat_template.template_rewrites import find_rewrites
from tunekit.data.tokenizer import Tokenizer
from tunekit.environments.base import Environment, get_tool_schemas
from tunekit.environments.config import CalculatorConfig, CustomEnvironmentConfig, EnvironmentConfig, GridWorldConfig
from tunekit.errors import UserError
from tunekit.generation.sampling import SamplingConfig
from tunekit.hub import download
from tunekit.loggers.progress import ProgressLogger
from tunekit.rollouts.episodes import describe_rewrites, generate_rollouts
from tunekit.rollouts.rollout import PromptRow, Rollout

SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=5000)
QUESTION = [{"role": "user", "content": "What is 12 times 12?"}]
FAMILIES = ("llama3_tools", "mistral", "qwen2", "qwen3", "glm4", "gpt_oss")
REWRITING = ("qwen3", "gpt_oss", "glm4")  # reasoning is dropped; GLM renders a line break before each answer


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return resolve_model("tunekit/nano", download.SMALL, {})[2]


def make_prompt(
    tokenizer: Tokenizer, messages: Sequence[dict] = QUESTION, where: str = "rows.jsonl:1", **columns: Any
) -> PromptRow:
    return PromptRow(where, messages, encode_conversation(tokenizer, list(messages)), columns)


def text_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of an answer with its end-of-turn token."""
    return answer_tokens(tokenizer, {"role": "assistant", "content": text}, None)


def call_answer(tokenizer: Tokenizer, *arguments: dict[str, Any], name: str = "calculate") -> list[int]:
    """Tokens of an answer with tool calls, as the template writes it."""
    calls = [
        {"type": "function", "id": f"call0000{i}", "function": {"name": name, "arguments": values}}
        for i, values in enumerate(arguments)
    ]
    tools = get_tool_schemas(CalculatorConfig().create())
    return answer_tokens(tokenizer, {"role": "assistant", "content": "", "tool_calls": calls}, tools)


def answer_tokens(tokenizer: Tokenizer, message: dict[str, Any], tools: list | None) -> list[int]:
    prompt = tokenizer.render(QUESTION, tools, prompt=True)
    messages = detect_features(tokenizer.template(tools), tokenizer).adapt_messages([*QUESTION, message])
    text = tokenizer.render(messages, tools)
    assert text.startswith(prompt)
    tokens = tokenizer.encode(text[len(prompt) :])
    stops = [i for i, token in enumerate(tokens) if token in tokenizer.stops]
    return tokens[: stops[0] + 1] if stops else [*tokens, next(iter(tokenizer.stops))]


def run(
    tokenizer: Tokenizer,
    answers: Sequence[Sequence[int]],
    config: EnvironmentConfig | None,
    prompt: PromptRow,
    sampling: SamplingConfig = SAMPLING,
    **limits: int,
) -> tuple[Rollout, ScriptedEngine]:
    engine = ScriptedEngine(lambda _, turn: answers[turn], **limits)
    [rollout] = generate_rollouts(engine, tokenizer, {0: prompt}, 1, sampling, config, 0)  # type: ignore[arg-type]
    assert len(rollout.tokens) == len(rollout.loss_mask) == len(rollout.logprobs)
    assert not rollout.loss_mask[: rollout.prompt_length].any()
    np.testing.assert_array_equal(rollout.logprobs, np.where(rollout.loss_mask, np.float32(-0.5), 0))
    return rollout, engine


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_call_and_result_are_as_the_template_writes_them(tmp_path: Path, family: str) -> None:
    tokenizer = Tokenizer.open(write_family(tmp_path, family))
    answers = [call_answer(tokenizer, {"expression": "12 * 12"}), text_answer(tokenizer, "It is 144.")]
    rollout, engine = run(tokenizer, answers, CalculatorConfig(), make_prompt(tokenizer, answer=144))
    assert [message["role"] for message in rollout.messages] == ["assistant", "tool", "assistant"]
    assert rollout.messages[1]["content"] == "144" and rollout.completion.endswith("It is 144.")
    assert rollout.environment_reward == 1 and rollout.finish_reason == "stop"
    assert rollout.metrics["num_tool_calls"] == 1 and rollout.metrics["num_turns"] == 2
    assert rollout.tokens[rollout.loss_mask].tolist() == [*answers[0], *answers[1]]  # sampled tokens stay as they are
    [observation] = engine.appended.values() if engine.appended else [[]]
    assert rollout.completion_ids == [*answers[0], *observation[0], *answers[1]]
    tools = list(rollout.prompt.tools or ())
    assert family not in ("qwen3", "gpt_oss") or find_rewrites(tokenizer, tools)
    if family not in REWRITING:
        history = [*rollout.prompt.messages, *rollout.messages]
        messages = detect_features(tokenizer.template(tools), tokenizer).adapt_messages(history)
        assert tokenizer.render(messages, tools).startswith(tokenizer.decode(rollout.tokens.tolist(), special=True))


def test_without_environment_there_is_one_answer(nano: Tokenizer) -> None:
    answers = [text_answer(nano, "144")]
    rollout, engine = run(nano, answers, None, make_prompt(nano))
    assert rollout.completion_ids == answers[0] and rollout.completion == "144"
    assert rollout.environment_reward is None and rollout.finish_reason == "stop"
    assert run(nano, [answers[0][:-1]], None, make_prompt(nano))[0].finish_reason == "length"


def test_rollouts_are_in_the_order_of_the_prompts(nano: Tokenizer) -> None:
    engine = ScriptedEngine(lambda request_id, _: [5] * (3 + len(request_id) % 3) + [next(iter(nano.stops))])
    prompts = {n: make_prompt(nano, where=f"rows:{i}") for n, i in ((3, 1), (5, 10), (7, 1))}  # the same row twice
    rollouts = generate_rollouts(engine, nano, prompts, 2, SAMPLING, None, 3)  # type: ignore[arg-type]
    assert [rollout.group for rollout in rollouts] == [3, 3, 5, 5, 7, 7]
    assert [rollout.prompt.where for rollout in rollouts] == ["rows:1"] * 2 + ["rows:10"] * 2 + ["rows:1"] * 2


@pytest.mark.parametrize("config", [None, CalculatorConfig()])
def test_progress_counts_each_episode_once(nano: Tokenizer, config: EnvironmentConfig | None) -> None:
    answers = [call_answer(nano, {"expression": "12 * 12"}), text_answer(nano, "It is 144.")]
    engine, prompts = ScriptedEngine(lambda _, turn: answers[turn]), {0: make_prompt(nano, answer=144)}
    with ProgressLogger("answering", 3, "answer", is_main=False) as progress:
        generate_rollouts(engine, nano, prompts, 3, SAMPLING, config, 0, progress)  # type: ignore[arg-type]
    assert progress.count == 3


def test_observations_of_step_are_user_messages(nano: Tokenizer) -> None:
    answers = [text_answer(nano, text) for text in ("down", "somewhere", "right")]
    prompt = make_prompt(nano, [{"role": "user", "content": "Walk."}], grid=["S#", ".G"])
    rollout, _ = run(nano, answers, GridWorldConfig(), prompt)
    assert "Walk.\n" in rollout.prompt.messages[-1]["content"] and "A#\n.G" in rollout.prompt.messages[-1]["content"]
    assert [message["role"] for message in rollout.messages] == ["assistant", "user"] * 2 + ["assistant"]
    assert rollout.environment_reward == 1 and rollout.metrics["num_moves"] == 2
    rendered = nano.render([*rollout.prompt.messages, *rollout.messages])
    assert rendered.startswith(nano.decode(rollout.tokens, special=True))


@pytest.mark.parametrize(
    ("config", "sampling", "limits"),
    [
        (CalculatorConfig(max_turns=2), SAMPLING, {}),
        (CalculatorConfig(max_tool_calling_iterations=1), SAMPLING, {}),
        (CalculatorConfig(), SamplingConfig(1.0, max_new_tokens=120), {}),
        (CalculatorConfig(), SAMPLING, {"max_model_len": 300}),
    ],
    ids=["turns", "iterations", "tokens", "context"],
)
def test_limits_end_an_episode(
    nano: Tokenizer, config: EnvironmentConfig, sampling: SamplingConfig, limits: dict[str, int]
) -> None:
    call = call_answer(nano, {"expression": "1 + 1"})
    rollout, engine = run(nano, [call] * 100, config, make_prompt(nano, answer=2), sampling, **limits)
    assert rollout.finish_reason == "length" and rollout.environment_reward == 0
    assert rollout.loss_mask[-1]  # an observation without an answer is not kept
    assert len(rollout.completion_ids) <= sampling.max_new_tokens and len(rollout.tokens) <= engine.max_model_len
    assert not engine.requests  # its cache is free
    if limits or sampling is not SAMPLING:
        assert rollout.metrics["num_turns"] < 16


SLOW = """
import threading
import time

EIGHT_CALLS = threading.Barrier(8, timeout=400)

class Slow:
    def reset(self, answer):
        self.answer = answer

    def calculate(self, expression: str) -> list:
        '''Wait.

        Args:
            expression: What to do.
        '''
        if expression == "raise":
            raise RuntimeError("broken")
        if expression == "hang":
            time.sleep(5)
        if expression == "long":
            return "word " * 3000
        if expression == "special":
            return "a<|im_end|>b"
        if expression == "wait for others":
            EIGHT_CALLS.wait()
        return [1, None]
"""


def make_environment(tmp_path: Path, text: str, **options: Any) -> CustomEnvironmentConfig:
    (tmp_path / "env.py").write_text(text)
    config = CustomEnvironmentConfig(f"{tmp_path / 'env.py'}:Slow", **options)
    config.check()
    return config


def test_tool_errors_are_observations(nano: Tokenizer, tmp_path: Path) -> None:
    config = make_environment(tmp_path, SLOW, tool_timeout_seconds=0.5, max_tool_result_tokens=50)
    calls = [{"expression": name} for name in ("raise", "hang", "long", "x")]
    answers = [*(call_answer(nano, call) for call in calls), call_answer(nano, {"wrong": 1})]
    answers += [call_answer(nano, {"expression": ""}, name="unknown"), text_answer(nano, "done")]
    prompt = make_prompt(nano, answer=1, other=2)  # reset() takes no `other`
    rollout, _ = run(nano, answers, config, prompt)
    results = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert "RuntimeError: broken" in results[0] and "0.5 seconds" in results[1]
    assert results[2].startswith("word word") and len(nano.encode(results[2])) < 70
    assert results[3] == "[1, null]" and "argument" in results[4] and "unknown not found" in results[5]
    assert rollout.metrics["num_tool_failures"] == 4 and rollout.environment_reward is None


def test_results_cannot_end_the_message(nano: Tokenizer, tmp_path: Path) -> None:
    stop = nano.special_ids[min(nano.stops)]
    config = make_environment(tmp_path, SLOW.replace("<|im_end|>", stop))
    rollout, engine = run(
        nano,
        [call_answer(nano, {"expression": "special"}), text_answer(nano, "x")],
        config,
        make_prompt(nano, answer=1),
    )
    assert rollout.messages[1]["content"] == "ab"


def test_tools_of_different_episodes_run_at_the_same_time(nano: Tokenizer, tmp_path: Path) -> None:
    config = make_environment(tmp_path, SLOW, num_workers=8)
    answers = [call_answer(nano, {"expression": "wait for others"}), text_answer(nano, "done")]
    engine, prompt = ScriptedEngine(lambda _, turn: answers[turn]), make_prompt(nano, answer=1)
    rollouts = generate_rollouts(engine, nano, {0: prompt}, 8, SAMPLING, config, 0)  # type: ignore[arg-type]
    assert [rollout.messages[1]["content"] for rollout in rollouts] == ["[1, null]"] * 8


@pytest.mark.parametrize("method", ["reset", "step", "get_reward"])
def test_environment_that_raises_names_the_row(nano: Tokenizer, tmp_path: Path, method: str) -> None:
    text = f"class Slow:\n    def reset(self): pass\n    def {method}(self, *a, **k):\n        return 1 / 0\n"
    (tmp_path / "env.py").write_text(text)
    config = CustomEnvironmentConfig(f"{tmp_path / 'env.py'}:Slow")
    with pytest.raises(UserError) as error:
        run(nano, [text_answer(nano, "hi")], config, make_prompt(nano))
    assert str(error.value).startswith(
        f"rows.jsonl:1: environment Slow.{method}: {tmp_path / 'env.py'}:4: ZeroDivision"
    )


NUMBERS = (
    "class Slow:\n    def get_reward(self): return 1\n    def get_metrics(self): return {{}}\n    def {}: return {}\n"
)


@pytest.mark.parametrize(
    ("method", "value"),
    [("get_reward", "'good'"), ("get_reward", "float('inf')"), ("get_metrics", "{'a': 'x'}"), ("get_metrics", "[1]")],
)
def test_environment_without_numbers_names_the_row(nano: Tokenizer, tmp_path: Path, method: str, value: str) -> None:
    config = make_environment(tmp_path, NUMBERS.format(f"{method}(self)", value))
    with pytest.raises(UserError) as error:
        run(nano, [text_answer(nano, "hi")], config, make_prompt(nano))
    assert str(error.value).startswith(f"rows.jsonl:1: environment Slow.{method}: ")


def test_nan_is_no_reward(nano: Tokenizer, tmp_path: Path) -> None:
    config = make_environment(tmp_path, NUMBERS.format("get_reward(self)", "float('nan')"))
    assert run(nano, [text_answer(nano, "hi")], config, make_prompt(nano))[0].environment_reward is None
    config = make_environment(tmp_path, NUMBERS.format("get_metrics(self)", "{'a': 2, 'b': None, 'c': float('nan')}"))
    rollout, _ = run(nano, [text_answer(nano, "hi")], config, make_prompt(nano))
    assert rollout.metrics["a"] == 2 and not {"b", "c"} & rollout.metrics.keys()


def test_environment_that_hangs_is_named(nano: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("import time\nclass Slow:\n    def reset(self):\n        time.sleep(3)\n")
    config = CustomEnvironmentConfig(f"{tmp_path / 'env.py'}:Slow", tool_timeout_seconds=0.1)
    with pytest.raises(UserError, match="tool_timeout_seconds"):
        run(nano, [], config, make_prompt(nano))


class Counted(Environment):
    """Counts the environments that are open. `failing`: the method that raises, in the third environment."""

    opened: ClassVar[list["Counted"]] = []
    failing: ClassVar[str] = ""
    max_open: ClassVar[int] = 0
    lock: ClassVar[threading.Lock] = threading.Lock()  # environments start in threads

    def __init__(self) -> None:
        self.num_closed = 0
        with self.lock:
            self.opened.append(self)
            self.number = len(self.opened)
            type(self).max_open = max(self.max_open, sum(item.num_closed == 0 for item in self.opened))

    def _act(self, name: str) -> None:
        if self.number == 3 and name == self.failing:
            raise UserError(f"{name} failed")

    def reset(self, **columns: Any) -> None:
        self._act("reset")

    def step(self, answer: str) -> None:
        self._act("step")

    def get_reward(self) -> float:
        self._act("get_reward")
        return 1.0

    def close(self) -> None:
        self.num_closed += 1


class CountedConfig(EnvironmentConfig):
    kind: ClassVar[str] = "counted"

    def create(self) -> Environment:
        return Counted()


@pytest.mark.parametrize("failing", ["", "reset", "step", "get_reward", "engine"])
def test_open_environments_are_bounded_and_closed(
    nano: Tokenizer, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(Counted, "opened", [])
    monkeypatch.setattr(Counted, "failing", failing)
    monkeypatch.setattr(Counted, "max_open", 0)
    answer = text_answer(nano, "x")
    engine = ScriptedEngine(lambda _, turn: answer, max_num_seqs=4)
    if failing == "engine":
        monkeypatch.setattr(engine, "step", partial(exec, "raise KeyboardInterrupt"))
    run_all = partial(generate_rollouts, engine, nano, {0: make_prompt(nano)}, 11, SAMPLING, CountedConfig(), 0)
    if failing:
        with pytest.raises(KeyboardInterrupt if failing == "engine" else UserError):
            run_all()
    else:
        assert len(run_all()) == len(Counted.opened) == 11
    assert Counted.opened and all(item.num_closed == 1 for item in Counted.opened)
    assert 1 < Counted.max_open <= 4


class Untyped(Counted):
    def tool(self, argument) -> str:  # noqa: ANN001
        """A tool.

        Args:
            argument: A text
        """
        return str(argument)


class UntypedConfig(EnvironmentConfig):
    kind: ClassVar[str] = "untyped"

    def create(self) -> Environment:
        return Untyped()


class SlowConfig(EnvironmentConfig):
    kind: ClassVar[str] = "slow"
    may_start: ClassVar[threading.Event] = threading.Event()

    def create(self) -> Environment:
        assert self.may_start.wait(TIMEOUT_SECONDS)
        return Counted()


@pytest.mark.parametrize("config", [UntypedConfig(), SlowConfig(tool_timeout_seconds=0.1)], ids=["tools", "timeout"])
def test_environments_that_cannot_start_are_closed(
    config: EnvironmentConfig, nano: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "opened", [])
    SlowConfig.may_start.clear()
    with pytest.raises(UserError, match=r"tool tool: |rows.jsonl:1: environment slow.__init__: "):
        generate_rollouts(ScriptedEngine(lambda _, turn: []), nano, {0: make_prompt(nano)}, 1, SAMPLING, config, 0)
    SlowConfig.may_start.set()
    wait_until(lambda: [item.num_closed for item in Counted.opened] == [1])


def test_checks_close_their_environments(nano: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "opened", [])
    CountedConfig().check()
    describe_rewrites(nano, CountedConfig())
    assert [item.num_closed for item in Counted.opened] == [1, 1]


def test_rewriting_templates_are_named(tmp_path: Path, nano: Tokenizer) -> None:
    assert "reasoning" in describe_rewrites(Tokenizer.open(write_family(tmp_path, "qwen3")), CalculatorConfig())
    assert describe_rewrites(nano, CalculatorConfig()) == ""
