"""Answers to questions about stories agree with the text."""

import re
from random import Random

from scripts.nano import stories
from scripts.nano.templates import TemplateContext

TRANSFERS = (  # sentences after which `taker` has `item`
    r"gave the (?P<item>\w+) to (?P<taker>\w+)\.",
    r"did not need the (?P<item>\w+) any more, so (?P<taker>\w+) got it",
    r'take the (?P<item>\w+)," said \w+, and (?P<taker>\w+) took it',
    r"(?P<taker>\w+) asked for the (?P<item>\w+),",
    r"gave (?P<taker>\w+) the (?P<item>\w+)\.",
    r"(?P<taker>\w+) bought the (?P<item>\w+) from",
)
SWAP = r"(?:swapped the|traded: the) (\w+) (?:and|for) the (\w+)\."


def find_owners(text: str) -> dict[str, str]:
    """Owner of each thing at the end of a story, from its sentences in order."""
    owners = {}
    for sentence in re.split(r"(?<=[.!?]) ", text):
        if owned := re.search(r"(\w+) had an? \w+ (\w+) and (\w+) had an? \w+ (\w+)\.", sentence):
            owners = {owned[2]: owned[1], owned[4]: owned[3]}
        if owned := re.search(r"The (\w+) was (\w+)'s and the (\w+) was (\w+)'s", sentence):
            owners = {owned[1]: owned[2], owned[3]: owned[4]}
        if swap := re.search(SWAP, sentence):
            owners[swap[1]], owners[swap[2]] = owners[swap[2]], owners[swap[1]]
        for pattern in TRANSFERS:
            if given := re.search(pattern, sentence):
                owners[given["item"]] = given["taker"]
    return owners


def test_owners_at_the_end():
    rng = Random(11)
    for _ in range(500):
        story = stories.make_ownership_story(TemplateContext(rng))
        owners = find_owners(story.text)
        for question, answer in story.questions:
            item = re.search("Who has the (.*) now", question)[1]
            assert answer == f"{owners[item]} has the {item}.", story
        for item, owner in re.findall(r"At last the (\w+) was (\w+)'s", story.text):
            assert owners[item] == owner


def test_pronouns_match_the_name():
    rng = Random(12)
    for _ in range(300):
        context = TemplateContext(rng)
        stories.set_character(context)
        stories.set_character(context, "2")
        assert context["who"] != context["who2"]
        text = stories.make_day_story(TemplateContext(rng)).text
        assert not (re.search(r"\b[Hh]e\b", text) and re.search(r"\b[Ss]he\b", text)), text


def test_events_of_a_day_are_in_order():
    rng = Random(13)
    for _ in range(300):
        story = stories.make_day_story(TemplateContext(rng))
        times = [re.search(r"at (\d+):(\d+)\?", question).groups() for question, _ in story.questions]
        assert times == sorted(times, key=lambda time: (int(time[0]), int(time[1])))
        assert all(answer in story.text for _, answer in story.questions)
