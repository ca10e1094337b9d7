"""Rejection sampling: rows of the best answers train `sft`, pairs of the best and the worst ones train `preference`."""

import json
from collections import defaultdict
from typing import Any

import pytest

ROWS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in ((1, 2), (3, 4), (5, 2), (4, 4))]
OPTIONS = (
    "device=cpu",
    "precision={compute_dtype: fp32}",
    "source=rows.jsonl",
    "split=train",
    "num_return_sequences=6",
    "sampling={temperature: 2.0, top_k: 20, max_new_tokens: 30}",
    "rewards=[{kind: numeric_match}, {kind: length, max_tokens: 12, weight: 0.5}]",
)


@pytest.fixture
def generate(workspace):
    """Function that samples answers with some options. Returns its result and the rows of the output file."""
    (workspace.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (workspace.folder / "env.py").write_text("class NoReward:\n    pass\n")

    def call(*args: str) -> tuple[Any, list[dict]]:
        path = workspace.folder / "out.jsonl"
        path.unlink(missing_ok=True)
        options = (*OPTIONS, "output_path=out.jsonl", *args)
        result = workspace.run_tune("run", "generate", "nano/rejection_sampling", *options)
        return result, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return call


def by_prompt(rows):
    """Rewards of the answers to each prompt."""
    rewards = defaultdict(list)
    for row in rows:
        rewards[row["prompt"][-1]["content"]].append(row["reward"])
    return rewards


def test_rows_are_the_best_of_all_answers(generate, workspace):
    result, answers = generate("output_format=answers")
    assert result.code == 0 and len(answers) == 24, result.err
    assert all(
        row["reward"] == sum(w * row["rewards"][n] for n, w in (("numeric_match", 1), ("length", 0.5)))
        for row in answers
    )
    rewards = by_prompt(answers)
    _, best = generate("output_format=sft")
    assert {row["messages"][0]["content"]: row["reward"] for row in best} == {p: max(r) for p, r in rewards.items()}
    assert [row["messages"][0]["content"] for row in best] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize(
    ("output_format", "recipe", "config"), [("sft", "sft", "nano/chat"), ("preference", "preference", "nano/dpo")]
)
def test_rows_are_trained(generate, workspace, output_format, recipe, config):
    generate(f"output_format={output_format}")
    data = "chat" if recipe == "sft" else "preference"
    result = workspace.run_tune(
        "run", recipe, config, "device=cpu", "model=tunekit/nano", f"data={{kind: {data}, source: out.jsonl}}",
        "eval_data=null", "max_steps=1", "global_batch_size=2", "micro_batch_size=2", "output_dir=run",
    )  # fmt: skip
    assert result.code == 0 and (workspace.folder / "run/final").exists(), result.err


def test_environments_give_rewards_and_turns(generate, workspace):
    (workspace.folder / "rows.jsonl").write_text('{"prompt": "Which way?", "grid": ["S.", ".G"]}\n')
    result, rows = generate(
        "output_format=answers",
        "rewards=[]",
        "environment={kind: grid_world, max_turns: 3}",
        "num_return_sequences=2",
        "sampling.max_new_tokens=300",
        "episodes_path=episodes.jsonl",
    )
    assert result.code == 0 and len(rows) == 2, result.err
    assert all(row["rewards"] == {"environment": row["reward"]} for row in rows)
    records = [json.loads(line) for line in (workspace.folder / "episodes.jsonl").read_text().splitlines()]
    assert [record["messages"] for record in records] == [row["messages"] for row in rows]
    assert [message["role"] for message in rows[0]["messages"]][:2] == ["assistant", "user"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("rewards=[]",), "output_format"),
        (("rewards=[]", "environment=env.py:NoReward"), "get_reward"),
        (("output_format=preference", "num_return_sequences=1"), "num_return_sequences"),
        (("output_path=null",), "output_path"),
        (("min_reward=9",), "min_reward"),
        (("rewards=[{kind: exact_match, column: solution}]",), "rewards.0.column"),
        (("rewards=[{kind: function, function: missing.py:f}]",), "missing.py"),
        (("environment={kind: custom, environment_factory: missing.py:Env}",), "missing.py"),
        (("sampling.max_new_tokens=1",), "max_new_tokens"),
    ],
)
def test_mistakes_give_one_line(generate, args, message):
    result, rows = generate(*args)
    assert result.code == 2 and message in result.err and len(result.err.splitlines()) == 1 and not rows, result.err
