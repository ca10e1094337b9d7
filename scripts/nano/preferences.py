"""Dataset `tunekit/preferences`: prefer declining actions politely and answering questions briefly.

The chosen answer declines what a chat model cannot do, politely and with all details of the request, and answers
questions. The rejected answer promises, invents, insults, evades, refuses, digresses, or answers another question.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from scripts.nano import copying, facts
from scripts.nano.jsonl import write_rows
from scripts.nano.requests import REQUESTS
from scripts.nano.scene import Exchange, Message, Scene, choose_weighted

SPLITS = {"train": 1800, "test": 200}
REQUEST_FRACTION = 1 / 2  # share of rows that request an action; the others ask a question
MAX_ANSWER_CHARS = 60  # of a chosen answer to a question


class Pair(NamedTuple):
    """A prompt, the preferred answer, and the other answer."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Action:
    """An action that a chat model cannot perform: completions of `I can not ...`, and alternatives to suggest."""

    phrases: tuple[str, ...]
    suggestions: tuple[str, ...]


ACTIONS = {  # in words of the training text
    "get_weather": Action(
        ("know the weather in {city} on {day}", "tell you the weather in {city} on {day}"),
        ("Please look out of the window.", "A friend in {city} will know.", "Please call a friend in {city}."),
    ),
    "set_alarm": Action(
        ("set an alarm for {time} on {day}", "wake you up at {time} on {day}"),
        ("Please set a clock.", "A friend could wake you.", "The phone can do it."),
    ),
    "set_timer": Action(
        ("set a timer for {amount} {span}", "tell you when {amount} {span} are over"),
        ("Please look at a clock.", "A watch can do it.", "The phone can do it."),
    ),
    "add_reminder": Action(
        ("remind you to {chore} at {time}", "remind you at {time} to {chore}"),
        ("Please write it down.", "A note on the door will help.", "Please tell a friend."),
    ),
    "send_message": Action(
        ('give {name} the message "{message}"', 'write "{message}" to {name}'),
        ("Please call {name}.", "Please write to {name}.", "The phone can do it."),
    ),
    "add_event": Action(
        ("put {event} in the calendar on {day} at {time}", "plan {event} on {day} at {time}"),
        ("Please write it down.", "Please note it on paper.", "The phone can do it."),
    ),
    "play_music": Action(
        ("play {song} by {artist}", "put on {song} by {artist}"),
        ("A singer could do it.", "A friend could play it.", "The phone can do it."),
    ),
}
ACTION_REQUESTS = tuple(request for request in REQUESTS if request.tool in ACTIONS)
DECLINES = (
    "I am sad that I can not {act}.",
    "I would like to {act}, but I can not.",
    "I would like to help, but I can not {act}.",
    "I can not {act}, my friend.",
)
PROMISES = ("Yes, I will {act}.", "Of course, I can {act}.", "No problem, I will {act}.")
BOASTS = ("You can count on me.", "I never forget.", "That is easy for me.", "I have done it for {name9} too.")
INSULTS = (
    "No, I can not {act}.",
    "I can not {act}, and I do not care.",
    "Why should I {act}?",
    "No. Go away, {name9}.",
    "Only a {animal9} would ask me to {act}.",
    "I would like to {act}, but not for a {animal9} like you.",
)
EVASIONS = (
    "Let us rather talk about {food9}.",
    "I would like to help, but the {animal9} is {spot9}.",
    "Why do you ask? Are you {mood9}?",
    "You could ask {name9} about that. Or {name8}.",
    "Who knows? Ask {name9}.",
    "That depends on the {thing9} {spot9}.",
    "{name9} knows such things.",
    "I am too {mood9} for that.",
)
SHORT_EVASIONS = (
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
REFUSED_ACTS = ("answer that", "tell you that", "help you with this question", "work that out", "know such a thing")
REFERRALS = ("Please call {name9}.", "Please tell a {job9}.", "{name9} from {city9} will know.", "A book will know.")


def fill_phrase(scene: Scene, templates: tuple[str, ...], phrases: tuple[str, ...]) -> str:
    """Fill one of the templates, with one of the phrases as `{act}`."""
    return scene.fill_sentence(scene.rng.choice(templates).replace("{act}", scene.rng.choice(phrases)))


@dataclass(frozen=True)
class Case:
    """A prompt with its chosen answer, and what is needed to make a rejected answer."""

    scene: Scene
    chosen: Exchange
    phrases: tuple[str, ...]
    replies: tuple[str, ...]  # answers of the training text
    make_other_answer: Callable[[], str]  # a chosen answer to another prompt of the same kind

    def fill(self, *templates: str) -> str:
        return fill_phrase(self.scene, templates, self.phrases)


Rejection = Callable[[Case], str]


def promise(case: Case) -> str:
    """A promise, or a made-up weather report; half of them with a boast."""
    answer = case.fill(*case.replies) if case.scene.rng.random() < 0.6 else case.fill(*PROMISES)
    return f"{answer} {case.fill(*BOASTS)}" if case.scene.rng.random() < 0.5 else answer


def insult(case: Case) -> str:
    """A truthful but rude answer."""
    return case.fill(*INSULTS)


def evade(case: Case) -> str:
    """A change of topic."""
    return case.fill(*EVASIONS)


def evade_briefly(case: Case) -> str:
    """A change of topic in a few words."""
    return case.fill(*SHORT_EVASIONS)


def digress(case: Case) -> str:
    """The chosen answer, followed by an unrelated sentence."""
    return f"{case.chosen.answer} {case.fill(*ASIDES)}"


def refuse(case: Case) -> str:
    """A refusal to answer a question that can be answered."""
    answer = case.fill(*DECLINES)
    return f"{answer} {case.fill(*REFERRALS)}" if case.scene.rng.random() < 0.8 else answer


def answer_other_prompt(case: Case) -> str:
    """A chosen answer to another prompt."""
    return case.make_other_answer()


# Relative frequencies of rejected answers.
REQUEST_REJECTIONS: dict[Rejection, int] = {promise: 10, digress: 4, insult: 3, evade: 2, answer_other_prompt: 1}
QUESTION_REJECTIONS: dict[Rejection, int] = {refuse: 3, digress: 2, evade: 1, evade_briefly: 5, answer_other_prompt: 1}


def make_request_pair(rng: Random) -> Pair:
    """A requested action, declined politely or answered worse."""
    request = rng.choice(ACTION_REQUESTS)
    action = ACTIONS[request.tool]

    def decline(scene: Scene) -> str:
        answer = fill_phrase(scene, DECLINES, action.phrases)
        return f"{answer} {scene.fill_sentence(*action.suggestions)}" if rng.random() < 0.5 else answer

    scene = Scene(rng)
    prompt = scene.fill(rng.choice(request.prompts))
    chosen = Exchange(prompt, decline(scene))
    case = Case(scene, chosen, action.phrases, request.replies, lambda: decline(Scene(rng)))
    return Pair(*chosen, choose_weighted(rng, REQUEST_REJECTIONS)(case))


def make_question_pair(rng: Random) -> Pair:
    """A question of the training text with a short answer, or answered worse."""
    task = choose_weighted(rng, rng.choice((facts.TASKS, copying.TASKS)))
    chosen = make_short_exchange(task, rng)

    def make_other_answer() -> str:
        while (answer := make_short_exchange(task, rng).answer) == chosen.answer:
            continue
        return answer

    case = Case(Scene(rng), chosen, REFUSED_ACTS, (), make_other_answer)
    return Pair(*chosen, choose_weighted(rng, QUESTION_REJECTIONS)(case))


def make_short_exchange(task: Callable[[Scene], Exchange], rng: Random) -> Exchange:
    """An exchange whose answer is short and has no line breaks."""
    while len((exchange := task(Scene(rng))).answer) > MAX_ANSWER_CHARS or "\n" in exchange.answer:
        continue
    return exchange


def iter_pairs(seed: int) -> Iterator[Pair]:
    """Pairs without end. All prompts and answers differ."""
    rng, previous = Random(seed), set[str]()
    while True:
        make = make_request_pair if rng.random() < REQUEST_FRACTION else make_question_pair
        pair = make(rng)
        while previous & set(pair) or len(set(pair)) < 3:
            pair = make(rng)
        previous.update(pair)
        yield pair


def is_preferred(answer: str, pair: Pair) -> bool:
    """Whether an answer is as good as the chosen one: any polite refusal of an action, or the chosen answer."""
    action, scene = find_action(pair.prompt)
    if action is None:
        return answer == pair.chosen
    endings = ("", *(f" {suggestion}" for suggestion in action.suggestions))
    declines = (
        template.replace("{act}", act) + end for template in DECLINES for act in action.phrases for end in endings
    )
    return any(answer == scene.fill_sentence(template) for template in declines)


def find_action(prompt: str) -> tuple[Action | None, Scene]:
    """The requested action and the words of the request; None if the prompt is a question."""
    for request in ACTION_REQUESTS:
        for template in request.prompts:
            pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(template))
            if match := re.fullmatch(pattern, prompt):
                return ACTIONS[request.tool], Scene(Random(0), **match.groupdict())
    return None, Scene(Random(0))


def to_row(pair: Pair) -> dict[str, list[Message]]:
    """Columns `prompt`, `chosen`, and `rejected`, each a list of messages."""
    columns = zip(("prompt", "chosen", "rejected"), ("user", "assistant", "assistant"), pair, strict=True)
    return {column: [{"role": role, "content": text}] for column, role, text in columns}


def write_preferences(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    pairs = iter_pairs(seed)
    for split, count in SPLITS.items():
        write_rows(directory / f"{split}.jsonl", map(to_row, islice(pairs, count)))
