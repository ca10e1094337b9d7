"""Scores of several rewards, errors of functions of the user, and columns that are checked before training."""

import asyncio
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.rollouts import make_rollout
from tunekit.errors import UserError
from tunekit.loggers.metrics_file import encode_line
from tunekit.policy.rollout_sampler import ScoredRollouts
from tunekit.rewards.answer_rewards import ExactMatch, Length
from tunekit.rewards.base import check_rewards, reward_names, score_answers, score_rollouts
from tunekit.rewards.context import RewardContext
from tunekit.rewards.rejection_sampling import select_rows
from tunekit.rewards.unit_tests import UnitTests
from tunekit.rewards.user_function import UserFunction

ROLLOUTS = [make_rollout("yes", 3, "a:1", answer="yes", level=1), make_rollout("no", 5, "a:2", answer="yes", level=2)]


def user_function(
    tmp_path: Path, body: str, parameters: str = "completions, **kwargs", start: str = "def"
) -> UserFunction:
    file = tmp_path / "reward.py"
    file.write_text(f"{start} score({parameters}):\n    {body}\n")
    return UserFunction(f"{file}:score")


def test_weighted_sum_ignores_rewards_that_do_not_apply(tmp_path: Path) -> None:
    function = user_function(tmp_path, "return [None, 4]")
    rewards = [ExactMatch(weight=2.0), function, Length(max_tokens=3, weight=0.5)]
    scores = score_rollouts(rewards, ROLLOUTS)
    assert math.isnan(scores[0, 1])
    torch.testing.assert_close(scores.nan_to_num(-1), torch.tensor([[1.0, -1, 1], [0, 4, 0]]))
    assert [item.reward for item in score_answers(rewards, ROLLOUTS, RewardContext())] == [2.5, 4.0]


def test_names_are_unique() -> None:
    assert reward_names([ExactMatch(), Length(), ExactMatch("b")]) == ["exact_match", "length", "exact_match_2"]


def test_function_gets_what_trl_passes(tmp_path: Path) -> None:
    checks = (
        "assert prompts[0] == [{'role': 'user', 'content': 'question'}]; "
        "assert completions[1] == [{'role': 'assistant', 'content': 'no'}]; "
        "assert completion_ids == [[2, 3, 4], [2, 3, 4, 5, 6]]; "
    )
    body = checks + "return [float(value) for value in level]"
    for start in ("def", "async def"):
        function = user_function(tmp_path, body, "prompts, completions, completion_ids, level", start)
        assert score_rollouts([function], ROLLOUTS).tolist() == [[1], [2]]


