"""Rendering of templates: each slot is replaced by a random value."""

import re
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple, TypeVar

from scripts.nano import word_lists

Message = dict[str, str]
T = TypeVar("T")
ARTICLE_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiou])")


class Exchange(NamedTuple):
    """A question or request, and its answer."""

    question: str
    answer: str


def to_messages(exchanges: Iterable[Exchange]) -> list[Message]:
    """Chat messages of the user and the assistant."""
    return [
        {"role": role, "content": content}
        for exchange in exchanges
        for role, content in zip(("user", "assistant"), exchange, strict=True)
    ]


class TemplateContext(dict[str, str]):
    """Values of template slots, sampled at the first use of a slot. `name2` is a name that differs from `name`."""

    def __init__(self, rng: Random, **values: object) -> None:
        super().__init__({slot: str(value) for slot, value in values.items()})
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        sample_value = SLOT_SAMPLERS[slot.rstrip("0123456789")]
        while (value := sample_value(self)) in self.values():
            continue
        self[slot] = value
        return value

    def render(self, template: str) -> str:
        """Replace all slots by their values, and `a` by `an` before a vowel."""
        return ARTICLE_BEFORE_VOWEL.sub(r"\1n ", template.format_map(self))

    def render_sentence(self, *templates: str) -> str:
        """Render one of the templates and capitalize the first letter."""
        return capitalize_first(self.render(self.rng.choice(templates)))

    def render_exchange(self, templates: tuple[tuple[str, str], ...], **values: object) -> Exchange:
        """Set the slots in `values`, and render one of the templates (question, answer)."""
        self.update((slot, str(value)) for slot, value in values.items())
        question, answer = self.rng.choice(templates)
        return Exchange(self.render(question), self.render(answer))

    def sample_values(self, slot: str, count: int) -> list[str]:
        """Different values of one kind of slot."""
        return [self[f"{slot}{number}"] for number in range(1, count + 1)]


def sample_weighted(rng: Random, weights: dict[T, int]) -> T:
    """Sample a key with a probability proportional to its weight."""
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


def capitalize_first(text: str) -> str:
    """Capitalize the first letter and keep the case of all others, unlike `str.capitalize`."""
    return text[:1].upper() + text[1:]


def build_list_sampler(choices: tuple[str, ...]) -> Callable[[TemplateContext], str]:
    return lambda context: context.rng.choice(choices)


def build_template_sampler(templates: tuple[str, ...]) -> Callable[[TemplateContext], str]:
    # In a new context, because the name in a chore is not that of the main character.
    return lambda context: TemplateContext(context.rng).render(context.rng.choice(templates))


def build_number_sampler(low: int, high: int) -> Callable[[TemplateContext], str]:
    return lambda context: str(context.rng.randint(low, high))


def sample_word(context: TemplateContext) -> str:
    """A random word without meaning, which a model can only copy from the prompt."""
    starts, ends = word_lists.WORD_PARTS
    body = "".join(context.rng.choice(starts) for _ in range(context.rng.randint(1, 3)))
    return body + context.rng.choice(ends)


def sample_time(context: TemplateContext) -> str:
    return f"{context.rng.randint(0, 23)}:{context.rng.choice((0, 15, 30, 45, context.rng.randint(0, 59))):02d}"


def sample_song_title(context: TemplateContext) -> str:
    start, end = context.rng.choice(word_lists.SONG_STARTS), context.rng.choice(word_lists.SONG_ENDS)
    return context.rng.choice(
        (f"{start} {end}", f"The {start} {end}", f"{end} of {context.rng.choice(word_lists.CITIES)}")
    )


def sample_email(context: TemplateContext) -> str:
    user = context.rng.choice(word_lists.FEMALE_NAMES + word_lists.MALE_NAMES).lower()
    if context.rng.random() < 0.5:
        user += f".{context.rng.choice(word_lists.SURNAMES).lower()}"
    return f"{user}@{sample_word(context)}.{context.rng.choice(('com', 'org', 'net'))}"


def sample_target_unit(context: TemplateContext) -> str:
    """A unit of the same dimension as that of the slot `unit`."""
    return context.rng.choice(next(units for units in word_lists.UNITS_BY_DIMENSION if context["unit"] in units))


def sample_date(context: TemplateContext) -> str:
    month = context.rng.randrange(12)
    return f"{word_lists.MONTHS[month]} {context.rng.randint(1, word_lists.MONTH_LENGTHS[month])}"


def sample_artist(context: TemplateContext) -> str:
    first_name = context.rng.choice(word_lists.FEMALE_NAMES + word_lists.MALE_NAMES)
    return f"{first_name} {context.rng.choice(word_lists.SURNAMES)}"


def sample_expression(context: TemplateContext) -> str:
    return f"{context.rng.randint(2, 99)} {context.rng.choice('+-*')} {context.rng.randint(2, 99)}"


SLOT_SAMPLERS: dict[str, Callable[[TemplateContext], str]] = {
    "amount": build_number_sampler(2, 99),
    "animal": build_list_sampler(word_lists.ANIMALS),
    "artist": sample_artist,
    "chore": build_template_sampler(word_lists.CHORES),
    "city": build_list_sampler(word_lists.CITIES),
    "code": build_number_sampler(1000, 99999),
    "color": build_list_sampler(word_lists.COLORS),
    "date": sample_date,
    "day": build_list_sampler(word_lists.DAYS),
    "email": sample_email,
    "event": build_template_sampler(word_lists.EVENTS),
    "expression": sample_expression,
    "few": build_number_sampler(2, 9),
    "food": build_list_sampler(word_lists.FOODS),
    "job": build_list_sampler(word_lists.JOBS),
    "language": build_list_sampler(word_lists.LANGUAGES),
    "message": build_template_sampler(word_lists.MESSAGES),
    "month": build_list_sampler(word_lists.MONTHS),
    "mood": build_list_sampler(word_lists.MOODS),
    "name": build_list_sampler(word_lists.FEMALE_NAMES + word_lists.MALE_NAMES),
    "noun": build_list_sampler(word_lists.THINGS + word_lists.ANIMALS + word_lists.FOODS),
    "number": build_number_sampler(0, 999),
    "place": build_list_sampler(word_lists.PLACES),
    "room": build_list_sampler(word_lists.ROOMS),
    "song": sample_song_title,
    "span": build_list_sampler(("seconds", "minutes", "hours")),
    "spot": build_list_sampler(word_lists.LOCATION_PHRASES),
    "surname": build_list_sampler(word_lists.SURNAMES),
    "target": sample_target_unit,
    "thing": build_list_sampler(word_lists.THINGS),
    "time": sample_time,
    "trait": build_list_sampler(word_lists.ADJECTIVES),
    "unit": lambda context: context.rng.choice(context.rng.choice(word_lists.UNITS_BY_DIMENSION)),
    "weather": build_list_sampler(word_lists.WEATHER),
    "word": sample_word,
}
