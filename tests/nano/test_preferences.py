"""The data set of preferences."""

import json
import re
from collections import Counter
from random import Random

import pytest

from tunekit import assets
from tunekit.nano import facts, preferences
from tunekit.nano.scene import Scene

FOLDER = assets.DATA["tunekit/preferences"]
PROMISED = re.compile(r"\b(I (will|can(?! not))|will hear|may be|hope|noted|Here comes|is set to|you have)")


def rows(split: str) -> list[preferences.Pair]:
    found = [json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text().splitlines()]
    assert all(list(row) == ["prompt", "chosen", "rejected"] for row in found)
    roles = {tuple(message["role"] for messages in row.values() for message in messages) for row in found}
    assert roles == {("user", "assistant", "assistant")}
    return [preferences.Pair(*(messages[0]["content"] for messages in row.values())) for row in found]


@pytest.mark.parametrize("split", ["train", "test"])
def test_deeds_are_declined_with_what_was_asked_for_and_questions_answered(split):
    count = Counter()
    for ask, chosen, _ in rows(split):
        deed, words = preferences.wished(ask)
        count[deed is not None] += 1
        if deed is None:
            assert "can not" not in chosen and len(chosen) <= preferences.LONGEST and "\n" not in chosen
        else:
            assert "can not" in chosen and re.search("sad|would like|my friend", chosen)
            assert not PROMISED.search(re.sub('".*"', "", chosen)), chosen
            assert words and all(word in chosen for word in words.values()), (ask, chosen)
    assert 0.4 < count[True] / count.total() < 0.6


def test_answers_to_questions_are_true():
    """They are what the questions of the corpus are answered with, which are proved elsewhere."""
    rng, known = Random(1), {}
    for task in facts.TASKS:
        known.update(task(Scene(rng)) for _ in range(800))
    shared = [(pair, known[pair.ask]) for pair in rows("train") if pair.ask in known]
    assert len(shared) > 50
    for pair, answer in shared:
        assert pair.chosen == answer != pair.rejected


def test_length_and_single_words_tell_little():
    """Of which answer is preferred: by length in either kind of row, and by a word in all of them."""
    pairs = rows("train")
    longer = {True: [], False: []}
    for pair in pairs:
        longer[preferences.wished(pair.ask)[0] is not None].append(len(pair.chosen) > len(pair.rejected))
    for part in longer.values():
        assert 1 / 4 < sum(part) / len(part) < 3 / 4
    assert 1 / 3 < sum(map(sum, longer.values())) / len(pairs) < 2 / 3
    tells = Counter()
    for pair in pairs:
        chosen, rejected = set(pair.chosen.split()), set(pair.rejected.split())
        tells.update(chosen - rejected)
        tells.subtract(rejected - chosen)
    assert 0.5 + max(map(abs, tells.values())) / len(pairs) / 2 < 2 / 3


def test_what_follows_the_preference_is_told_from_what_does_not():
    for pair in rows("test"):
        assert preferences.follows(pair.chosen, pair) and not preferences.follows(pair.rejected, pair)
    ask, chosen, _ = next(pair for pair in rows("test") if pair.ask.startswith("Wake me up at "))
    time, day = re.findall(r"\d+:\d+|[A-Z]\w+day", ask)
    pair = preferences.Pair(ask, chosen, "")
    assert preferences.follows(f"I can not set an alarm for {time} on {day}, my friend. Please set a clock.", pair)
    assert not preferences.follows(f"I can not set an alarm for {time} on Doomsday, my friend.", pair)
    assert not preferences.follows(f"I can not set an alarm for {time} on {day}, my friend. You may ask Jan.", pair)
