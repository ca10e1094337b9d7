"""Templates with slots, and the random words that fill them."""

import re
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple, TypeVar

from scripts.nano import words

Message = dict[str, str]
T = TypeVar("T")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


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


class Scene(dict[str, str]):
    """Words by slot. Each is drawn when a template first uses its slot; `name2` is a name that differs from `name`."""

    def __init__(self, rng: Random, **values: object) -> None:
        super().__init__({slot: str(value) for slot, value in values.items()})
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        draw = SLOTS[slot.rstrip("0123456789")]
        word = draw(self)
        while word in self.values():
            word = draw(self)
        self[slot] = word
        return word

    def fill(self, template: str) -> str:
        """Fill all slots. Articles agree with the next word (`a apple` becomes `an apple`)."""
        return ARTICLE.sub(r"\1n ", template.format_map(self))

    def fill_sentence(self, *templates: str) -> str:
        """Fill one of the templates and capitalize the first letter."""
        return capitalize_first(self.fill(self.rng.choice(templates)))

    def fill_exchange(self, templates: tuple[tuple[str, str], ...], **values: object) -> Exchange:
        """Fill one of the pairs (question, answer). `values` are bound to their slots first."""
        self.update((slot, str(value)) for slot, value in values.items())
        question, answer = self.rng.choice(templates)
        return Exchange(self.fill(question), self.fill(answer))

    def draw_words(self, slot: str, count: int) -> list[str]:
        """Different words for one kind of slot."""
        return [self[f"{slot}{number}"] for number in range(1, count + 1)]


def choose_weighted(rng: Random, weights: dict[T, int]) -> T:
    """One of the keys, with the given relative frequencies."""
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


def capitalize_first(text: str) -> str:
    """`text` with a capital first letter; the others are unchanged."""
    return text[:1].upper() + text[1:]


def choose_from(choices: tuple[str, ...]) -> Callable[[Scene], str]:
    return lambda scene: scene.rng.choice(choices)


def choose_filled(templates: tuple[str, ...]) -> Callable[[Scene], str]:
    # A separate scene, because the name in a chore differs from that of the main character.
    return lambda scene: Scene(scene.rng).fill(scene.rng.choice(templates))


def choose_number(low: int, high: int) -> Callable[[Scene], str]:
    return lambda scene: str(scene.rng.randint(low, high))


def make_word(scene: Scene) -> str:
    """An invented word, which can only be copied from the context."""
    starts, ends = words.SYLLABLES
    body = "".join(scene.rng.choice(starts) for _ in range(scene.rng.randint(1, 3)))
    return body + scene.rng.choice(ends)


def make_time(scene: Scene) -> str:
    return f"{scene.rng.randint(0, 23)}:{scene.rng.choice((0, 15, 30, 45, scene.rng.randint(0, 59))):02d}"


def make_song_title(scene: Scene) -> str:
    start, end = scene.rng.choice(words.SONG_STARTS), scene.rng.choice(words.SONG_ENDS)
    return scene.rng.choice((f"{start} {end}", f"The {start} {end}", f"{end} of {scene.rng.choice(words.CITIES)}"))


def make_email(scene: Scene) -> str:
    user = scene.rng.choice(words.GIRLS + words.BOYS).lower()
    if scene.rng.random() < 0.5:
        user += f".{scene.rng.choice(words.SURNAMES).lower()}"
    return f"{user}@{make_word(scene)}.{scene.rng.choice(('com', 'org', 'net'))}"


def choose_target_unit(scene: Scene) -> str:
    """A unit of the same dimension as the `unit` of the scene."""
    return scene.rng.choice(next(units for units in words.MEASURES if scene["unit"] in units))


def make_date(scene: Scene) -> str:
    month = scene.rng.randrange(12)
    return f"{words.MONTHS[month]} {scene.rng.randint(1, words.MONTH_LENGTHS[month])}"


def make_artist(scene: Scene) -> str:
    return f"{scene.rng.choice(words.GIRLS + words.BOYS)} {scene.rng.choice(words.SURNAMES)}"


def make_expression(scene: Scene) -> str:
    return f"{scene.rng.randint(2, 99)} {scene.rng.choice('+-*')} {scene.rng.randint(2, 99)}"


SLOTS: dict[str, Callable[[Scene], str]] = {
    "amount": choose_number(2, 99),
    "animal": choose_from(words.ANIMALS),
    "artist": make_artist,
    "chore": choose_filled(words.CHORES),
    "city": choose_from(words.CITIES),
    "code": choose_number(1000, 99999),
    "color": choose_from(words.COLORS),
    "date": make_date,
    "day": choose_from(words.DAYS),
    "email": make_email,
    "event": choose_filled(words.EVENTS),
    "expression": make_expression,
    "few": choose_number(2, 9),
    "food": choose_from(words.FOODS),
    "job": choose_from(words.JOBS),
    "language": choose_from(words.LANGUAGES),
    "message": choose_filled(words.MESSAGES),
    "month": choose_from(words.MONTHS),
    "mood": choose_from(words.MOODS),
    "name": choose_from(words.GIRLS + words.BOYS),
    "noun": choose_from(words.THINGS + words.ANIMALS + words.FOODS),
    "number": choose_number(0, 999),
    "place": choose_from(words.PLACES),
    "room": choose_from(words.ROOMS),
    "song": make_song_title,
    "span": choose_from(("seconds", "minutes", "hours")),
    "spot": choose_from(words.SPOTS),
    "surname": choose_from(words.SURNAMES),
    "target": choose_target_unit,
    "thing": choose_from(words.THINGS),
    "time": make_time,
    "trait": choose_from(words.TRAITS),
    "unit": lambda scene: scene.rng.choice(scene.rng.choice(words.MEASURES)),
    "weather": choose_from(words.WEATHER),
    "word": make_word,
}
