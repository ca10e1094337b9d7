"""Answers of copying tasks are contained in their questions."""

import json
import re
from random import Random

import pytest

from scripts.nano import copying
from scripts.nano.templates import Exchange, TemplateContext

ORDINALS = {"first": 0, "second": 1, "third": 2, "fourth": 3, "fifth": 4, "sixth": 5, "last": -1}


def make_exchanges(task) -> list[Exchange]:
    rng = Random(3)
    return [task(TemplateContext(rng)) for _ in range(400)]


def test_repetition_is_verbatim():
    for question, answer in make_exchanges(copying.make_repetition_question):
        half = len(answer) // 2
        text = answer.split(' said "')[-1].removesuffix('".').strip('"').strip("[]")
        assert text in question or (answer[:half] == answer[half + 1 :] and answer[:half] in question), (
            question,
            answer,
        )


def test_nth_word():
    for question, answer in make_exchanges(copying.make_nth_word_question):
        place = re.search(" (first|second|third|fourth|fifth|sixth|last)", question)[1]
        row = re.sub(r".*(?:of: |word\. )|\. Which.*", "", question).split()
        assert row[ORDINALS[place]] == re.sub(r'.*is |["]|\.$', "", answer), (question, answer)


def parse_list_items(question: str) -> list[str]:
    return re.split(": |list\\? ", question, maxsplit=1)[1].split(", ")


@pytest.mark.parametrize(
    ("keywords", "apply_operation"),
    [
        (
            ("Sort", "in order"),
            lambda row, question: sorted(row, key=lambda item: (len(item), item) if item.isdigit() else (0, item)),
        ),
        (("Reverse", "backwards"), lambda row, question: list(reversed(row))),
        (("out of",), lambda row, question: [item for item in row if not question.startswith(f"Take {item} out")]),
        (("at the end",), lambda row, question: [*row, re.search("Put (.*) at", question)[1]]),
        (("Swap",), lambda row, question: row[1::-1] + row[2:]),
    ],
)
def test_list_operations(keywords, apply_operation):
    exchanges = [
        (question, answer)
        for question, answer in make_exchanges(copying.make_list_question)
        if any(word in question for word in keywords)
    ]
    assert len(exchanges) > 20
    for question, answer in exchanges:
        assert answer.split(", ") == apply_operation(parse_list_items(question), question), (question, answer)


def test_list_lengths_and_membership():
    for question, answer in make_exchanges(copying.make_list_question):
        if "How many" in question or "Count" in question:
            assert re.search(r"\d+", answer)[0] == str(len(parse_list_items(question)))
        if question.startswith("Is "):
            item = re.search("Is (.*) in this", question)[1]
            assert answer.startswith("Yes" if item in parse_list_items(question) else "No"), (question, answer)


def test_extrema():
    for question, answer in make_exchanges(copying.make_extremum_question):
        row = [int(number) for number in re.findall(r"\d+", question)]
        assert int(answer.split()[0]) == (max if "largest" in question else min)(row)


def parse_record(text: str) -> dict[str, str]:
    """A record in any format, with values as text."""
    if "{" in text:
        record = json.loads(text[text.index("{") : text.rindex("}") + 1])
        inner = next(iter(record.values()))
        return {field: str(value) for field, value in (inner if isinstance(inner, dict) else record).items()}
    pairs = re.findall(r"([a-z]+)(?:: | = )((?:(?!, [a-z]+: )[^\n])+)", text)
    return dict(pairs)


def test_record_lookup():
    for question, answer in make_exchanges(copying.make_record_lookup_question):
        text, query = question.rsplit("\n", 1)
        record = parse_record(text)
        if query.startswith("Which"):
            assert record[answer] == query.removeprefix("Which field is ")[:-1]
        else:
            field = re.search(r"(?:the )?([a-z]+)(?: =|[?.])$", query)[1]
            assert answer in (record[field], f"The {field} is {record[field]}."), (question, answer)


def test_record_rewriting():
    for question, answer in make_exchanges(copying.make_record_rewriting_question):
        if question.startswith("Set the"):
            field, new, old = re.match(r"Set the (\w+) to (.*) in (\{.*)", question).groups()
            assert parse_record(answer) == parse_record(old) | {field: new}
        elif question.startswith("Which"):
            assert answer.split(", ") == list(parse_record(question))
        else:
            assert parse_record(answer) == parse_record(re.sub("^(Write|Read) .*?: |\nThe same.*", "", question)), (
                question,
                answer,
            )


def test_comprehension_answers_use_words_of_the_passage():
    frame = {"The", "They", "It", "is", "in", "has", "a", "at", "on"}
    for question, answer in make_exchanges(copying.make_comprehension_question):
        if answer.startswith("{"):
            assert all(value in question for value in parse_record(answer).values()), (question, answer)
        else:
            question_words, answer_words = (set(re.findall(r"[\w@:']+", text)) for text in (question, answer))
            assert answer_words <= question_words | frame, (question, answer)
