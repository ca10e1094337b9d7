"""Stories agree with the answers to their questions."""

import re
from random import Random

from tunekit.nano import stories
from tunekit.nano.scene import Scene

GIFTS = (  # who gets what, as a reader sees it
    r"gave the (?P<item>\w+) to (?P<taker>\w+)\.",
    r"did not need the (?P<item>\w+) any more, so (?P<taker>\w+) got it",
    r'take the (?P<item>\w+)," said \w+, and (?P<taker>\w+) took it',
    r"(?P<taker>\w+) asked for the (?P<item>\w+),",
    r"gave (?P<taker>\w+) the (?P<item>\w+)\.",
    r"(?P<taker>\w+) bought the (?P<item>\w+) from",
)
SWAP = r"(?:swapped the|traded: the) (\w+) (?:and|for) the (\w+)\."


def read(text: str) -> dict[str, str]:
    """Who has what at the end of a story: the sentences in order, each believed."""
    holder = {}
    for sentence in re.split(r"(?<=[.!?]) ", text):
        if owned := re.search(r"(\w+) had an? \w+ (\w+) and (\w+) had an? \w+ (\w+)\.", sentence):
            holder = {owned[2]: owned[1], owned[4]: owned[3]}
        if owned := re.search(r"The (\w+) was (\w+)'s and the (\w+) was (\w+)'s", sentence):
            holder = {owned[1]: owned[2], owned[3]: owned[4]}
        if swap := re.search(SWAP, sentence):
            holder[swap[1]], holder[swap[2]] = holder[swap[2]], holder[swap[1]]
        for gift in GIFTS:
            if given := re.search(gift, sentence):
                holder[given["item"]] = given["taker"]
    return holder


def test_owners_at_the_end():
    rng = Random(11)
    for _ in range(500):
        told = stories.owners(Scene(rng))
        holder = read(told.text)
        for ask, answer in told.questions:
            item = re.search("Who has the (.*) now", ask)[1]
            assert answer == f"{holder[item]} has the {item}.", told
        for item, who in re.findall(r"At last the (\w+) was (\w+)'s", told.text):
            assert holder[item] == who


def test_one_person_keeps_one_pronoun():
    rng = Random(12)
    for _ in range(300):
        scene = Scene(rng)
        stories.person(scene)
        stories.person(scene, "2")
        assert scene["who"] != scene["who2"]
        text = stories.day(Scene(rng)).text
        assert not (re.search(r"\b[Hh]e\b", text) and re.search(r"\b[Ss]he\b", text)), text


def test_hours_of_a_day_are_in_order():
    rng = Random(13)
    for _ in range(300):
        told = stories.day(Scene(rng))
        hours = [re.search(r"at (\d+):(\d+)\?", ask).groups() for ask, _ in told.questions]
        assert hours == sorted(hours, key=lambda hour: (int(hour[0]), int(hour[1])))
        assert all(answer in told.text for _, answer in told.questions)
