"""Conversations of a user and an assistant that answers in plain English: tasks, stories, requests."""

from random import Random

from scripts.nano import copying, facts
from scripts.nano.requests import REQUESTS
from scripts.nano.scene import Exchange, Message, Scene, capitalize_first, choose_weighted, to_messages
from scripts.nano.stories import make_story

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in plain English.",
    "Answer the questions of the user.",
    "You are {name}, a {job} from {city}.",
    "Today is {day}, {date}. It is {time}.",
    "You help people in {city}.",
)
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! What can I do for you?"),
    ("Thank you!", "You are welcome."),
    ("Thanks, that helps.", "I am glad to help."),
    ("Hi, I am {name}.", "Hi {name}, nice to meet you!"),
    ("How are you?", "I am well, thank you. How are you?"),
    ("Who are you?", "I am a very small language model."),
    ("What can you do?", "I can answer small questions, copy words, sort lists and tell stories."),
    ("Do you like {food}?", "I do not eat, but I like to talk about {food}."),
    ("I am {mood} today.", "You are {mood}? Tell me more."),
    ("Where is {city}?", "I only know that {city} is a city."),
)
RECALLS = (  # statement of the user; reply; later question about the statement; answer
    ("My name is {name}.", "Nice to meet you, {name}.", "What is my name?", "Your name is {name}."),
    ("I live in {city}.", "{city} is a nice place.", "Where do I live?", "You live in {city}."),
    ("My code is {code}.", "I will remember {code}.", "What was my code?", "Your code is {code}."),
    (
        "My {animal} is called {word}.",
        "{word} is a good name.",
        "What is the name of my {animal}?",
        "Your {animal} is called {word}.",
    ),
    ("My email is {email}.", "I noted {email}.", "What is my email?", "Your email is {email}."),
    ("I put the {thing} {spot}.", "I see, the {thing} is {spot}.", "Where is the {thing}?", "The {thing} is {spot}."),
    (
        "I have to {chore} at {time}.",
        "Do not forget it!",
        "What is to do at {time}?",
        "You have to {chore}.",
    ),
    ("On {day} I have {event}.", "That sounds good.", "What do I have on {day}?", "On {day} you have {event}."),
    ("My favorite song is {song}.", "I like {song}.", "Which song do I like?", "You like {song}."),
)
STORY_REQUESTS = (
    "Tell me a small story.",
    "Tell me a story, please.",
    "Do you know a story?",
    "Please write a short story.",
)
STORY_FRAMES = ("Read this: {text}", "Here is a story. {text}", "{text}\nI have a question on this.")


def make_task(rng: Random) -> list[Exchange]:
    """One question with its answer."""
    return [choose_weighted(rng, rng.choice((facts.TASKS, copying.TASKS)))(Scene(rng))]


def make_request(rng: Random) -> list[Exchange]:
    """A request for an action, answered in prose."""
    request = rng.choice(REQUESTS)
    scene = Scene(rng)
    return [Exchange(scene.fill(rng.choice(request.prompts)), scene.fill_sentence(*request.replies))]


def make_small_talk(rng: Random) -> list[Exchange]:
    """A greeting or other small talk."""
    return [Scene(rng).fill_exchange(SMALL_TALK)]


def make_recall(rng: Random) -> list[Exchange]:
    """A statement and a question about it, sometimes with another exchange in between."""
    scene = Scene(rng)
    statement, reply, question, answer = (scene.fill(template) for template in rng.choice(RECALLS))
    between = rng.choice((make_task, make_request))(rng) if rng.random() < 0.5 else []
    return [Exchange(statement, capitalize_first(reply)), *between, Exchange(question, capitalize_first(answer))]


def make_story_telling(rng: Random) -> list[Exchange]:
    """A story by the assistant, and a question about it."""
    story = make_story(rng)
    return [Exchange(rng.choice(STORY_REQUESTS), story.text), rng.choice(story.questions)]


def make_reading(rng: Random) -> list[Exchange]:
    """A story by the user, with questions about it."""
    story = make_story(rng)
    framed = rng.choice(STORY_FRAMES).format(text=story.text)
    first, *others = rng.sample(story.questions, len(story.questions))
    return [Exchange(f"{framed} {first.question}", first.answer), *others[:2]]


CHATS = {  # with relative frequencies
    make_task: 6,
    make_request: 6,
    make_small_talk: 1,
    make_recall: 2,
    make_story_telling: 2,
    make_reading: 2,
}


def make_chat(rng: Random) -> list[Message]:
    """Messages of one to three turns. One in five conversations starts with a system message."""
    exchanges: list[Exchange] = []
    num_turns = rng.randint(1, 3)
    while len(exchanges) < num_turns:
        exchanges += choose_weighted(rng, CHATS)(rng)
    messages = to_messages(exchanges[:3])
    if rng.random() < 0.2:
        messages.insert(0, {"role": "system", "content": Scene(rng).fill(rng.choice(SYSTEM_PROMPTS))})
    return messages
