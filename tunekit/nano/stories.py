"""Small stories: people who own, give, lose and find things, go to places, and feel something about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tunekit.nano import words
from tunekit.nano.scene import Exchange, Scene


@dataclass(frozen=True)
class Story:
    """A story, and questions that it answers."""

    text: str
    questions: list[Exchange] = field(default_factory=list)


def person(scene: Scene, slot: str = "") -> None:
    """Binds `who`, `he`, `He`, `his` and `him` (with `slot` behind each) to one person."""
    girl = scene.rng.random() < 0.5
    names = [name for name in (words.GIRLS if girl else words.BOYS) if name not in scene.values()]
    pronouns = ("she", "She", "her", "her") if girl else ("he", "He", "his", "him")
    bound = (scene.rng.choice(names), *pronouns)
    slots = (part + slot for part in ("who", "he", "He", "his", "him"))
    scene.update(zip(slots, bound, strict=True))


OPENINGS = (
    "One {weather} day, {who} and {who2} were at the {place}.",
    "{who} and {who2} lived in {city}.",
    "On {day}, {who} went to the {place} with {who2}.",
    "It was a {weather} morning in {city}. {who} and {who2} were {mood}.",
    "{who}, a {job}, had a friend called {who2}.",
    "At {time}, {who} met {who2} at the {place}.",
)
OWNS = (
    "{who} had a {trait} {thing} and {who2} had a {color} {thing2}.",
    "The {thing} was {who}'s and the {thing2} was {who2}'s.",
)
GIVES = (
    "{giver} gave the {item} to {taker}.",
    "{giver} did not need the {item} any more, so {taker} got it.",
    '"Here, take the {item}," said {giver}, and {taker} took it.',
    "{taker} asked for the {item}, and {giver} gave it to {taker}.",
    "Because {taker} was {feeling}, {giver} gave {taker} the {item}.",
    "{taker} bought the {item} from {giver} for {few} coins.",
)
SWAPS = ("Then they swapped the {thing} and the {thing2}.", "{who} and {who2} traded: the {thing} for the {thing2}.")
FILLERS = (
    "They sat down {spot} and ate some {food}.",
    "A {animal} ran by, and they laughed.",
    "After that it became {weather2}.",
    "{who2} told {who} about {city2}.",
    "They talked until {time2}.",
)
HOLDS = (
    "In the end, {holder} had the {item}.",
    "So now {holder} has the {item}.",
    "At last the {item} was {holder}'s.",
)
MOODS = ("{who} felt {mood2}.", "Both of them were {mood2}.", "{who2} was {mood2} and went home.", "It was a good day.")


def owners(scene: Scene) -> Story:
    """Two people, two things, and who has what at the end."""
    person(scene)
    person(scene, "2")
    one, two = scene["who"], scene["who2"]
    holder = {scene["thing"]: one, scene["thing2"]: two}
    told = [scene.say(*OPENINGS), scene.say(*OWNS)]
    for _ in range(scene.rng.randint(1, 3)):
        told.append(_event(scene, holder))
        if scene.rng.random() < 0.4:
            told.append(scene.say(*FILLERS))
    if scene.rng.random() < 0.6:
        told += [scene.say(*HOLDS) for item in holder if scene.update(item=item, holder=holder[item]) is None]
    if scene.rng.random() < 0.5:
        told.append(scene.say(*MOODS))
    asked = [Exchange(f"Who has the {item} now?", f"{who} has the {item}.") for item, who in holder.items()]
    return Story(" ".join(told), asked)


def _event(scene: Scene, holder: dict[str, str]) -> str:
    """Something that changes who holds what; `holder` changes with it."""
    one, two = scene["who"], scene["who2"]
    other = {one: two, two: one}
    if len(set(holder.values())) == 2 and scene.rng.random() < 0.3:
        holder.update({item: other[who] for item, who in holder.items()})
        return scene.say(*SWAPS)
    item = scene.rng.choice(tuple(holder))
    scene.update(item=item, giver=holder[item], taker=other[holder[item]], feeling=scene.rng.choice(words.MOODS))
    holder[item] = scene["taker"]
    return scene.say(*GIVES)


LOST = (
    "{who} could not find {his} {thing}.",
    "One {weather} day {who} lost {his} {color} {thing}.",
    '"Where is my {thing}?" asked {who}. {He} was {mood}.',
)
LOOKS = (
    "{he} looked {tried}, but it was not there.",
    "First {he} looked {tried}. There was only a {other}.",
    "{who} asked the {job}, but the {job} had not seen it.",
)
FOUND = (
    "Then {he} looked {spot}, and there it was.",
    "At {time} {who2} found it {spot} and called {him}.",
    "A {animal} had carried it off, and now it lay {spot}.",
)
THANKS = (
    "{he} thanked {who2} and put the {thing} in {his} bag.",
    "Since then {he} keeps the {thing} {spot2}.",
    "{who} was {mood2} again.",
)


def search(scene: Scene) -> Story:
    """Something lost, looked for and found."""
    person(scene)
    person(scene, "2")
    told = [scene.say(*LOST)]
    for n in range(scene.rng.randint(1, 3)):
        scene.update(tried=scene[f"spot{n + 3}"], other=scene[f"thing{n + 3}"])
        told.append(scene.say(*LOOKS))
    told += [scene.say(*FOUND), scene.say(*THANKS)]
    asked = [
        scene.pair(
            (
                ("What did {who} lose?", "{who} lost {his} {thing}."),
                ("Whose {thing} was lost?", "It was {who}'s {thing}."),
            )
        ),
        scene.pair((("Where was the {thing}?", "The {thing} was {spot}."),)),
    ]
    return Story(" ".join(told), asked)


ERRANDS = (
    "{who} wanted to {chore}, but {he} had no {thing}.",
    "{who} the {job} needed a {thing}, because {his} old one was broken.",
    "{who} wished for a {color} {thing} more than for anything else.",
)
GOES = (
    "So {he} went to the {place} by {way}.",
    "{he} took the {way} to {city} and walked to the {place}.",
    "It was {weather}, but {he} went to the {place} all the same.",
)
DEALS = (
    'There {he} met {who2}. "Do you have a {thing}?" asked {who}. "Yes," said {who2}, "it costs {few} coins."',
    '{who2} was there. "I will give you my {thing} for {some} {food}," said {who2}.',
    'At the {place} stood {who2}, the {job2}. "A {thing}?" said {who2}. "Take mine."',
)
PAYS = (
    "{who} agreed and carried the {thing} home.",
    "{he} thanked {him2} and took the {thing}.",
    "So {who2} gave {who} the {thing}.",
)


def errand(scene: Scene) -> Story:
    """Somebody needs a thing, goes somewhere, and gets it."""
    person(scene)
    person(scene, "2")
    scene.update(
        way=scene.rng.choice(("bus", "train", "bike", "boat")), some=scene.rng.choice(("some", "a bag of", "a box of"))
    )
    told = [scene.say(*part) for part in (ERRANDS, GOES, DEALS, PAYS, MOODS)]
    asked = [
        scene.pair(
            (("Who needed a {thing}?", "{who} needed a {thing}."), ("What did {who} need?", "{who} needed a {thing}."))
        ),
        scene.pair(
            (
                ("Where did {who} go?", "{who} went to the {place}."),
                ("Who gave {who} the {thing}?", "{who2} gave {who} the {thing}."),
            )
        ),
    ]
    return Story(" ".join(told), asked)


MORNING = ("{who} got up at {clock}.", "At {clock} {who} woke up in {city}.", "{who}'s day began at {clock}.")
HOURS = (
    "At {clock} {he} had to {task}.",
    "{he} wanted to {task} at {clock}.",
    "At {clock} {he} had {plan}.",
    "{he} met {friend} at {clock}.",
    "At {clock} {he} was at the {where}.",
)
EVENING = (
    "{he} came home {mood} and slept well.",
    "It was {weather} when {he} went to bed.",
    "Then {he} wrote a letter to {who2}.",
)


def day(scene: Scene) -> Story:
    """A day with its hours, in order."""
    person(scene)
    person(scene, "2")
    hours = sorted(scene.rng.sample(range(6 * 60, 22 * 60, 15), scene.rng.randint(3, 5)))
    told = [scene.say("{day}.", "It was {date}.", "It was {day}.", "On {day} it was {weather}.")]
    asked = []
    for n, minutes in enumerate(hours):
        scene["clock"] = f"{minutes // 60}:{minutes % 60:02d}"
        scene.update(
            task=scene[f"chore{n}"], plan=scene[f"event{n}"], friend=scene[f"name{n}"], where=scene[f"place{n}"]
        )
        told.append(scene.say(*(HOURS if n else MORNING)))
        asked.append(Exchange(scene.fill("What happened at {clock}?"), told[-1]))
    told.append(scene.say(*EVENING))
    return Story(" ".join(told), asked[1:])


PARTS = (
    "In {city} there was a {trait} {place}.",
    "{who} has a {animal} called {word}.",
    "{word} is a {trait} {animal} and likes {food}.",
    "The {place} of {city} is {trait2}, and the {job} there is {mood}.",
    "{he} keeps {his} {thing} {spot}.",
    "Every {day} {he} goes to the {place} to {chore}.",
    "{his} friend {who2} comes from {city2}.",
    "{who2} gave {him} a {color} {thing2} on {date}.",
    "In {month} it is {weather} there.",
    "{who} speaks {language} and likes the song {song}.",
    "{who2} once said: {message}.",
)


def portrait(scene: Scene) -> Story:
    """Who somebody is, where and with whom."""
    person(scene)
    person(scene, "2")
    parts = scene.rng.sample(PARTS, scene.rng.randint(3, 6))
    told = [
        scene.say("{who} is a {job} in {city}.", "{who} lives in {city} with {who2}."),
        *(scene.say(part) for part in parts),
    ]
    return Story(" ".join(told), [scene.pair((("Where does {who} live?", "{who} lives in {city}."),))])


STORIES: dict[Callable[[Scene], Story], int] = {owners: 4, search: 2, errand: 2, day: 2, portrait: 2}


def story(rng: Random) -> Story:
    """A story of any kind."""
    (tell,) = rng.choices(tuple(STORIES), tuple(STORIES.values()))
    return tell(Scene(rng))
