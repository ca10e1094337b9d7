"""Dataset `tunekit/preferences`: decline requests for actions politely, and answer questions briefly.

The chosen answer declines an action that a chat model cannot perform, politely and with all details of the request, or
answers a question. The rejected answer is a promise, an insult, an evasion, a refusal, a digression, or an answer to
another prompt.
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
from scripts.nano.templates import Exchange, Message, TemplateContext, sample_weighted
from scripts.nano.tool_requests import TOOL_REQUESTS

SPLIT_SIZES = {"train": 1800, "test": 200}
REQUEST_FRACTION = 1 / 2  # of rows; the other rows ask a question
MAX_ANSWER_CHARS = 60  # of a chosen answer to a question


class PreferencePair(NamedTuple):
    """A prompt, the preferred answer, and the rejected answer."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Action:
    """An action that a chat model cannot perform: completions of `I can not ...`, and suggested alternatives."""

    phrases: tuple[str, ...]
    suggestions: tuple[str, ...]


ACTIONS = {  # contain only words of the training text
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
ACTION_REQUESTS = tuple(request for request in TOOL_REQUESTS if request.tool in ACTIONS)
DECLINE_TEMPLATES = (
    "I am sad that I can not {act}.",
    "I would like to {act}, but I can not.",
    "I would like to help, but I can not {act}.",
    "I can not {act}, my friend.",
)
PROMISE_TEMPLATES = ("Yes, I will {act}.", "Of course, I can {act}.", "No problem, I will {act}.")
BOAST_TEMPLATES = ("You can count on me.", "I never forget.", "That is easy for me.", "I have done it for {name9} too.")
INSULT_TEMPLATES = (
    "No, I can not {act}.",
    "I can not {act}, and I do not care.",
    "Why should I {act}?",
    "No. Go away, {name9}.",
    "Only a {animal9} would ask me to {act}.",
    "I would like to {act}, but not for a {animal9} like you.",
)
EVASION_TEMPLATES = (
    "Let us rather talk about {food9}.",
    "I would like to help, but the {animal9} is {spot9}.",
    "Why do you ask? Are you {mood9}?",
    "You could ask {name9} about that. Or {name8}.",
    "Who knows? Ask {name9}.",
    "That depends on the {thing9} {spot9}.",
    "{name9} knows such things.",
    "I am too {mood9} for that.",
)
SHORT_EVASION_TEMPLATES = (
    "Ask {name9}.",
    "Hm, {name9}.",
    "Hm, {food9}.",
    "I like {food9}.",
    "{food9}?",
    "Look {spot9}.",
)
DIGRESSION_TEMPLATES = (
    "By the way, I like {food8}.",
    "{name8} has a {color8} {thing8} {spot8}.",
    "Did you know that {name8} is a {job8} in {city8}?",
    "Last {day8} it was {weather8} in {city8}.",
    "The {animal8} of {name8} is {mood8}.",
    "Some like {food8}, some do not.",
    "As {name8} from {city8} says, {food8} is good for you.",
)
REFUSED_ACTION_PHRASES = (
    "answer that",
    "tell you that",
    "help you with this question",
    "work that out",
    "know such a thing",
)
REFERRAL_TEMPLATES = (
    "Please call {name9}.",
    "Please tell a {job9}.",
    "{name9} from {city9} will know.",
    "A book will know.",
)


def render_phrase(context: TemplateContext, templates: tuple[str, ...], phrases: tuple[str, ...]) -> str:
    """Render one of the templates with one of the phrases as `{act}`."""
    return context.render_sentence(context.rng.choice(templates).replace("{act}", context.rng.choice(phrases)))


@dataclass(frozen=True)
class RejectionInputs:
    """A prompt with its chosen answer, and the templates of rejected answers."""

    context: TemplateContext
    chosen: Exchange
    phrases: tuple[str, ...]
    replies: tuple[str, ...]  # of the training text
    make_other_answer: Callable[[], str]  # a chosen answer to another prompt of the same kind

    def render(self, *templates: str) -> str:
        return render_phrase(self.context, templates, self.phrases)


RejectionFunction = Callable[[RejectionInputs], str]


def make_promise(inputs: RejectionInputs) -> str:
    """A promise or an invented weather report, half of them followed by a boast."""
    answer = inputs.render(*inputs.replies) if inputs.context.rng.random() < 0.6 else inputs.render(*PROMISE_TEMPLATES)
    return f"{answer} {inputs.render(*BOAST_TEMPLATES)}" if inputs.context.rng.random() < 0.5 else answer


def make_insult(inputs: RejectionInputs) -> str:
    """A truthful but rude answer."""
    return inputs.render(*INSULT_TEMPLATES)


def make_evasion(inputs: RejectionInputs) -> str:
    """A change of topic."""
    return inputs.render(*EVASION_TEMPLATES)


def make_short_evasion(inputs: RejectionInputs) -> str:
    """A change of topic in a few words."""
    return inputs.render(*SHORT_EVASION_TEMPLATES)


def make_digression(inputs: RejectionInputs) -> str:
    """The chosen answer, followed by an unrelated sentence."""
    return f"{inputs.chosen.answer} {inputs.render(*DIGRESSION_TEMPLATES)}"


def make_refusal(inputs: RejectionInputs) -> str:
    """A refusal to answer a question, most of them followed by a referral."""
    answer = inputs.render(*DECLINE_TEMPLATES)
    return f"{answer} {inputs.render(*REFERRAL_TEMPLATES)}" if inputs.context.rng.random() < 0.8 else answer


def answer_another_prompt(inputs: RejectionInputs) -> str:
    """A chosen answer to another prompt."""
    return inputs.make_other_answer()


REQUEST_REJECTION_WEIGHTS: dict[RejectionFunction, int] = {
    make_promise: 10,
    make_digression: 4,
    make_insult: 3,
    make_evasion: 2,
    answer_another_prompt: 1,
}
QUESTION_REJECTION_WEIGHTS: dict[RejectionFunction, int] = {
    make_refusal: 3,
    make_digression: 2,
    make_evasion: 1,
    make_short_evasion: 5,
    answer_another_prompt: 1,
}


def make_request_pair(rng: Random) -> PreferencePair:
    """A pair for a requested action: declined politely, or rejected."""
    request = rng.choice(ACTION_REQUESTS)
    action = ACTIONS[request.tool]

    def make_decline(context: TemplateContext) -> str:
        answer = render_phrase(context, DECLINE_TEMPLATES, action.phrases)
        return f"{answer} {context.render_sentence(*action.suggestions)}" if rng.random() < 0.5 else answer

    context = TemplateContext(rng)
    prompt = context.render(rng.choice(request.prompts))
    chosen = Exchange(prompt, make_decline(context))
    inputs = RejectionInputs(
        context, chosen, action.phrases, request.replies, lambda: make_decline(TemplateContext(rng))
    )
    return PreferencePair(*chosen, sample_weighted(rng, REQUEST_REJECTION_WEIGHTS)(inputs))


def make_question_pair(rng: Random) -> PreferencePair:
    """A pair for a question of the training text: answered briefly, or rejected."""
    make_question = sample_weighted(rng, rng.choice((facts.TASK_WEIGHTS, copying.TASK_WEIGHTS)))
    chosen = make_short_exchange(make_question, rng)

    def make_other_answer() -> str:
        while (answer := make_short_exchange(make_question, rng).answer) == chosen.answer:
            continue
        return answer

    inputs = RejectionInputs(TemplateContext(rng), chosen, REFUSED_ACTION_PHRASES, (), make_other_answer)
    return PreferencePair(*chosen, sample_weighted(rng, QUESTION_REJECTION_WEIGHTS)(inputs))


def make_short_exchange(make_question: Callable[[TemplateContext], Exchange], rng: Random) -> Exchange:
    """An exchange whose answer is short and has no line breaks."""
    while len((exchange := make_question(TemplateContext(rng))).answer) > MAX_ANSWER_CHARS or "\n" in exchange.answer:
        continue
    return exchange


def iter_pairs(seed: int) -> Iterator[PreferencePair]:
    """Yield pairs without end; no prompt or answer repeats."""
    rng, seen = Random(seed), set[str]()
    while True:
        make_pair = make_request_pair if rng.random() < REQUEST_FRACTION else make_question_pair
        pair = make_pair(rng)
        while seen & set(pair) or len(set(pair)) < 3:
            pair = make_pair(rng)
        seen.update(pair)
        yield pair


def is_preferred(answer: str, pair: PreferencePair) -> bool:
    """Whether an answer is equivalent to the chosen one: any polite refusal of the action, or the same answer."""
    action, context = find_action(pair.prompt)
    if action is None:
        return answer == pair.chosen
    endings = ("", *(f" {suggestion}" for suggestion in action.suggestions))
    declines = (
        template.replace("{act}", phrase) + ending
        for template in DECLINE_TEMPLATES
        for phrase in action.phrases
        for ending in endings
    )
    return any(answer == context.render_sentence(template) for template in declines)


def find_action(prompt: str) -> tuple[Action | None, TemplateContext]:
    """The requested action and the slot values of the request. The action is None if the prompt is a question."""
    for request in ACTION_REQUESTS:
        for template in request.prompts:
            pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(template))
            if match := re.fullmatch(pattern, prompt):
                return ACTIONS[request.tool], TemplateContext(Random(0), **match.groupdict())
    return None, TemplateContext(Random(0))


def build_row(pair: PreferencePair) -> dict[str, list[Message]]:
    """Columns `prompt`, `chosen`, and `rejected`, each a list of messages."""
    columns = zip(("prompt", "chosen", "rejected"), ("user", "assistant", "assistant"), pair, strict=True)
    return {column: [{"role": role, "content": text}] for column, role, text in columns}


def write_preferences(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    pairs = iter_pairs(seed)
    for split, count in SPLIT_SIZES.items():
        write_rows(directory / f"{split}.jsonl", map(build_row, islice(pairs, count)))
