"""Dataset `tunekit/preferences`."""

import json
import re
from collections import Counter
from random import Random

import pytest

from scripts.nano import facts, preferences
from scripts.nano.templates import TemplateContext
from tunekit import assets

DATASET_DIR = assets.DATA["tunekit/preferences"]
PROMISE = re.compile(r"\b(I (will|can(?! not))|will hear|may be|hope|noted|Here comes|is set to|you have)")


def read_pairs(split: str) -> list[preferences.PreferencePair]:
    contents = [json.loads(line) for line in (DATASET_DIR / f"{split}.jsonl").read_text().splitlines()]
    assert all(list(row) == ["prompt", "chosen", "rejected"] for row in contents)
    roles = {tuple(message["role"] for messages in row.values() for message in messages) for row in contents}
    assert roles == {("user", "assistant", "assistant")}
    return [preferences.PreferencePair(*(messages[0]["content"] for messages in row.values())) for row in contents]


@pytest.mark.parametrize("split", ["train", "test"])
def test_chosen_answers_decline_actions_and_answer_questions(split):
    count = Counter()
    for prompt, chosen, _ in read_pairs(split):
        action, context = preferences.find_action(prompt)
        count[action is not None] += 1
        if action is None:
            assert "can not" not in chosen and len(chosen) <= preferences.MAX_ANSWER_CHARS and "\n" not in chosen
        else:
            assert "can not" in chosen and re.search("sad|would like|my friend", chosen)
            assert not PROMISE.search(re.sub('".*"', "", chosen)), chosen
            assert context and all(word in chosen for word in context.values()), (prompt, chosen)
    assert 0.4 < count[True] / count.total() < 0.6


def test_answers_to_questions_are_correct():
    """They are the answers of the training text, which test_facts.py checks."""
    rng, known = Random(1), {}
    for task in facts.TASK_WEIGHTS:
        known.update(task(TemplateContext(rng)) for _ in range(800))
    shared = [(pair, known[pair.prompt]) for pair in read_pairs("train") if pair.prompt in known]
    assert len(shared) > 50
    for pair, answer in shared:
        assert pair.chosen == answer != pair.rejected


def test_length_and_single_words_are_weak_signals():
    """Neither the longer answer nor a single word predicts the chosen answer in two thirds of the pairs."""
    pairs = read_pairs("train")
    longer = {True: [], False: []}
    for pair in pairs:
        longer[preferences.find_action(pair.prompt)[0] is not None].append(len(pair.chosen) > len(pair.rejected))
    for part in longer.values():
        assert 1 / 4 < sum(part) / len(part) < 3 / 4
    assert 1 / 3 < sum(map(sum, longer.values())) / len(pairs) < 2 / 3
    balance = Counter()
    for pair in pairs:
        chosen, rejected = set(pair.chosen.split()), set(pair.rejected.split())
        balance.update(chosen - rejected)
        balance.subtract(rejected - chosen)
    assert 0.5 + max(map(abs, balance.values())) / len(pairs) / 2 < 2 / 3


def test_is_preferred_accepts_chosen_and_refuses_rejected():
    for pair in read_pairs("test"):
        assert preferences.is_preferred(pair.chosen, pair) and not preferences.is_preferred(pair.rejected, pair)
    prompt, chosen, _ = next(pair for pair in read_pairs("test") if pair.prompt.startswith("Wake me up at "))
    time, day = re.findall(r"\d+:\d+|[A-Z]\w+day", prompt)
    pair = preferences.PreferencePair(prompt, chosen, "")
    assert preferences.is_preferred(f"I can not set an alarm for {time} on {day}, my friend. Please set a clock.", pair)
    assert not preferences.is_preferred(f"I can not set an alarm for {time} on Doomsday, my friend.", pair)
    assert not preferences.is_preferred(
        f"I can not set an alarm for {time} on {day}, my friend. You may prompt Jan.", pair
    )
