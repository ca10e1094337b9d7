"""All training methods with all adapters. Has few imports because each rank loads it."""

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tunekit.config import load
from tunekit.loggers import metrics_file
from tunekit.training import train_loop

# Recipe and data section of each method.
CHATS = "data: {{kind: chat, source: {folder}/chats.jsonl, max_length: 64, packing: {pack}}}\nmicro_batch_size: 3"
PAIRS = "data: {{kind: preference, source: {folder}/pairs.jsonl, max_length: 64, packing: {pack}}}\nmicro_batch_size: 3"
TRIPLETS = "data: {{kind: retrieval, source: {folder}/pairs.jsonl, max_length: 64, packing: {pack}, "
TRIPLETS += "columns: {{query: prompt, positive: chosen, negative: rejected}}}}\n"
TRIPLETS += "loss: {{kind: multiple_negatives_ranking, scale: 5.0}}\nmicro_batch_size: 3"
PROMPTS = "data: {{source: {folder}/pairs.jsonl, max_length: 64, packing: {pack}}}\n"
PROMPTS += "rewards: [{{kind: regex_match, regex: 'w|k|z'}}, {{kind: length, max_tokens: 5}}]\n"
PROMPTS += "num_episodes_to_save: 1000\nnum_generations: 4\nmicro_batch_size: 7\nsampling: {{max_new_tokens: 6}}\n"
METHODS = {
    "sft": ("sft", CHATS),
    "dpo": ("preference", PAIRS),
    "simpo": ("preference", PAIRS + "\nloss: simpo"),
    "orpo": ("preference", PAIRS + "\nloss: orpo"),
    "kto": ("preference", PAIRS + "\nloss: kto"),
    "reward": ("reward", PAIRS),
    "embed": ("embed", TRIPLETS),
    "grpo": ("grpo", PROMPTS + "loss: {{kind: dapo, beta: 0.1}}\nnum_iterations: 2"),
    "rloo": ("grpo", PROMPTS + "loss: rloo"),
    "ppo": ("ppo", PROMPTS + "loss: {{kl_coef: 0.1, gamma: 0.9, whiten_rewards: true}}\nnum_ppo_epochs: 2"),
    "distill": ("distill", CHATS + "\nteacher: {{model: {folder}/teacher/model, precision: {{compute_dtype: fp32}}}}"),
}
ADAPTERS = {
    "full": "adapter: none",
    "lora": "adapter: {kind: lora, rank: 4}",
    "dora": "adapter: {kind: dora, rank: 4}",
    "qlora": "adapter: {kind: lora, rank: 4}\nquantization: nf4",
}
# One step contains all rows, so packing does not change the steps. A large epsilon makes steps of Adam proportional
# to gradients, because near zero their direction is rounding error.
CONFIG = """\
model: {model}
{rows}
{adapter}
output_dir: {out}
precision: {{compute_dtype: fp32, master_dtype: fp32, frozen_dtype: fp32}}
optimizer: {{kind: adamw, lr: 0.01, eps: 0.1}}
lr_scheduler: constant
device: cpu
global_batch_size: 28
max_steps: 3
"""


class Case(NamedTuple):
    """One run."""

    method: str
    adapter: str
    packed: bool


class RunResult(NamedTuple):
    """Metrics of all steps by name, and the step and token ids of each sampled answer."""

    metrics: dict[str, list[float]]
    answers: list[tuple[int, list[int]]]


class Comparison(NamedTuple):
    """Maximum difference of any metric, relative for values above 1, and whether two runs sampled the same answers."""

    error: float
    has_equal_answers: bool


# All methods with all adapters. Rows of every second case are packed, so each method and each adapter sees both.
ALL_CASES = [Case(m, a, bool((i + j) % 2)) for i, m in enumerate(METHODS) for j, a in enumerate(ADAPTERS)]


def covering_cases() -> list[Case]:
    """Each method with all weights and with one adapter. Each method and each adapter sees padded and packed rows.

    Recipes only disable adapters, so other adapters take the same path.
    """
    adapters = [adapter for adapter in ADAPTERS if adapter != "full"]
    pairs = [
        (Case(m, "full", bool(i % 2)), Case(m, adapters[i % len(adapters)], not i % 2)) for i, m in enumerate(METHODS)
    ]
    return [case for pair in pairs for case in pair]


def write_rows(folder: Path) -> None:
    """Write conversations and answer pairs of many lengths."""
    questions = [f"What is {n} plus {n * n}?" for n in range(7)]
    answers = [(f"It is {n + n * n}" + "!" * n, "I " + "do " * (7 - n) + "not know") for n in range(7)]
    conversations = [([("user", q), ("assistant", a)], r) for q, (a, r) in zip(questions, answers, strict=True)]
    chats = [
        {"messages": [{"role": role, "content": text} for role, text in messages]} for messages, _ in conversations
    ]
    pairs = [{"prompt": q, "chosen": a, "rejected": r} for q, (a, r) in zip(questions, answers, strict=True)]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_config(case: Case, folder: Path, model: Path, out: Path) -> str:
    recipe, rows = METHODS[case.method]
    rows = rows.format(folder=folder, model=model, pack=str(case.packed).lower())
    return f"recipe: {recipe}\n" + CONFIG.format(model=model, rows=rows, adapter=ADAPTERS[case.adapter], out=out)


def run_all_cases(folder: Path, model: Path, out: str, cases: list[Case]) -> list[RunResult]:
    """Results of all cases. Nothing is saved or verified."""
    torch.set_num_threads(1)
    return [run_case(case, folder, model, folder / out / str(number)) for number, case in enumerate(cases)]


def run_case(case: Case, folder: Path, model: Path, out: Path, suffix: str = "") -> RunResult:
    """Train. `suffix` is appended to the config."""
    recipe: Any = importlib.import_module(f"tunekit.recipes.{METHODS[case.method][0]}")
    cfg = load.load_config(recipe.CONFIG, make_config(case, folder, model, out) + suffix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_loop, "export_final", lambda *_: None)
        recipe.main(cfg)
    lines = [line for line in metrics_file.read_metrics(out) if "loss" in line]
    metrics = {name: [line[name] for line in lines] for name in lines[0] if is_deterministic(name)}
    log = out / "episodes.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return RunResult(metrics, [(record["step"], record["token_ids"]) for record in records])


def compare_runs(actual: RunResult, expected: RunResult) -> Comparison:
    """Compare all metrics of the steps before the first that samples different answers.

    Rounding errors of 1e-7 change about one of 20,000 sampled tokens: its random number lies between the cumulative
    probabilities of the two runs.
    """
    assert actual.metrics.keys() == expected.metrics.keys()
    answers = zip(actual.answers, expected.answers, strict=True)
    num_steps = min((a[0] - 1 for a, b in answers if a != b), default=None)
    pairs = (zip(actual.metrics[name], values, strict=True) for name, values in expected.metrics.items())
    errors = [abs(a - b) / max(1.0, abs(b)) for steps in pairs for a, b in list(steps)[:num_steps]]
    return Comparison(max(errors, default=0.0), num_steps is None)


def is_deterministic(name: str) -> bool:
    """Whether a metric does not depend on time."""
    return name in ("loss", "grad_norm", "kl", "entropy") or "/" in name
