"""Answers that must stand in their questions do."""

import json
import re
from random import Random

import pytest

from tunekit.nano import copying
from tunekit.nano.scene import Exchange, Scene

ORDINALS = {"first": 0, "second": 1, "third": 2, "fourth": 3, "fifth": 4, "sixth": 5, "last": -1}


def many(task) -> list[Exchange]:
    rng = Random(3)
    return [task(Scene(rng)) for _ in range(400)]


def test_spans_are_repeated_letter_by_letter():
    for ask, answer in many(copying.repeat):
        half = len(answer) // 2
        said = answer.split(' said "')[-1].removesuffix('".').strip('"').strip("[]")
        assert said in ask or (answer[:half] == answer[half + 1 :] and answer[:half] in ask), (ask, answer)


def test_the_nth_word():
    for ask, answer in many(copying.nth):
        place = re.search(" (first|second|third|fourth|fifth|sixth|last)", ask)[1]
        row = re.sub(r".*(?:of: |word\. )|\. Which.*", "", ask).split()
        assert row[ORDINALS[place]] == re.sub(r'.*is |["]|\.$', "", answer), (ask, answer)


def rows_of(ask: str) -> list[str]:
    return re.split(": |list\\? ", ask, maxsplit=1)[1].split(", ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("Sort", "in order"),
            lambda row, ask: sorted(row, key=lambda item: (len(item), item) if item.isdigit() else (0, item)),
        ),
        (("Reverse", "backwards"), lambda row, ask: list(reversed(row))),
        (("out of",), lambda row, ask: [item for item in row if not ask.startswith(f"Take {item} out")]),
        (("at the end",), lambda row, ask: [*row, re.search("Put (.*) at", ask)[1]]),
        (("Swap",), lambda row, ask: row[1::-1] + row[2:]),
    ],
)
def test_lists(words, told):
    asked = [(ask, answer) for ask, answer in many(copying.listing) if any(word in ask for word in words)]
    assert len(asked) > 20
    for ask, answer in asked:
        assert answer.split(", ") == told(rows_of(ask), ask), (ask, answer)


def test_counts_and_members():
    for ask, answer in many(copying.listing):
        if "How many" in ask or "Count" in ask:
            assert re.search(r"\d+", answer)[0] == str(len(rows_of(ask)))
        if ask.startswith("Is "):
            item = re.search("Is (.*) in this", ask)[1]
            assert answer.startswith("Yes" if item in rows_of(ask) else "No"), (ask, answer)


def test_extremes():
    for ask, answer in many(copying.extreme):
        row = [int(number) for number in re.findall(r"\d+", ask)]
        assert int(answer.split()[0]) == (max if "largest" in ask else min)(row)


def parsed(text: str) -> dict[str, str]:
    """A record in any of its spellings, all values as text."""
    if "{" in text:
        record = json.loads(text[text.index("{") : text.rindex("}") + 1])
        inner = next(iter(record.values()))
        return {field: str(value) for field, value in (inner if isinstance(inner, dict) else record).items()}
    pairs = re.findall(r"([a-z]+)(?:: | = )((?:(?!, [a-z]+: )[^\n])+)", text)
    return dict(pairs)


def test_fields_are_looked_up():
    for ask, answer in many(copying.lookup):
        text, question = ask.rsplit("\n", 1)
        record = parsed(text)
        if question.startswith("Which"):
            assert record[answer] == question.removeprefix("Which field is ")[:-1]
        else:
            field = re.search(r"(?:the )?([a-z]+)(?: =|[?.])$", question)[1]
            assert answer in (record[field], f"The {field} is {record[field]}."), (ask, answer)


def test_records_are_rewritten():
    for ask, answer in many(copying.rewrite):
        if ask.startswith("Set the"):
            field, new, old = re.match(r"Set the (\w+) to (.*) in (\{.*)", ask).groups()
            assert parsed(answer) == parsed(old) | {field: new}
        elif ask.startswith("Which"):
            assert answer.split(", ") == list(parsed(ask))
        else:
            assert parsed(answer) == parsed(re.sub("^(Write|Read) .*?: |\nThe same.*", "", ask)), (ask, answer)


def test_answers_on_a_sentence_are_made_of_its_words():
    frame = {"The", "They", "It", "is", "in", "has", "a", "at", "on"}
    for ask, answer in many(copying.told):
        if answer.startswith("{"):
            assert all(value in ask for value in parsed(answer).values()), (ask, answer)
        else:
            asked, told = (set(re.findall(r"[\w@:']+", text)) for text in (ask, answer))
            assert told <= asked | frame, (ask, answer)
