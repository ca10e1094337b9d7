"""Short stories about people who own, give, lose and find things, go to places, and have feelings about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from scripts.nano import words
from scripts.nano.scene import Exchange, Scene, choose_weighted


@dataclass(frozen=True)
class Story:
    """A story, and questions that it answers."""

    text: str
    questions: list[Exchange] = field(default_factory=list)


def bind_person(scene: Scene, suffix: str = "") -> None:
    """Bind `who`, `he`, `He`, `his` and `him`, each followed by `suffix`, to one name."""
    is_girl = scene.rng.random() < 0.5
    names = [name for name in (words.GIRLS if is_girl else words.BOYS) if name not in scene.values()]
    pronouns = ("she", "She", "her", "her") if is_girl else ("he", "He", "his", "him")
    values = (scene.rng.choice(names), *pronouns)
    slots = (slot + suffix for slot in ("who", "he", "He", "his", "him"))
    scene.update(zip(slots, values, strict=True))


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
OWNERS_AT_END = (
    "In the end, {holder} had the {item}.",
    "So now {holder} has the {item}.",
    "At last the {item} was {holder}'s.",
)
MOODS = ("{who} felt {mood2}.", "Both of them were {mood2}.", "{who2} was {mood2} and went home.", "It was a good day.")


def make_ownership_story(scene: Scene) -> Story:
    """Two people exchange two things; the questions are who has them at the end."""
    bind_person(scene)
    bind_person(scene, "2")
    owners = {scene["thing"]: scene["who"], scene["thing2"]: scene["who2"]}
    sentences = [scene.fill_sentence(*OPENINGS), scene.fill_sentence(*OWNS)]
    for _ in range(scene.rng.randint(1, 3)):
        sentences.append(add_transfer(scene, owners))
        if scene.rng.random() < 0.4:
            sentences.append(scene.fill_sentence(*FILLERS))
    if scene.rng.random() < 0.6:
        sentences += [
            scene.fill_sentence(*OWNERS_AT_END)
            for item in owners
            if scene.update(item=item, holder=owners[item]) is None
        ]
    if scene.rng.random() < 0.5:
        sentences.append(scene.fill_sentence(*MOODS))
    questions = [Exchange(f"Who has the {item} now?", f"{owner} has the {item}.") for item, owner in owners.items()]
    return Story(" ".join(sentences), questions)


def add_transfer(scene: Scene, owners: dict[str, str]) -> str:
    """A sentence about a gift, a sale, or a swap. Updates `owners`, the owner of each thing."""
    first, second = scene["who"], scene["who2"]
    other = {first: second, second: first}
    if len(set(owners.values())) == 2 and scene.rng.random() < 0.3:
        owners.update({item: other[owner] for item, owner in owners.items()})
        return scene.fill_sentence(*SWAPS)
    item = scene.rng.choice(tuple(owners))
    scene.update(item=item, giver=owners[item], taker=other[owners[item]], feeling=scene.rng.choice(words.MOODS))
    owners[item] = scene["taker"]
    return scene.fill_sentence(*GIVES)


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
FINDS = (
    "Then {he} looked {spot}, and there it was.",
    "At {time} {who2} found it {spot} and called {him}.",
    "A {animal} had carried it off, and now it lay {spot}.",
)
THANKS = (
    "{he} thanked {who2} and put the {thing} in {his} bag.",
    "Since then {he} keeps the {thing} {spot2}.",
    "{who} was {mood2} again.",
)


def make_search_story(scene: Scene) -> Story:
    """Something is lost, searched for, and found."""
    bind_person(scene)
    bind_person(scene, "2")
    sentences = [scene.fill_sentence(*LOST)]
    for n in range(scene.rng.randint(1, 3)):
        scene.update(tried=scene[f"spot{n + 3}"], other=scene[f"thing{n + 3}"])
        sentences.append(scene.fill_sentence(*LOOKS))
    sentences += [scene.fill_sentence(*FINDS), scene.fill_sentence(*THANKS)]
    questions = [
        scene.fill_exchange(
            (
                ("What did {who} lose?", "{who} lost {his} {thing}."),
                ("Whose {thing} was lost?", "It was {who}'s {thing}."),
            )
        ),
        scene.fill_exchange((("Where was the {thing}?", "The {thing} was {spot}."),)),
    ]
    return Story(" ".join(sentences), questions)


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


def make_errand_story(scene: Scene) -> Story:
    """A character needs something, goes somewhere, and gets it."""
    bind_person(scene)
    bind_person(scene, "2")
    scene.update(
        way=scene.rng.choice(("bus", "train", "bike", "boat")), some=scene.rng.choice(("some", "a bag of", "a box of"))
    )
    sentences = [scene.fill_sentence(*templates) for templates in (ERRANDS, GOES, DEALS, PAYS, MOODS)]
    questions = [
        scene.fill_exchange(
            (("Who needed a {thing}?", "{who} needed a {thing}."), ("What did {who} need?", "{who} needed a {thing}."))
        ),
        scene.fill_exchange(
            (
                ("Where did {who} go?", "{who} went to the {place}."),
                ("Who gave {who} the {thing}?", "{who2} gave {who} the {thing}."),
            )
        ),
    ]
    return Story(" ".join(sentences), questions)


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


def make_day_story(scene: Scene) -> Story:
    """The events of a day in temporal order."""
    bind_person(scene)
    bind_person(scene, "2")
    hours = sorted(scene.rng.sample(range(6 * 60, 22 * 60, 15), scene.rng.randint(3, 5)))
    sentences = [scene.fill_sentence("{day}.", "It was {date}.", "It was {day}.", "On {day} it was {weather}.")]
    questions = []
    for number, minutes in enumerate(hours):
        scene["clock"] = f"{minutes // 60}:{minutes % 60:02d}"
        scene.update(
            task=scene[f"chore{number}"],
            plan=scene[f"event{number}"],
            friend=scene[f"name{number}"],
            where=scene[f"place{number}"],
        )
        sentences.append(scene.fill_sentence(*(HOURS if number else MORNING)))
        questions.append(Exchange(scene.fill("What happened at {clock}?"), sentences[-1]))
    sentences.append(scene.fill_sentence(*EVENING))
    return Story(" ".join(sentences), questions[1:])


PORTRAIT_SENTENCES = (
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


def make_portrait(scene: Scene) -> Story:
    """A description of a character and a place."""
    bind_person(scene)
    bind_person(scene, "2")
    templates = scene.rng.sample(PORTRAIT_SENTENCES, scene.rng.randint(3, 6))
    sentences = [
        scene.fill_sentence("{who} is a {job} in {city}.", "{who} lives in {city} with {who2}."),
        *(scene.fill_sentence(template) for template in templates),
    ]
    return Story(" ".join(sentences), [scene.fill_exchange((("Where does {who} live?", "{who} lives in {city}."),))])


STORIES: dict[Callable[[Scene], Story], int] = {  # with relative frequencies
    make_ownership_story: 4,
    make_search_story: 2,
    make_errand_story: 2,
    make_day_story: 2,
    make_portrait: 2,
}


def make_story(rng: Random) -> Story:
    """A story of any kind."""
    return choose_weighted(rng, STORIES)(Scene(rng))
