"""Templates with slots, and the words that fill them."""

import re
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tunekit.nano import words


class Exchange(NamedTuple):
    """A question or request, and its answer."""

    ask: str
    answer: str


class Scene(dict[str, str]):
    """The words of one text, each drawn when a template first asks for its slot; `name2` is a name unlike `name`."""

    def __init__(self, rng: Random, **known: object) -> None:
        super().__init__({slot: str(word) for slot, word in known.items()})
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        draw = SLOTS[slot.rstrip("0123456789")]
        word = draw(self)
        while word in self.values():
            word = draw(self)
        self[slot] = word
        return word

    def fill(self, template: str) -> str:
        """`template` with its slots filled; articles follow the word they meet (`a apple` becomes `an apple`)."""
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", template.format_map(self))

    def say(self, *templates: str) -> str:
        """One of `templates`, filled, as a sentence begins: with a capital letter."""
        text = self.fill(self.rng.choice(templates))
        return text[:1].upper() + text[1:]

    def pair(self, pairs: tuple[tuple[str, str], ...], **known: object) -> Exchange:
        """One of `pairs` (ask, answer), both filled; `known` binds slots first."""
        self.update((slot, str(word)) for slot, word in known.items())
        ask, answer = self.rng.choice(pairs)
        return Exchange(self.fill(ask), self.fill(answer))

    def several(self, slot: str, count: int) -> list[str]:
        """`count` different words of a slot's kind."""
        return [self[f"{slot}{n}"] for n in range(1, count + 1)]


def _of(choices: tuple[str, ...]) -> Callable[[Scene], str]:
    return lambda scene: scene.rng.choice(choices)


def _filled(choices: tuple[str, ...]) -> Callable[[Scene], str]:
    # A scene of its own: the name inside a chore is not the name of the one who does it.
    return lambda scene: Scene(scene.rng).fill(scene.rng.choice(choices))


def _number(low: int, high: int) -> Callable[[Scene], str]:
    return lambda scene: str(scene.rng.randint(low, high))


def _word(scene: Scene) -> str:
    """A word that is in no dictionary, so that it can only be copied."""
    starts, ends = words.SYLLABLES
    body = "".join(scene.rng.choice(starts) for _ in range(scene.rng.randint(1, 3)))
    return body + scene.rng.choice(ends)


def _time(scene: Scene) -> str:
    return f"{scene.rng.randint(0, 23)}:{scene.rng.choice((0, 15, 30, 45, scene.rng.randint(0, 59))):02d}"


def _title(scene: Scene) -> str:
    start, end = scene.rng.choice(words.SONG_STARTS), scene.rng.choice(words.SONG_ENDS)
    return scene.rng.choice((f"{start} {end}", f"The {start} {end}", f"{end} of {scene.rng.choice(words.CITIES)}"))


def _email(scene: Scene) -> str:
    user = scene.rng.choice(words.GIRLS + words.BOYS).lower()
    if scene.rng.random() < 0.5:
        user += f".{scene.rng.choice(words.SURNAMES).lower()}"
    return f"{user}@{_word(scene)}.{scene.rng.choice(('com', 'org', 'net'))}"


def _target(scene: Scene) -> str:
    """A unit that the scene's `unit` turns into."""
    return scene.rng.choice(next(units for units in words.MEASURES if scene["unit"] in units))


def _date(scene: Scene) -> str:
    month = scene.rng.randrange(12)
    return f"{words.MONTHS[month]} {scene.rng.randint(1, words.LENGTHS[month])}"


def _artist(scene: Scene) -> str:
    return f"{scene.rng.choice(words.GIRLS + words.BOYS)} {scene.rng.choice(words.SURNAMES)}"


def _expression(scene: Scene) -> str:
    return f"{scene.rng.randint(2, 99)} {scene.rng.choice('+-*')} {scene.rng.randint(2, 99)}"


SLOTS: dict[str, Callable[[Scene], str]] = {
    "amount": _number(2, 99),
    "animal": _of(words.ANIMALS),
    "artist": _artist,
    "chore": _filled(words.CHORES),
    "city": _of(words.CITIES),
    "code": _number(1000, 99999),
    "color": _of(words.COLORS),
    "date": _date,
    "day": _of(words.DAYS),
    "email": _email,
    "event": _filled(words.EVENTS),
    "expression": _expression,
    "few": _number(2, 9),
    "food": _of(words.FOODS),
    "job": _of(words.PEOPLE),
    "language": _of(words.LANGUAGES),
    "message": _filled(words.MESSAGES),
    "month": _of(words.MONTHS),
    "mood": _of(words.MOODS),
    "name": _of(words.GIRLS + words.BOYS),
    "noun": _of(words.THINGS + words.ANIMALS + words.FOODS),
    "number": _number(0, 999),
    "place": _of(words.PLACES),
    "room": _of(words.ROOMS),
    "song": _title,
    "span": _of(("seconds", "minutes", "hours")),
    "spot": _of(words.SPOTS),
    "surname": _of(words.SURNAMES),
    "target": _target,
    "thing": _of(words.THINGS),
    "time": _time,
    "trait": _of(words.TRAITS),
    "unit": lambda scene: scene.rng.choice(scene.rng.choice(words.MEASURES)),
    "weather": _of(words.WEATHER),
    "word": _word,
}
