"""A reward function written for TRL scores and logs the same here and in TRL's GRPOTrainer."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers
from trl import GRPOConfig, GRPOTrainer

from tunekit.assets import BUNDLED
from tunekit.cli import main as cli
from tunekit.config.user_code import load_attribute
from tunekit.rewards.base import check_rewards, score_rollouts
from tunekit.rewards.context import RewardContext, TrainerState
from tunekit.rewards.user_function import UserFunction
from tunekit.rollouts.rollout import PromptRow, Rollout

FUNCTION = """\
calls = []

def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]

def score(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **kwargs):
    assert "environments" not in kwargs and callable(log_metric)
    lengths = [len(text(completion)) for completion in completions]
    log_metric("mean_characters", sum(lengths) / len(lengths))
    log_metric("answers", 1.0)
    log_extra("characters", lengths)
    scale = 1 + trainer_state.global_step / trainer_state.max_steps
    scores = [None if a == "skip" else scale * n / 10 for a, n in zip(answer, lengths)]
    calls.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "answer": answer,
                  "step": trainer_state.global_step, "epoch": trainer_state.epoch, "scores": scores,
                  "names": sorted(kwargs)})
    return scores

async def score_async(prompts, completions, environments=None, **kwargs):
    return score(prompts, completions, **kwargs)
"""
ROWS = [{"answer": "skip" if n == 1 else str(n)} for n in range(4)]
PROMPTS = {
    "chat": [[{"role": "user", "content": f"What is {n} plus 3?"}] for n in range(4)],
    "text": [f"{n} plus 3" for n in range(4)],
}


def run_trl(path: Path, function: Any, rows: list[dict[str, Any]]) -> GRPOTrainer:
    """Two optimizer steps of two prompts with two answers each."""
    args = GRPOConfig(
        output_dir=str(path), max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=6,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", beta=0.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / "model"),
        reward_funcs=function,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(BUNDLED / "model"),
    )
    trainer.train()
    return trainer


def to_rollout(prompt: Any, completion: Any, ids: list[int], answer: str) -> Rollout:
    """The rollout whose answer TRL sampled."""
    text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if text else prompt
    answers = [{"role": "assistant", "content": completion}] if text else completion
    row = PromptRow("rows.jsonl:1", messages, [1], {"answer": answer}, is_text=text)
    size = len(ids) + 1
    mask, logps = np.arange(size) > 0, np.zeros(size, np.float32)
    return Rollout(row, 0, np.array([1, *ids], np.int32), mask, logps, "stop", answers)


@pytest.mark.parametrize(("kind", "name"), [("text", "score"), ("chat", "score_async")])
def test_function_of_trl_works_unchanged(tmp_path: Path, kind: str, name: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTION)
    reference = f"{file}:{name}"
    calls = load_attribute(f"{file}:calls", "function")
    rows = [{"prompt": prompt, **row} for prompt, row in zip(PROMPTS[kind], ROWS, strict=True)]
    trainer = run_trl(tmp_path / "trl", load_attribute(reference, "function"), rows)
    extra = list(trainer._logs["extra"]["characters"])
    assert len(calls) == 2
    ours: list[Any] = []
    reward = UserFunction(reference)
    check_rewards([reward], ["prompt", "answer"])
    for call in list(calls):
        columns = (call["prompts"], call["completions"], call["completion_ids"], call["answer"])
        rollouts = [to_rollout(*values) for values in zip(*columns, strict=True)]
        context = RewardContext(TrainerState(call["step"], 2, call["epoch"]))
        scores = score_rollouts([reward], rollouts, context).squeeze(1).tolist()
        assert calls[-1] == call  # the function received the same
        assert scores == pytest.approx([np.nan if x is None else x for x in call["scores"]], nan_ok=True)
        line = trainer.state.log_history[call["step"]]
        assert context.metrics["mean_characters"] == pytest.approx([line["mean_characters"]])
        ours += context.columns["characters"]
    assert ours[-len(extra) :] == extra


def test_logs_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and columns that a function logs are in the files of the run, on a schedule that it reads."""
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(FUNCTION)
    rows = [{"prompt": PROMPTS["chat"][n], **ROWS[n]} for n in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        "data.source=rows.jsonl", "eval_data=null", "rewards=[{kind: function, function: rewards.py:score}]",
        "global_batch_size=4", "num_generations=2", "max_steps=2", "output_dir=out", "sampling.max_new_tokens=6",
    )  # fmt: skip
    assert cli.main(["run", "grpo", "nano/grpo", *overrides]) == 0
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()]
    for step in (1, 2):
        lengths = [len(row["completion"]) for row in answers if row["step"] == step]
        assert [row["characters"] for row in answers if row["step"] == step] == lengths
        line = next(line for line in lines if line["step"] == step)
        assert line["mean_characters"] == pytest.approx(sum(lengths) / 4) and line["answers"] == 1
    calls = load_attribute("rewards.py:calls", "function")
    assert [(call["step"], call["epoch"]) for call in calls] == [(0, 0.0), (1, 0.5)]
