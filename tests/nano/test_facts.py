"""What the corpus claims is true: every answer is worked out again here, by another route."""

import calendar
import re
from datetime import datetime, timedelta
from random import Random

import pytest

from tunekit.nano import facts, words
from tunekit.nano.scene import Exchange, Scene

OPERATION = {"plus": "+", "minus": "-", "times": "*"}
WEEKDAYS, MONTHS = list(calendar.day_name), list(calendar.month_name)
SIZES = {  # in the smallest unit of each dimension
    **{"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604_800},
    **{"centimeters": 1, "meters": 100, "kilometers": 100_000},
    **{"grams": 1, "kilograms": 1000},
    **{"milliliters": 1, "liters": 1000},
    **{"inches": 1, "feet": 12, "yards": 36},
    **{"ounces": 1, "pounds": 16},
    **{"pieces": 1, "dozens": 12},
    **{"months": 1, "years": 12},
}


def many(task) -> list[Exchange]:
    rng = Random(7)
    return [task(Scene(rng)) for _ in range(400)]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("task", [facts.plus, facts.minus, facts.times])
def test_arithmetic(task):
    for ask, answer in many(task):
        spelt = re.sub("|".join(OPERATION), lambda match: OPERATION[match[0]], answer)
        spelt = re.sub(r"The sum of (\d+) and (\d+) is", r"\1 + \2 =", spelt).replace(" is ", " = ")
        left, right = re.search(r"(\d+ [-+*] \d+) = (\d+)", spelt).groups()
        assert eval(left) == int(right), answer
        assert sorted(numbers(ask)) == sorted(numbers(left)), (ask, answer)
        assert numbers(answer)[-1] == int(right)


def test_comparisons():
    for ask, answer in many(facts.compare):
        want = min if "smaller" in ask else max
        assert numbers(answer)[0] == want(numbers(ask)), (ask, answer)


def test_sequences_keep_their_step():
    for ask, answer in many(facts.sequence):
        shown = numbers(ask)
        steps = {after - before for before, after in zip(shown, [*shown[1:], numbers(answer)[-1]], strict=True)}
        assert len(steps) == 1, (ask, answer)


def test_parity_and_number_words():
    for ask, answer in many(facts.parity):
        (number,) = numbers(ask)
        assert answer.endswith(f"{number} is {'odd' if number & 1 else 'even'}."), answer
    names = {word: number for number, word in enumerate(words.NUMBERS)}
    assert (names["zero"], names["twelve"], names["fifteen"], names["twenty"]) == (0, 12, 15, 20)
    for _, answer in many(facts.spelt):
        (number,) = numbers(answer)
        assert names[next(word for word in re.findall(r"[a-z]+", answer) if word in names)] == number


def test_weekdays():
    for ask, answer in many(facts.week):
        given = re.search("|".join(WEEKDAYS), ask)[0]
        found = [day for day in re.findall("|".join(WEEKDAYS), answer) if day != given] or [given]
        step = (numbers(ask) or [1])[0] * (-1 if re.search("before|yesterday", ask) else 1)
        assert found == [WEEKDAYS[(WEEKDAYS.index(given) + step) % 7]], (ask, answer)


def test_months():
    for ask, answer in many(facts.year):
        first, *rest = re.findall("|".join(MONTHS[1:]), answer)
        if "days" in ask:
            assert set(numbers(answer)) == {calendar.monthrange(year, MONTHS.index(first))[1] for year in (2023, 2024)}
        elif "number" in ask:
            assert MONTHS[numbers(ask)[0]] == first
        else:
            step = -1 if answer.startswith("Before") else 1
            assert (MONTHS.index(first) + step - MONTHS.index(rest[0])) % 12 == 0, answer


def test_dates():
    for ask, answer in many(facts.calendar):
        days = [
            datetime.strptime(f"2023 {day}", "%Y %B %d") for day in re.findall(r"[A-Z][a-z]+ \d+", f"{ask} {answer}")
        ]
        if "Which" in ask:
            assert days[:2] != [days[0]] * 2
            assert [days[2], days[3]] == sorted(days[:2], reverse="later" in ask), (ask, answer)
        else:
            count = next(number for number in re.findall(r"(\d+) days", ask))
            assert days[-1] - days[0] == timedelta(days=int(count)), (ask, answer)


def test_clock():
    for ask, answer in many(facts.clock):
        asked, told = (datetime.strptime(re.findall(r"\d+:\d+", text)[-1], "%H:%M") for text in (ask, answer))
        count = timedelta(minutes=int(re.search(r"(\d+) minutes", ask)[1]))
        assert told == (asked - count if "before" in ask else asked + count), (ask, answer)


def test_units():
    for ask, answer in many(facts.units):
        sizes = [int(number) * SIZES[unit] for number, unit in re.findall(r"(\d+) ([a-z]+)", f"{ask} {answer}")]
        assert len(set(sizes)) == 1, (ask, answer)


def test_knowledge_agrees_both_ways():
    """Each fact is drawn from one table; no two facts of a kind contradict each other."""
    answers: dict[str, str] = {}
    for ask, answer in many(facts.knowledge):
        assert answers.setdefault(ask, answer) == answer