def test_async_functions_run_at_the_same_time_also_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three waits until all have started. A notebook runs code inside an event loop."""
    body = "import sys, asyncio; sys.started.append(1)\n"
    body += "    for _ in range(1000):\n        if len(sys.started) < 3: await asyncio.sleep(0.01)\n"
    body += "    log_metric('number', len(sys.started)); return [1.0, 2.0]"
    functions = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        functions.append(user_function(tmp_path / name, body, "log_metric, **columns", "async def"))

    async def cell() -> RewardContext:
        context = RewardContext()
        assert score_rollouts([*functions, Length()], ROLLOUTS, context)[:, :3].tolist() == [[1, 1, 1], [2, 2, 2]]
        return context

    monkeypatch.setattr(sys, "started", [], raising=False)
    context = asyncio.run(cell())
    assert context.metrics == {"number": [3.0, 3.0, 3.0]}


@pytest.mark.parametrize(
    ("body", "row"),
    [
        ("return [1 / (len(c[0]['content']) - 2) for c in completions]", "a:2"),
        ("return [1.0]", "a:1"),
        ("return 3", "a:1"),
        ("return ['good', 1]", "a:1"),
        ("return [0, float('inf')]", "a:2"),
        ("import sys; return [sys.exit(3) if c[0]['content'] == 'no' else 0 for c in completions]", "a:2"),
        ("return [not_defined for c in completions]", "a:1"),
        ("raise GeneratorExit", "a:1"),
        ("raise type('Mine', (BaseException,), {})()", "a:1"),
        ("import os; os.chdir('/'); return [0, 1]", "a:1"),
        ("return [0, 10**400]", "a:2"),
        ("return [0, 10**5000]", "a:2"),
        ("return [0, 1e300]", "a:2"),
        ("from decimal import Decimal; return [0, Decimal('1e400')]", "a:2"),
        ("from fractions import Fraction; return [0, Fraction(10**400)]", "a:2"),
        ("return [0, 1j]", "a:2"),
        ("return [0, [[1.0]]]", "a:2"),
        ("import torch; return [0, torch.zeros(2)]", "a:2"),
        ("import torch; return [0, torch.zeros(1, device='meta')]", "a:2"),
        ("import torch; return [0, torch.tensor(1j)]", "a:2"),
        ("import numpy; return [0, numpy.longdouble('1e4000')]", "a:2"),
        ("import numpy; return numpy.array(['a', 'b'])", "a:1"),
        ("log_metric('x', 10**400); return [0, 1]", "log_metric"),
    ],
)
def test_bad_function_names_reward_and_row(tmp_path: Path, body: str, row: str) -> None:
    with pytest.raises(UserError) as error:
        score_rollouts([Length(), user_function(tmp_path, body, "completions, log_metric, **kwargs")], ROLLOUTS)
    message = str(error.value)
    start = row if row == "log_metric" else f"{row}: rewards.1 (score)"
    assert message.startswith(start) and "\n" not in message
    for code, name in (("1 /", "ZeroDivisionError"), ("exit", "SystemExit")):
        assert code not in body or f"{tmp_path / 'reward.py'}:2: {name}" in message


def test_numbers_of_all_libraries_are_scores(tmp_path: Path) -> None:
    imports = "import numpy, torch; from decimal import Decimal; from fractions import Fraction; "
    values = (
        "torch.tensor(0.5, requires_grad=True), numpy.float16(0.5), numpy.array([0.5]), Decimal('0.5'), Fraction(1, 2)"
    )
    values += ", torch.tensor([True]), numpy.int64(1), numpy.bool_(True), True, 10**30, None, Decimal('NaN')"
    function = user_function(tmp_path, f"{imports}return [{values}]")
    scores = score_rollouts([function], [ROLLOUTS[0]] * 12)[:, 0].tolist()
    assert scores[:9] == [0.5] * 5 + [1] * 4 and scores[9] == pytest.approx(1e30) and all(map(math.isnan, scores[10:]))


def test_logged_columns_without_finite_values_are_json() -> None:
    context, nan, inf = RewardContext(), float("nan"), float("inf")
    context.log_extra("x", [nan, [1.0, {"a": (inf, 2)}], torch.tensor([nan, 3.0]), np.float32(-inf), {3: nan}])
    plain = [None, [1.0, {"a": [None, 2]}], [None, 3.0], None, {"3": None}]
    assert context.columns == {"x": plain}
    assert json.loads(encode_line(1, context.columns)) == {"step": 1, "x": plain}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("log_metric('reward', 1.0)", "reward"),
        ("log_metric('loss', 1.0)", "loss"),
        ("log_extra('step', [1, 2])", "step"),
        ("log_extra('completion', ['a', 'b'])", "completion"),
        ("log_extra('length', [3, 4])", "length"),  # the other reward
    ],
)
def test_names_of_the_run_cannot_be_logged(tmp_path: Path, call: str, name: str) -> None:
    function = user_function(tmp_path, f"{call}; return [0, 1]", "log_metric, log_extra")
    with pytest.raises(UserError, match=rf"^rewards\.1 \(score\): log_\w+: the run itself writes '{name}'\. "):
        score_rollouts([Length(), function], ROLLOUTS, RewardContext())
    context = RewardContext()
    body = "log_metric('rewards/mine', 3); log_extra('loss', [1, 2]); return [0, 1]"
    score_rollouts([user_function(tmp_path, body, "log_metric, log_extra")], ROLLOUTS, context)
    assert (context.metrics, context.columns) == ({"rewards/mine": [3.0]}, {"loss": [1, 2]})


def test_logged_metrics_do_not_replace_those_of_the_run() -> None:
    logged = {"rewards/length/mean": 9.0, "mine": 2.0}
    scored = ScoredRollouts(ROLLOUTS, torch.tensor([[1.0], [0.0]]), ["length"], torch.ones(1), logged, [{}, {}])
    assert (scored.metrics["rewards/length/mean"], scored.metrics["mine"]) == (0.5, 2.0)


def test_scored_answers_have_the_logged_columns(tmp_path: Path) -> None:
    body, parameters = "log_extra('n', [{}]); log_extra('reward_note', [0, 1]); return [0, 1]", "log_extra"
    scored = score_answers([user_function(tmp_path, body.format("3, 4"), parameters)], ROLLOUTS, RewardContext())
    rows = select_rows(scored, "answers", None, False)
    assert [(row["n"], row["reward_note"], row["answer"]) for row in rows] == [(3, 0, "yes"), (4, 1, "no")]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="column 'n' has 1 values for 2 answers"):
        score_answers([user_function(other, body.format("3"), parameters)], ROLLOUTS, RewardContext())


def test_missing_columns_are_found_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rewards\.1\.column"):
        check_rewards([Length(), ExactMatch("solution")], ["prompt", "answer"])
    needs_column = user_function(tmp_path, "return []", "completions, solution")
    with pytest.raises(UserError, match=r"rewards\.0\.function.*solution.*value\.$"):
        check_rewards([needs_column], ["prompt", "answer"])
    check_rewards([needs_column], ["prompt", "solution"])


@pytest.mark.parametrize("reference", ["missing.py:score", "reward.py:other", "reward.py", "math:sqrt", "reward.py:x"])
def test_missing_function_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("x = 3\n")
    with pytest.raises(UserError, match=reference.partition(":")[0]):
        check_rewards([UserFunction(reference)], [])


# Prints random texts that its own program contains, and ends without passing the tests
READ_SECRET = """
import os, re, sys
text, frame = "", sys._getframe()
while frame:
    text, frame = f"{text} {frame.f_locals} {frame.f_code.co_consts}", frame.f_back
