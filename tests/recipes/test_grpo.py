"""GRPO runs: config errors, exact resume in the middle of a generation, metrics, files, and drift."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.recipe_runs import SHARED_CONFIG, Workspace
from tests.recipes.test_resume import stop_after
from tunekit.loggers import metrics_file

CONFIG = """\
recipe: grpo
model: {model}
data: {{source: prompts.jsonl, max_length: 64}}
eval_data: {{source: prompts.jsonl, split: "train[:3]", max_length: 64}}
rewards: [{{kind: function, function: rewards.py:vowels}}, {{kind: length, max_tokens: 5, weight: 0.5}}]
optimizer: {{kind: adamw, lr: 1e-2}}
num_generations: 2
sampling: {{max_new_tokens: 6}}
max_steps: 6
"""
REWARDS = """\
def vowels(completions, start, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [None if first == "skip" else sum(c in "aeiou" for c in text) / 9 for text, first in zip(texts, start)]

def broken(completions, **kwargs):
    return [1 / (len(completions) - len(completions)) for _ in completions]

def turns(environments, completions, log_extra):
    log_extra("texts", [environment.answers for environment in environments])
    return [len(environment.answers) for environment in environments]

def missing(completions, **kwargs):
    return [float("nan")] * len(completions)

def wrong_column(completions, title):
    return [0.0] * len(completions)
"""
ENVIRONMENT = """\
class Again:
    def reset(self, **columns):
        self.answers = []

    def step(self, answer):
        self.answers.append(answer)
        return "Another answer, please" if len(self.answers) < 2 else None

    def get_reward(self):
        return sum(c in "aeiou" for answer in self.answers for c in answer) / 20

class NoReward:
    def reset(self, **columns):
        return None
"""
RUN = ("run", "grpo", "grpo.yaml")
OFF_POLICY = ("steps_per_generation=2", "num_iterations=2", "max_steps=9", "loss.beta=0.1")


@pytest.fixture
def grpo_workspace(workspace: Workspace) -> Workspace:
    """Workspace with `grpo.yaml`, prompts and reward functions."""
    rows = [{"prompt": f"Say {n} words", "start": "skip" if n == 3 else "a"} for n in range(9)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(REWARDS)
    Path("again.py").write_text(ENVIRONMENT)
    Path("grpo.yaml").write_text((CONFIG + SHARED_CONFIG).format(model=workspace.model))
    return workspace


@pytest.mark.parametrize(("changes", "message"), [
    (("num_generations=3",), "global_batch_size: must be a multiple of num_generations=3"),
    (("num_generations=1",), "num_generations: must be >= 2: dapo compares"),
    (("rewards=[]",), "rewards: needs a reward"),
    (("rewards=[{kind: exact_match}]",), "rewards.0.column: the rows have no column 'answer'"),
    (("rewards=[{kind: function, function: 'rewards.py:wrong_column'}]",), "has a parameter 'title'"),
    (("rewards=[{kind: function, function: 'rewards.py:absent'}]",), "rewards.0.function"),
    (("sampling.temperature=0",), "sampling.temperature: must be > 0"),
    (("sampling.max_new_tokens=64",), "data.max_length: must be more than sampling.max_new_tokens=64"),
    (("data.streaming=true",), "data.streaming: "),
    (("data.max_prompt_length=64",), "data.max_prompt_length: "),
    (("data.columns.prompt=question",), "prompts.jsonl:1: the row has no column 'question'"),
    (("reference=copy",), "reference: loss.beta=0 needs no reference"),
    (("loss.beta=0.1", "reference=disable_adapter"), "reference: disable_adapter: needs an adapter"),
    (("global_batch_size=64",), "data: has 9 prompts, but a step needs 32"),
    (("loss.top_entropy_quantile=0",), "loss.top_entropy_quantile: "),
    (("loss=ppo",), "loss: "),
    (("environment=again.py:Again", "data.prompt_format=text"), "data.prompt_format: must be auto or chat"),
    (("environment=again.py:NoReward", "rewards=[]"), "environment: NoReward has no method get_reward"),
])  # fmt: skip
def test_config_and_row_errors(grpo_workspace: Workspace, changes: tuple[str, ...], message: str) -> None:
    result = grpo_workspace.run_tune(*RUN, *changes)
    assert result.code == 2
    assert message in result.error, result.error
    assert not Path("out/metrics.jsonl").exists()


def test_environment_without_chat_template_is_refused(grpo_workspace: Workspace) -> None:
    """Before weights are loaded: the checkpoint has none."""
    shutil.copytree(grpo_workspace.model, "base", ignore=shutil.ignore_patterns("*.jinja"))
    args = ("model=base", "environment=again.py:Again", "eval_data=null")
    result = grpo_workspace.run_tune(*RUN, *args)
    assert result.code == 2 and "data: turns of an environment need a chat template. Set data." in result.error


def test_reward_that_raises_names_the_row(grpo_workspace: Workspace) -> None:
    result = grpo_workspace.run_tune(*RUN, "rewards=[{kind: function, function: 'rewards.py:broken'}]")
    assert result.code == 2
    assert "prompts.jsonl:" in result.error and "rewards.py:6" in result.error


def test_run_without_any_reward_stops(grpo_workspace: Workspace) -> None:
    result = grpo_workspace.run_tune(*RUN, "rewards=rewards.py:missing", "eval_data=null")
    assert result.code == 2 and "rewards: no answer has a reward: missing" in result.error


def test_metrics_and_completions(grpo_workspace: Workspace) -> None:
    assert grpo_workspace.run_tune(*RUN, "data.packing=true", "loss.beta=0.1").code == 0
    lines = [line for line in metrics_file.read_metrics(Path("out")) if "loss" in line]
    names = {"reward", "reward_std", "rewards/vowels/mean", "rewards/length/mean", "frac_reward_zero_std", "entropy"}
    names |= {"kl", "clip_ratio/region_mean", "completions/mean_length", "completions/clipped_ratio"}
    assert len(lines) == 6 and all(names <= line.keys() for line in lines)
    assert all(line["sampling/logprob_diff"] < 1e-5 for line in lines), "the engine samples other probabilities"
    assert lines[0]["kl"] < 1e-6 < lines[-1]["kl"]
    evaluations = [line for line in metrics_file.read_metrics(Path("out")) if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    rows = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()]
    assert len(rows) == 6 * 4 and {row["step"] for row in rows} == set(range(1, 7))
    for line, step in zip(lines, range(1, 7), strict=True):
        step_rows = [row for row in rows if row["step"] == step]
        assert sum(row["reward"] for row in step_rows) / 4 == pytest.approx(line["reward"], abs=1e-5)
        assert all(row["vowels"] is None for row in step_rows if row["prompt"] == "Say 3 words")


@pytest.mark.parametrize("packing", ["false", "true"])
def test_episodes_with_several_turns(grpo_workspace: Workspace, packing: str) -> None:
    """Observations are context of the next answer and are not learned; sampled tokens are trained as sampled."""
    args = ("environment={kind: custom, environment_factory: 'again.py:Again'}", "rewards=[]", "eval_data=null")
    sizes = ("sampling.max_new_tokens=120", "data.max_length=192", f"data.packing={packing}", "max_steps=3")
    assert grpo_workspace.run_tune(*RUN, *args, *sizes).code == 0
    lines = [line for line in metrics_file.read_metrics(Path("out")) if "loss" in line]
    rows = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()]
    assert any(len(row["completion"]) == 3 for row in rows if isinstance(row["completion"], list)), "no second answer"
    assert any(row["environment"] for row in rows) and "rewards/environment/mean" in lines[0]
    assert all(line["sampling/logprob_diff"] < 1e-5 for line in lines)
    assert lines[-1]["num_target_tokens"] == sum(row["num_tokens"] for row in rows)
    episodes = [json.loads(line) for line in Path("out/episodes.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in episodes] == [row["reward"] for row in rows]
    for episode, row in zip(episodes, rows, strict=True):
        trained = [value for value, flag in zip(episode["advantages"], episode["sampled"], strict=True) if flag]
        assert trained == pytest.approx([row["advantage"]] * row["num_tokens"], abs=1e-5)
        assert sum(map(abs, episode["advantages"])) == pytest.approx(sum(map(abs, trained)))


def test_reward_functions_read_environments(grpo_workspace: Workspace) -> None:
    """`environments` has the instance of each answer, after its episode."""
    args = ("environment={kind: custom, environment_factory: 'again.py:Again'}", "eval_data=null", "max_steps=1")
    rewards = "rewards=[{kind: function, function: 'rewards.py:turns'}]"
    sizes = ("sampling.max_new_tokens=60", "data.max_length=128")
    assert grpo_workspace.run_tune(*RUN, *args, rewards, *sizes, "model=tunekit/nano").code == 0
    rows = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()]
    assert any(row["turns"] == 2 for row in rows)
    for row in rows:
        messages = row["completion"] if isinstance(row["completion"], list) else [{"content": row["completion"]}]
        answers = [message["content"] for message in messages if message.get("role", "assistant") == "assistant"]
        assert row["texts"] == answers[: len(row["texts"])] and row["turns"] == len(row["texts"])


@pytest.mark.parametrize("stop", [1, 2, 6])
def test_run_resumes_in_the_middle_of_a_generation(
    grpo_workspace: Workspace, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """A generation is trained for four steps; the run is stopped inside of one."""
    assert grpo_workspace.run_tune(*RUN, *OFF_POLICY).code == 0
    lines = [line for line in metrics_file.read_metrics(Path("out")) if "loss" in line]
    assert lines[0]["approx_kl"] < 1e-9 < lines[3]["approx_kl"], "off-policy steps have other probabilities"
    assert [line["rewards/vowels/mean"] for line in lines[:4]] == [lines[0]["rewards/vowels/mean"]] * 4
    stop_after(monkeypatch, stop)
    assert grpo_workspace.run_tune(*RUN, *OFF_POLICY, "output_dir=broken").code == 143
    assert grpo_workspace.run_tune(*RUN, *OFF_POLICY, "output_dir=broken").code == 0
    assert grpo_workspace.is_same_run("out", "broken")
    for name in ("completions.jsonl", "episodes.jsonl"):
        assert Path("out", name).read_bytes() == Path("broken", name).read_bytes()


@pytest.mark.slow
def test_killed_run_resumes_in_the_middle_of_a_generation(grpo_workspace: Workspace) -> None:
    args = (*RUN, *OFF_POLICY, "save_every=1", "save_total_limit=20")
    assert grpo_workspace.run_tune(*args).code == 0
    grpo_workspace.kill_after(3, *args, "output_dir=broken")
    assert grpo_workspace.run_tune(*args, "output_dir=broken").code == 0
    assert grpo_workspace.is_same_run("out", "broken")


def test_drift_stops_the_run(grpo_workspace: Workspace) -> None:
    result = grpo_workspace.run_tune(*RUN, "max_logprob_drift=1e-12")
    assert result.code == 2 and "max_logprob_drift: the log-probabilities" in result.error


def test_best_weights_by_reward(grpo_workspace: Workspace) -> None:
    args = ("eval_every=1", "load_best_model_at_end=true", "optimizer.lr=0.3")
    assert grpo_workspace.run_tune(*RUN, *args).code == 0
    rewards = {line["step"]: line["eval/reward"] for line in metrics_file.read_metrics(Path("out"))
               if "eval/reward" in line}  # fmt: skip
    final = [line for line in metrics_file.read_metrics(Path("out")) if "verify/max_logit_diff" in line]
    trained = {step: reward for step, reward in rewards.items() if step}
    assert final[0]["step"] == max(trained, key=trained.__getitem__)


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp"])
def test_all_losses_train(grpo_workspace: Workspace, loss: str) -> None:
    assert grpo_workspace.run_tune(*RUN, f"loss={loss}", "max_steps=2", "eval_data=null").code == 0
    lines = [line for line in metrics_file.read_metrics(Path("out")) if "loss" in line]
    assert any(line["grad_norm"] > 0 for line in lines)


@pytest.mark.slow
def test_qlora_with_a_reference(grpo_workspace: Workspace) -> None:
    args = ("adapter={kind: lora, rank: 4}", "quantization=nf4", "loss.beta=0.1", "max_steps=3")
    assert grpo_workspace.run_tune(*RUN, *args).code == 0
    lines = [line for line in metrics_file.read_metrics(Path("out")) if "loss" in line]
    assert all(line["sampling/logprob_diff"] < 1e-5 for line in lines)
