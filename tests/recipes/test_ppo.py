"""PPO runs: config errors, exact resume in the middle of a generation, metrics, and files without the value head."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.recipe_runs import SHARED_CONFIG, Workspace
from tests.recipes.test_resume import stop_after
from tunekit.checkpoint.dcp_planner import read_metadata
from tunekit.loggers import metrics_file

CONFIG = """\
recipe: ppo
model: {model}
data: {{source: prompts.jsonl, max_length: 64}}
eval_data: {{source: prompts.jsonl, split: "train[:3]", max_length: 64}}
rewards: [{{kind: function, function: rewards.py:vowels}}]
optimizer: {{kind: adamw, lr: 1e-2}}
sampling: {{max_new_tokens: 6}}
num_ppo_epochs: 2
num_mini_batches: 2
max_steps: 9
"""
REWARDS = """\
def vowels(completions, start, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [None if first == "skip" else sum(c in "aeiou" for c in text) / 9 for text, first in zip(texts, start)]
"""
RUN = ("run", "ppo", "ppo.yaml")
NAMES = {"objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores"}
NAMES |= {"policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg"}
NAMES |= {"val/clipfrac_avg", "val/ratio", "val/explained_variance", "reward", "grad_norm", "lr"}


@pytest.fixture
def ppo_workspace(workspace: Workspace) -> Workspace:
    """Workspace with `ppo.yaml`, prompts and a reward function."""
    rows = [{"prompt": f"Say {n} words", "start": "skip" if n == 3 else "a"} for n in range(9)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(REWARDS)
    Path("ppo.yaml").write_text((CONFIG + SHARED_CONFIG).format(model=workspace.model))
    return workspace


def read_steps(folder: str) -> list[dict]:
    return [line for line in metrics_file.read_metrics(Path(folder)) if "loss" in line]


@pytest.mark.parametrize(("changes", "message"), [
    (("num_ppo_epochs=0",), "num_ppo_epochs: must be >= 1"),
    (("num_mini_batches=0",), "num_mini_batches: must be >= 1"),
    (("num_generations=3",), "global_batch_size: must be a multiple of num_generations=3"),
    (("value_lr=0",), "value_lr: must be > 0"),
    (("loss.lam=1.5",), "loss.lam: must be >= 0 and <= 1"),
    (("loss.gamma=-1",), "loss.gamma: must be >= 0 and <= 1"),
    (("loss.cliprange=-1",), "loss.cliprange: must be >= 0"),
    (("loss.kl_estimator=k2",), "loss.kl_estimator: "),
    (("loss.beta=0.1",), "loss.beta: "),
    (("loss.kl_coef=0", "reference=copy"), "reference: loss.kl_coef=0 needs no reference"),
    (("reference=disable_adapter",), "reference: disable_adapter: needs an adapter"),
    (("num_mini_batches=3",), "data: has 9 prompts, but a step needs 12"),
    (("steps_per_generation=2",), "steps_per_generation"),
])  # fmt: skip
def test_config_and_row_errors(ppo_workspace: Workspace, changes: tuple[str, ...], message: str) -> None:
    result = ppo_workspace.run_tune(*RUN, *changes)
    assert result.code == 2
    assert message in result.error, result.error
    assert not Path("out/metrics.jsonl").exists()


def test_metrics_of_epochs_and_mini_batches(ppo_workspace: Workspace) -> None:
    """A generation of eight answers is trained for two epochs of two steps."""
    assert ppo_workspace.run_tune(*RUN, "data.packing=true", "value_lr=0.05", "loss.missing_eos_penalty=1").code == 0
    lines = read_steps("out")
    assert len(lines) == 9 and all(line.keys() >= NAMES for line in lines)
    assert all(abs(line["val/ratio"] - 1) < 1e-5 for line in lines[::4]), "the first step is on-policy"
    assert all(line["sampling/logprob_diff"] < 1e-5 for line in lines), "the engine samples other probabilities"
    assert lines[0]["objective/kl"] == 0 == lines[0]["val/explained_variance"], "a new value head predicts 0"
    assert lines[3]["policy/approxkl_avg"] > 1e-6 and lines[4]["objective/kl"] != 0
    for line in lines:
        penalty = line["objective/scores"] - line["reward"]
        assert penalty <= 0 and line["objective/kl"] == lines[line["step"] - 1]["objective/kl"]
        total = line["objective/scores"] + line["objective/non_score_reward"]
        assert line["objective/rlhf_reward"] == pytest.approx(total, abs=1e-6)
        assert line["loss"] == pytest.approx(line["loss/policy_avg"] + 0.1 * line["loss/value_avg"], abs=1e-5)
    assert "| mean reward of held-out prompts | " in Path("out/final/README.md").read_text()
    rows = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 5, 9} and len(rows) == 24


def test_value_head_is_in_training_states_only(ppo_workspace: Workspace) -> None:
    assert ppo_workspace.run_tune(*RUN, "max_steps=2").code == 0
    state = read_metadata(Path("out/state/00000002")).state_dict_metadata
    assert {"model.value_head.weight", "model.value_head.bias", "optimizer.value_head.weight.exp_avg"} <= state.keys()
    base, final = load_file(ppo_workspace.model / "model.safetensors"), load_file("out/final/model.safetensors")
    assert final.keys() == base.keys(), "the result is a language model"


def test_run_resumes_in_the_middle_of_a_generation(ppo_workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*RUN, "value_lr=0.05")
    assert ppo_workspace.run_tune(*args).code == 0
    for stop in (1, 2, 6):
        broken = f"broken{stop}"
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            assert ppo_workspace.run_tune(*args, f"output_dir={broken}").code == 143
        assert ppo_workspace.run_tune(*args, f"output_dir={broken}").code == 0
        assert ppo_workspace.is_same_run("out", broken)
        assert Path("out/completions.jsonl").read_bytes() == Path(broken, "completions.jsonl").read_bytes()


@pytest.mark.slow
def test_sigkill_does_not_change_the_result(ppo_workspace: Workspace) -> None:
    """The run is killed after a state in the middle of a generation was saved."""
    args = (*RUN, "value_lr=0.05", "save_every=1")
    assert ppo_workspace.run_tune(*args).code == 0
    ppo_workspace.kill_after(3, *args, "output_dir=killed")
    assert ppo_workspace.run_tune(*args, "output_dir=killed").code == 0
    assert ppo_workspace.is_same_run("out", "killed")


def test_learning_rate_of_the_value_head(ppo_workspace: Workspace) -> None:
    """With an lr near 0, only the value head learns."""
    args = ("max_steps=5", "optimizer.lr=1e-30", "value_lr=0.1", "eval_data=null")
    assert ppo_workspace.run_tune(*RUN, *args).code == 0
    base, final = load_file(ppo_workspace.model / "model.safetensors"), load_file("out/final/model.safetensors")
    assert all(torch.equal(final[name], weight) for name, weight in base.items())
    lines = read_steps("out")
    assert lines[0]["val/explained_variance"] == 0 != lines[4]["val/explained_variance"]
    assert [line["policy/approxkl_avg"] for line in lines] == pytest.approx([0] * 5, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_qlora_with_a_reference(ppo_workspace: Workspace, adapter: str) -> None:
    args = (f"adapter={{kind: {adapter}, rank: 4}}", "quantization=nf4", "data.packing=true", "value_lr=0.05")
    assert ppo_workspace.run_tune(*RUN, *args).code == 0
    lines = read_steps("out")
    assert all(line["sampling/logprob_diff"] < 1e-5 for line in lines) and lines[-1]["objective/kl"] != 0
    names = load_file("out/final/adapter_model.safetensors").keys()
    assert names and all("lora" in name for name in names)