try:
    os.lseek(0, 0, 0)
    text += os.read(0, 1 << 20).decode()
except OSError:
    pass
print(*re.findall("[0-9a-f]{32}", text), flush=True)
os._exit(0)
"""


def test_unit_tests_run_the_last_code_block() -> None:
    def score(answer: str, tests: object = ("assert double(2) == 4",)) -> float:
        return score_rollouts([UnitTests()], [make_rollout(answer, tests=list(tests))]).item()  # type: ignore[call-overload]

    good = "def double(x):\n    return 2 * x"
    assert score(f"First\n```python\nnothing\n```\nbut then\n```python\n{good}\n```\nDone.") == 1
    assert score(good) == 1
    assert score(good, ["assert double(2) == 4", "assert double(2) == 5"]) == 0
    assert score("```python\nimport sys\nsys.exit(0)\n```") == 0
    assert score("```python\nimport os\nos._exit(0)\n```") == 0
    assert score(READ_SECRET) == 0
    replaced = "import builtins\nold = compile\nbuiltins.compile = lambda *a, **k: old('pass', *a[1:], **k)"
    assert score(f"```python\n{replaced}\n```") == 0
    assert score(f"```python\nimport atexit\natexit.register(lambda: print('bye'))\n{good}\n```") == 1
    assert score(f"```python\ndef print(*values): pass\n{good}\n```") == 1
    assert score(good, ["import io, sys", "sys.stdout = io.StringIO()", "assert double(2) == 4"]) == 1
    body = READ_SECRET.replace("\n", "\n    ")
    assert score(f"def double(x):{body}") == 0
    assert score("```python\ndef double(x):\n    while True: pass\n```", ["import sys"]) == 1
