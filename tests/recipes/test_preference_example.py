"""The preference example of the docs: LoRA teaches the nano model a preference without losing other skills."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.nano.preferences import PreferencePair, is_preferred
from tunekit import assets
from tunekit.cli import registry
from tunekit.config.load import load_config
from tunekit.recipes import evaluate, preference

SKILLS = ("nano/facts", "nano/copying", "nano/stories")
LIMIT = 100  # rows of the preference data and of each skill
# Half of the configured epochs, in smaller steps: 37 to 43 of 57 preferences are followed, 94% of the skills are kept
ONE_EPOCH = ("epochs=1", "global_batch_size=8", "micro_batch_size=8", "eval_data.split=test[:100]")


def read_eval_pairs() -> list[PreferencePair]:
    rows = (assets.DATA["tunekit/preferences"] / "test.jsonl").read_text().splitlines()
    return [PreferencePair(*(messages[0]["content"] for messages in json.loads(row).values())) for row in rows]


@pytest.mark.slow
def test_nano_dpo_learns_the_preference_and_keeps_other_skills(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [f"output_dir={run}", *ONE_EPOCH]
    preference.main(load_config(preference.PreferenceConfig, registry.find_config("nano/dpo"), overrides))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["eval/rewards/accuracies"] for line in metrics if "eval/loss" in line)
    assert first == 0 and last > 0.9
    overrides = [f"model={run}", f"limit={LIMIT}"]
    cfg = load_config(evaluate.EvaluateConfig, registry.find_config("nano/preferred"), overrides)
    before, after = evaluate.main(replace(cfg, tasks=SKILLS, num_completions_to_print=0))
    pairs = read_eval_pairs()[:LIMIT]
    indices = [index for index, pair in enumerate(pairs) if "can not" in pair.chosen]
    followed = [
        sum(is_preferred(result.answers[index], pairs[index]) for index in indices) for result in (before, after)
    ]
    assert followed[0] == 0 and followed[1] > len(indices) / 2
    correct_before, correct_after = (
        sum(task["exact_match"].num_correct for task in result.tasks[1:]) for result in (before, after)
    )
    assert correct_before > 2 * LIMIT and correct_after > 0.9 * correct_before
