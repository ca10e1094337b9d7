"""Answers to fact questions are correct. Each is computed independently of the generator."""

import calendar
import re
from datetime import datetime, timedelta
from random import Random

import pytest

from scripts.nano import facts, word_lists
from scripts.nano.templates import Exchange, TemplateContext

OPERATION = {"plus": "+", "minus": "-", "times": "*"}
WEEKDAYS, MONTHS = list(calendar.day_name), list(calendar.month_name)
UNIT_SIZES = {  # in the smallest unit of each dimension
    **{"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604_800},
    **{"centimeters": 1, "meters": 100, "kilometers": 100_000},
    **{"grams": 1, "kilograms": 1000},
    **{"milliliters": 1, "liters": 1000},
    **{"inches": 1, "feet": 12, "yards": 36},
    **{"ounces": 1, "pounds": 16},
    **{"pieces": 1, "dozens": 12},
    **{"months": 1, "years": 12},
}


def make_exchanges(task) -> list[Exchange]:
    rng = Random(7)
    return [task(TemplateContext(rng)) for _ in range(400)]


def find_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize(
    "task", [facts.make_addition_question, facts.make_subtraction_question, facts.make_multiplication_question]
)
def test_arithmetic(task):
    for question, answer in make_exchanges(task):
        equation = re.sub("|".join(OPERATION), lambda match: OPERATION[match[0]], answer)
        equation = re.sub(r"The sum of (\d+) and (\d+) is", r"\1 + \2 =", equation).replace(" is ", " = ")
        left, right = re.search(r"(\d+ [-+*] \d+) = (\d+)", equation).groups()
        assert eval(left) == int(right), answer
        assert sorted(find_numbers(question)) == sorted(find_numbers(left)), (question, answer)
        assert find_numbers(answer)[-1] == int(right)


def test_comparisons():
    for question, answer in make_exchanges(facts.make_comparison_question):
        expected = min if "smaller" in question else max
        assert find_numbers(answer)[0] == expected(find_numbers(question)), (question, answer)


def test_sequences_have_a_constant_step():
    for question, answer in make_exchanges(facts.make_sequence_question):
        shown = find_numbers(question)
        steps = {after - before for before, after in zip(shown, [*shown[1:], find_numbers(answer)[-1]], strict=True)}
        assert len(steps) == 1, (question, answer)


def test_parity_and_number_words():
    for question, answer in make_exchanges(facts.make_parity_question):
        (number,) = find_numbers(question)
        assert answer.endswith(f"{number} is {'odd' if number & 1 else 'even'}."), answer
    names = {word: number for number, word in enumerate(word_lists.NUMBER_WORDS)}
    assert (names["zero"], names["twelve"], names["fifteen"], names["twenty"]) == (0, 12, 15, 20)
    for _, answer in make_exchanges(facts.make_number_word_question):
        (number,) = find_numbers(answer)
        assert names[next(word for word in re.findall(r"[a-z]+", answer) if word in names)] == number


def test_weekdays():
    for question, answer in make_exchanges(facts.make_weekday_question):
        given = re.search("|".join(WEEKDAYS), question)[0]
        result = [day for day in re.findall("|".join(WEEKDAYS), answer) if day != given] or [given]
        step = (find_numbers(question) or [1])[0] * (-1 if re.search("before|yesterday", question) else 1)
        assert result == [WEEKDAYS[(WEEKDAYS.index(given) + step) % 7]], (question, answer)


def test_months():
    for question, answer in make_exchanges(facts.make_month_question):
        first, *rest = re.findall("|".join(MONTHS[1:]), answer)
        if "days" in question:
            assert set(find_numbers(answer)) == {
                calendar.monthrange(year, MONTHS.index(first))[1] for year in (2023, 2024)
            }
        elif "number" in question:
            assert MONTHS[find_numbers(question)[0]] == first
        else:
            step = -1 if answer.startswith("Before") else 1
            assert (MONTHS.index(first) + step - MONTHS.index(rest[0])) % 12 == 0, answer


def test_dates():
    for question, answer in make_exchanges(facts.make_date_question):
        days = [
            datetime.strptime(f"2023 {day}", "%Y %B %d")
            for day in re.findall(r"[A-Z][a-z]+ \d+", f"{question} {answer}")
        ]
        if "Which" in question:
            assert days[:2] != [days[0]] * 2
            assert [days[2], days[3]] == sorted(days[:2], reverse="later" in question), (question, answer)
        else:
            count = next(number for number in re.findall(r"(\d+) days", question))
            assert days[-1] - days[0] == timedelta(days=int(count)), (question, answer)


def test_clock():
    for question, answer in make_exchanges(facts.make_time_question):
        start_time, end_time = (
            datetime.strptime(re.findall(r"\d+:\d+", text)[-1], "%H:%M") for text in (question, answer)
        )
        count = timedelta(minutes=int(re.search(r"(\d+) minutes", question)[1]))
        assert end_time == (start_time - count if "before" in question else start_time + count), (question, answer)


def test_units():
    for question, answer in make_exchanges(facts.make_unit_conversion_question):
        sizes = [
            int(number) * UNIT_SIZES[unit] for number, unit in re.findall(r"(\d+) ([a-z]+)", f"{question} {answer}")
        ]
        assert len(set(sizes)) == 1, (question, answer)


def test_knowledge_is_consistent():
    """Equal questions have equal answers."""
    answers: dict[str, str] = {}
    for question, answer in make_exchanges(facts.make_knowledge_question):
        assert answers.setdefault(question, answer) == answer
