"""Short stories about giving, losing, finding and buying things, with reading comprehension questions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from scripts.nano import word_lists
from scripts.nano.templates import Exchange, TemplateContext, sample_weighted


@dataclass(frozen=True)
class Story:
    """A story, and questions about it with answers."""

    text: str
    questions: list[Exchange] = field(default_factory=list)


def set_character(context: TemplateContext, suffix: str = "") -> None:
    """Set the slots `who`, `he`, `He`, `his` and `him`, each followed by `suffix`, to a name and its pronouns."""
    is_female = context.rng.random() < 0.5
    all_names = word_lists.FEMALE_NAMES if is_female else word_lists.MALE_NAMES
    names = [name for name in all_names if name not in context.values()]
    pronouns = ("she", "She", "her", "her") if is_female else ("he", "He", "his", "him")
    values = (context.rng.choice(names), *pronouns)
    slots = (slot + suffix for slot in ("who", "he", "He", "his", "him"))
    context.update(zip(slots, values, strict=True))


OPENING_TEMPLATES = (
    "One {weather} day, {who} and {who2} were at the {place}.",
    "{who} and {who2} lived in {city}.",
    "On {day}, {who} went to the {place} with {who2}.",
    "It was a {weather} morning in {city}. {who} and {who2} were {mood}.",
    "{who}, a {job}, had a friend called {who2}.",
    "At {time}, {who} met {who2} at the {place}.",
)
OWNERSHIP_TEMPLATES = (
    "{who} had a {trait} {thing} and {who2} had a {color} {thing2}.",
    "The {thing} was {who}'s and the {thing2} was {who2}'s.",
)
GIFT_TEMPLATES = (
    "{giver} gave the {item} to {taker}.",
    "{giver} did not need the {item} any more, so {taker} got it.",
    '"Here, take the {item}," said {giver}, and {taker} took it.',
    "{taker} asked for the {item}, and {giver} gave it to {taker}.",
    "Because {taker} was {feeling}, {giver} gave {taker} the {item}.",
    "{taker} bought the {item} from {giver} for {few} coins.",
)
SWAP_TEMPLATES = (
    "Then they swapped the {thing} and the {thing2}.",
    "{who} and {who2} traded: the {thing} for the {thing2}.",
)
FILLER_TEMPLATES = (
    "They sat down {spot} and ate some {food}.",
    "A {animal} ran by, and they laughed.",
    "After that it became {weather2}.",
    "{who2} told {who} about {city2}.",
    "They talked until {time2}.",
)
FINAL_OWNER_TEMPLATES = (
    "In the end, {holder} had the {item}.",
    "So now {holder} has the {item}.",
    "At last the {item} was {holder}'s.",
)
MOOD_TEMPLATES = (
    "{who} felt {mood2}.",
    "Both of them were {mood2}.",
    "{who2} was {mood2} and went home.",
    "It was a good day.",
)


def make_ownership_story(context: TemplateContext) -> Story:
    """Two characters exchange two things. The questions ask for the owners at the end."""
    set_character(context)
    set_character(context, "2")
    owners = {context["thing"]: context["who"], context["thing2"]: context["who2"]}
    sentences = [context.render_sentence(*OPENING_TEMPLATES), context.render_sentence(*OWNERSHIP_TEMPLATES)]
    for _ in range(context.rng.randint(1, 3)):
        sentences.append(transfer_item(context, owners))
        if context.rng.random() < 0.4:
            sentences.append(context.render_sentence(*FILLER_TEMPLATES))
    if context.rng.random() < 0.6:
        for item, owner in owners.items():
            context.update(item=item, holder=owner)
            sentences.append(context.render_sentence(*FINAL_OWNER_TEMPLATES))
    if context.rng.random() < 0.5:
        sentences.append(context.render_sentence(*MOOD_TEMPLATES))
    questions = [Exchange(f"Who has the {item} now?", f"{owner} has the {item}.") for item, owner in owners.items()]
    return Story(" ".join(sentences), questions)


def transfer_item(context: TemplateContext, owners: dict[str, str]) -> str:
    """Update `owners`, the owner of each thing, by a gift, a sale, or a swap. Returns the sentence."""
    name1, name2 = context["who"], context["who2"]
    other = {name1: name2, name2: name1}
    if len(set(owners.values())) == 2 and context.rng.random() < 0.3:
        owners.update({item: other[owner] for item, owner in owners.items()})
        return context.render_sentence(*SWAP_TEMPLATES)
    item = context.rng.choice(tuple(owners))
    context.update(
        item=item, giver=owners[item], taker=other[owners[item]], feeling=context.rng.choice(word_lists.MOODS)
    )
    owners[item] = context["taker"]
    return context.render_sentence(*GIFT_TEMPLATES)


LOSS_TEMPLATES = (
    "{who} could not find {his} {thing}.",
    "One {weather} day {who} lost {his} {color} {thing}.",
    '"Where is my {thing}?" asked {who}. {He} was {mood}.',
)
SEARCH_TEMPLATES = (
    "{he} looked {tried}, but it was not there.",
    "First {he} looked {tried}. There was only a {other}.",
    "{who} asked the {job}, but the {job} had not seen it.",
)
DISCOVERY_TEMPLATES = (
    "Then {he} looked {spot}, and there it was.",
    "At {time} {who2} found it {spot} and called {him}.",
    "A {animal} had carried it off, and now it lay {spot}.",
)
THANKS_TEMPLATES = (
    "{he} thanked {who2} and put the {thing} in {his} bag.",
    "Since then {he} keeps the {thing} {spot2}.",
    "{who} was {mood2} again.",
)


def make_search_story(context: TemplateContext) -> Story:
    """A character loses a thing, searches for it, and finds it."""
    set_character(context)
    set_character(context, "2")
    sentences = [context.render_sentence(*LOSS_TEMPLATES)]
    for n in range(context.rng.randint(1, 3)):
        context.update(tried=context[f"spot{n + 3}"], other=context[f"thing{n + 3}"])
        sentences.append(context.render_sentence(*SEARCH_TEMPLATES))
    sentences += [context.render_sentence(*DISCOVERY_TEMPLATES), context.render_sentence(*THANKS_TEMPLATES)]
    questions = [
        context.render_exchange(
            (
                ("What did {who} lose?", "{who} lost {his} {thing}."),
                ("Whose {thing} was lost?", "It was {who}'s {thing}."),
            )
        ),
        context.render_exchange((("Where was the {thing}?", "The {thing} was {spot}."),)),
    ]
    return Story(" ".join(sentences), questions)


ERRAND_TEMPLATES = (
    "{who} wanted to {chore}, but {he} had no {thing}.",
    "{who} the {job} needed a {thing}, because {his} old one was broken.",
    "{who} wished for a {color} {thing} more than for anything else.",
)
JOURNEY_TEMPLATES = (
    "So {he} went to the {place} by {way}.",
    "{he} took the {way} to {city} and walked to the {place}.",
    "It was {weather}, but {he} went to the {place} all the same.",
)
OFFER_TEMPLATES = (
    'There {he} met {who2}. "Do you have a {thing}?" asked {who}. "Yes," said {who2}, "it costs {few} coins."',
    '{who2} was there. "I will give you my {thing} for {some} {food}," said {who2}.',
    'At the {place} stood {who2}, the {job2}. "A {thing}?" said {who2}. "Take mine."',
)
PURCHASE_TEMPLATES = (
    "{who} agreed and carried the {thing} home.",
    "{he} thanked {him2} and took the {thing}.",
    "So {who2} gave {who} the {thing}.",
)


def make_errand_story(context: TemplateContext) -> Story:
    """A character needs a thing, goes to a place, and gets it there."""
    set_character(context)
    set_character(context, "2")
    context.update(
        way=context.rng.choice(("bus", "train", "bike", "boat")),
        some=context.rng.choice(("some", "a bag of", "a box of")),
    )
    sentences = [
        context.render_sentence(*templates)
        for templates in (ERRAND_TEMPLATES, JOURNEY_TEMPLATES, OFFER_TEMPLATES, PURCHASE_TEMPLATES, MOOD_TEMPLATES)
    ]
    questions = [
        context.render_exchange(
            (("Who needed a {thing}?", "{who} needed a {thing}."), ("What did {who} need?", "{who} needed a {thing}."))
        ),
        context.render_exchange(
            (
                ("Where did {who} go?", "{who} went to the {place}."),
                ("Who gave {who} the {thing}?", "{who2} gave {who} the {thing}."),
            )
        ),
    ]
    return Story(" ".join(sentences), questions)


MORNING_TEMPLATES = ("{who} got up at {clock}.", "At {clock} {who} woke up in {city}.", "{who}'s day began at {clock}.")
HOUR_TEMPLATES = (
    "At {clock} {he} had to {task}.",
    "{he} wanted to {task} at {clock}.",
    "At {clock} {he} had {plan}.",
    "{he} met {friend} at {clock}.",
    "At {clock} {he} was at the {where}.",
)
EVENING_TEMPLATES = (
    "{he} came home {mood} and slept well.",
    "It was {weather} when {he} went to bed.",
    "Then {he} wrote a letter to {who2}.",
)


def make_day_story(context: TemplateContext) -> Story:
    """Events of a day in temporal order."""
    set_character(context)
    set_character(context, "2")
    event_times = sorted(context.rng.sample(range(6 * 60, 22 * 60, 15), context.rng.randint(3, 5)))
    sentences = [context.render_sentence("{day}.", "It was {date}.", "It was {day}.", "On {day} it was {weather}.")]
    questions = []
    for number, minutes in enumerate(event_times):
        context["clock"] = f"{minutes // 60}:{minutes % 60:02d}"
        context.update(
            task=context[f"chore{number}"],
            plan=context[f"event{number}"],
            friend=context[f"name{number}"],
            where=context[f"place{number}"],
        )
        sentences.append(context.render_sentence(*(HOUR_TEMPLATES if number else MORNING_TEMPLATES)))
        questions.append(Exchange(context.render("What happened at {clock}?"), sentences[-1]))
    sentences.append(context.render_sentence(*EVENING_TEMPLATES))
    return Story(" ".join(sentences), questions[1:])


PORTRAIT_TEMPLATES = (
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


def make_portrait_story(context: TemplateContext) -> Story:
    """Description of a character and a place."""
    set_character(context)
    set_character(context, "2")
    templates = context.rng.sample(PORTRAIT_TEMPLATES, context.rng.randint(3, 6))
    sentences = [
        context.render_sentence("{who} is a {job} in {city}.", "{who} lives in {city} with {who2}."),
        *(context.render_sentence(template) for template in templates),
    ]
    return Story(
        " ".join(sentences), [context.render_exchange((("Where does {who} live?", "{who} lives in {city}."),))]
    )


STORY_WEIGHTS: dict[Callable[[TemplateContext], Story], int] = {
    make_ownership_story: 4,
    make_search_story: 2,
    make_errand_story: 2,
    make_day_story: 2,
    make_portrait_story: 2,
}


def make_story(rng: Random) -> Story:
    """A story of any kind."""
    return sample_weighted(rng, STORY_WEIGHTS)(TemplateContext(rng))
