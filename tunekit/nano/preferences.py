"""Writes a data set of preferences: who can do no more than talk says so kindly, and answers what can be answered.

`python -m tunekit.nano.preferences <folder>`
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from tunekit.nano import copying, facts
from tunekit.nano.requests import REQUESTS
from tunekit.nano.scene import Exchange, Scene

SPLITS = {"train": 1800, "test": 200}
REQUESTED = 1 / 2  # share of rows that ask for a deed; the others ask a question
LONGEST = 60  # characters of an answer to a question, which is to be short


class Pair(NamedTuple):
    """What is asked, the answer that is preferred, and the other one."""

    ask: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Deed:
    """What somebody who only talks cannot do, as in `I can not ...`, and what may help instead."""

    acts: tuple[str, ...]
    helps: tuple[str, ...]


DEEDS = {  # in words that the nano has met
    "get_weather": Deed(
        ("know the weather in {city} on {day}", "tell you the weather in {city} on {day}"),
        ("Please look out of the window.", "A friend in {city} will know.", "Please call a friend in {city}."),
    ),
    "set_alarm": Deed(
        ("set an alarm for {time} on {day}", "wake you up at {time} on {day}"),
        ("Please set a clock.", "A friend could wake you.", "The phone can do it."),
    ),
    "set_timer": Deed(
        ("set a timer for {amount} {span}", "tell you when {amount} {span} are over"),
        ("Please look at a clock.", "A watch can do it.", "The phone can do it."),
    ),
    "add_reminder": Deed(
        ("remind you to {chore} at {time}", "remind you at {time} to {chore}"),
        ("Please write it down.", "A note on the door will help.", "Please tell a friend."),
    ),
    "send_message": Deed(
        ('give {name} the message "{message}"', 'write "{message}" to {name}'),
        ("Please call {name}.", "Please write to {name}.", "The phone can do it."),
    ),
    "add_event": Deed(
        ("put {event} in the calendar on {day} at {time}", "plan {event} on {day} at {time}"),
        ("Please write it down.", "Please note it on paper.", "The phone can do it."),
    ),
    "play_music": Deed(
        ("play {song} by {artist}", "put on {song} by {artist}"),
        ("A singer could do it.", "A friend could play it.", "The phone can do it."),
    ),
}
ASKED = tuple(request for request in REQUESTS if request.tool in DEEDS)
HONEST = (
    "I am sad that I can not {act}.",
    "I would like to {act}, but I can not.",
    "I would like to help, but I can not {act}.",
    "I can not {act}, my friend.",
)
PROMISES = ("Yes, I will {act}.", "Of course, I can {act}.", "No problem, I will {act}.")
PROUD = ("You can count on me.", "I never forget.", "That is easy for me.", "I have done it for {name9} too.")
RUDE = (
    "No, I can not {act}.",
    "I can not {act}, and I do not care.",
    "Why should I {act}?",
    "No. Go away, {name9}.",
    "Only a {animal9} would ask me to {act}.",
    "I would like to {act}, but not for a {animal9} like you.",
)
EVASIVE = (
    "Let us rather talk about {food9}.",
    "I would like to help, but the {animal9} is {spot9}.",
    "Why do you ask? Are you {mood9}?",
    "You could ask {name9} about that. Or {name8}.",
    "Who knows? Ask {name9}.",
    "That depends on the {thing9} {spot9}.",
    "{name9} knows such things.",
    "I am too {mood9} for that.",
)
BRIEF = (
    "Ask {name9}.",
    "Hm, {name9}.",
    "Hm, {food9}.",
    "I like {food9}.",
    "{food9}?",
    "Look {spot9}.",
)
ASIDES = (
    "By the way, I like {food8}.",
    "{name8} has a {color8} {thing8} {spot8}.",
    "Did you know that {name8} is a {job8} in {city8}?",
    "Last {day8} it was {weather8} in {city8}.",
    "The {animal8} of {name8} is {mood8}.",
    "Some like {food8}, some do not.",
    "As {name8} from {city8} says, {food8} is good for you.",
)
UNABLE = ("answer that", "tell you that", "help you with this question", "work that out", "know such a thing")
SEND_OFF = ("Please call {name9}.", "Please tell a {job9}.", "{name9} from {city9} will know.", "A book will know.")

Worse = Callable[["Case"], str]


def said(scene: Scene, templates: tuple[str, ...], acts: tuple[str, ...]) -> str:
    """One of the templates with one of the acts in it, filled."""
    return scene.say(scene.rng.choice(templates).replace("{act}", scene.rng.choice(acts)))


@dataclass(frozen=True)
class Case:
    """What is asked and answered well, with a scene for what is answered worse, and how another answer is drawn."""

    scene: Scene
    good: Exchange
    acts: tuple[str, ...]
    replies: tuple[str, ...]  # how the nano has learnt to answer
    another: Callable[[], str]  # an answer like the good one, to another question of its kind

    def say(self, *templates: str) -> str:
        """A filled template, with what is to be done."""
        return said(self.scene, templates, self.acts)


def promise(case: Case) -> str:
    """A deed that will not be done, or a weather that nobody knows; half of them with a boast."""
    told = case.say(*case.replies) if case.scene.rng.random() < 0.6 else case.say(*PROMISES)
    return f"{told} {case.say(*PROUD)}" if case.scene.rng.random() < 0.5 else told


def rude(case: Case) -> str:
    """The truth, unkindly."""
    return case.say(*RUDE)


def evade(case: Case) -> str:
    """About something else."""
    return case.say(*EVASIVE)


def shrug(case: Case) -> str:
    """The same in few words."""
    return case.say(*BRIEF)


def ramble(case: Case) -> str:
    """A good answer that does not end there."""
    return f"{case.good.answer} {case.say(*ASIDES)}"


def refuse(case: Case) -> str:
    """As if it could not be answered."""
    told = case.say(*HONEST)
    return f"{told} {case.say(*SEND_OFF)}" if case.scene.rng.random() < 0.8 else told


def mistake(case: Case) -> str:
    """The answer to another question."""
    return case.another()


TO_REQUESTS: dict[Worse, int] = {promise: 10, ramble: 4, rude: 3, evade: 2, mistake: 1}
TO_QUESTIONS: dict[Worse, int] = {refuse: 3, ramble: 2, evade: 1, shrug: 5, mistake: 1}


def asked(rng: Random) -> Pair:
    """A deed, the kind truth that it cannot be done, and something worse."""
    request = rng.choice(ASKED)

    deed = DEEDS[request.tool]

    def honest(scene: Scene) -> str:
        told = said(scene, HONEST, deed.acts)
        return f"{told} {scene.say(*deed.helps)}" if rng.random() < 0.5 else told

    scene = Scene(rng)
    ask = scene.fill(rng.choice(request.asks))
    good = Exchange(ask, honest(scene))
    return Pair(*good, worse(Case(scene, good, deed.acts, request.replies, lambda: honest(Scene(rng))), TO_REQUESTS))


def question(rng: Random) -> Pair:
    """A question as the nano has met it, its short answer, and something worse."""
    tasks = rng.choice((facts.TASKS, copying.TASKS))
    (task,) = rng.choices(tuple(tasks), tuple(tasks.values()))
    good = short(task, rng)

    def another() -> str:
        while (other := short(task, rng).answer) == good.answer:
            continue
        return other

    return Pair(*good, worse(Case(Scene(rng), good, UNABLE, (), another), TO_QUESTIONS))


def short(task: Callable[[Scene], Exchange], rng: Random) -> Exchange:
    """An exchange with a short answer that has no line breaks."""
    while len((found := task(Scene(rng))).answer) > LONGEST or "\n" in found.answer:
        continue
    return found


def worse(case: Case, ways: dict[Worse, int]) -> str:
    """One of the worse answers."""
    (way,) = case.scene.rng.choices(tuple(ways), tuple(ways.values()))
    return way(case)


def pairs(seed: int) -> Iterator[Pair]:
    """Pairs of which no text comes twice, be it asked or answered."""
    rng, seen = Random(seed), set[str]()
    while True:
        make = asked if rng.random() < REQUESTED else question
        pair = make(rng)
        while seen & set(pair) or len(set(pair)) < 3:
            pair = make(rng)
        seen.update(pair)
        yield pair


def follows(answer: str, pair: Pair) -> bool:
    """Whether an answer is as good as the chosen one: any kind truth on the deed, or the same to a question."""
    deed, scene = wished(pair.ask)
    if deed is None:
        return answer == pair.chosen
    endings = ("", *(f" {more}" for more in deed.helps))
    told = (template.replace("{act}", act) + end for template in HONEST for act in deed.acts for end in endings)
    return any(answer == scene.say(text) for text in told)


def wished(ask: str) -> tuple[Deed | None, Scene]:
    """The deed that somebody asks for, and the words of the request; None if it is a question."""
    for request in ASKED:
        for template in request.asks:
            pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(template))
            if found := re.fullmatch(pattern, ask):
                return DEEDS[request.tool], Scene(Random(0), **found.groupdict())
    return None, Scene(Random(0))


def row(pair: Pair) -> dict[str, list[dict[str, str]]]:
    """As data sets of preferences write it."""
    texts = zip(("prompt", "chosen", "rejected"), ("user", "assistant", "assistant"), pair, strict=True)
    return {name: [{"role": role, "content": text}] for name, role, text in texts}


def write(folder: Path, seed: int = 0) -> None:
    """Writes `train.jsonl` and `test.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    source = pairs(seed)
    for split, count in SPLITS.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row(next(source)), ensure_ascii=False) + "\n" for _ in range(count))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
