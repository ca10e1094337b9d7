"""What the page on preference promises: a minute of LoRA teaches the nano a preference, and it keeps what it knew."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.nano.preferences import Pair, is_preferred
from tunekit import assets
from tunekit.cli import registry
from tunekit.config.load import load_config
from tunekit.recipes import evaluate, preference

SKILLS = ("nano/facts", "nano/copying", "nano/stories")


def held() -> list[Pair]:
    rows = (assets.DATA["tunekit/preferences"] / "test.jsonl").read_text().splitlines()
    return [Pair(*(messages[0]["content"] for messages in json.loads(row).values())) for row in rows]


@pytest.mark.slow
def test_a_minute_of_lora_teaches_the_nano_a_preference(tmp_path: Path) -> None:
    run = tmp_path / "run"
    preference.main(load_config(preference.PreferenceConfig, registry.find_config("nano/dpo"), [f"output_dir={run}"]))
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["eval/rewards/accuracies"] for line in told if "eval/loss" in line)
    assert first == 0 and last > 0.9
    asked = load_config(evaluate.EvaluateConfig, registry.find_config("nano/preferred"), [f"model={run}"])
    before, after = evaluate.main(replace(asked, tasks=SKILLS, num_completions_to_print=0))
    pairs = held()
    deeds = [place for place, pair in enumerate(pairs) if "can not" in pair.chosen]
    followed = [sum(is_preferred(one.answers[place], pairs[place]) for place in deeds) for one in (before, after)]
    assert followed[0] == 0 and followed[1] > len(deeds) / 2
    known, left = (sum(found["exact_match"].num_correct for found in one.tasks[1:]) for one in (before, after))
    assert known > 400 and left > 0.93 * known
