"""Conversations between a user and an assistant who talks in plain English: tasks, stories, requests."""

from random import Random

from tunekit.nano import copying, facts
from tunekit.nano.requests import REQUESTS
from tunekit.nano.scene import Exchange, Scene
from tunekit.nano.stories import story

Turns = list[Exchange]

SYSTEMS = (
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
REMEMBERED = (  # what the user says; what the assistant says to it; what the user asks later, and the answer
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
TELL = ("Tell me a small story.", "Tell me a story, please.", "Do you know a story?", "Please write a short story.")
READ = ("Read this: {text}", "Here is a story. {text}", "{text}\nI have a question on this.")


def task(rng: Random) -> Turns:
    """One question with its answer."""
    tasks = rng.choice((facts.TASKS, copying.TASKS))
    (ask,) = rng.choices(tuple(tasks), tuple(tasks.values()))
    return [ask(Scene(rng))]


def request(rng: Random) -> Turns:
    """Something to be done, answered in prose."""
    wish = rng.choice(REQUESTS)
    scene = Scene(rng)
    return [Exchange(scene.fill(rng.choice(wish.asks)), scene.say(*wish.replies))]


def small_talk(rng: Random) -> Turns:
    """A greeting or a bit of talk."""
    return [Scene(rng).pair(SMALL_TALK)]


def memory(rng: Random) -> Turns:
    """Something told, perhaps something else between, and a question on what was told."""
    scene = Scene(rng)
    told, noted, ask, answer = (scene.fill(part) for part in rng.choice(REMEMBERED))
    between = rng.choice((task, request))(rng) if rng.random() < 0.5 else []
    return [Exchange(told, noted[:1].upper() + noted[1:]), *between, Exchange(ask, answer[:1].upper() + answer[1:])]


def tale(rng: Random) -> Turns:
    """A story told by the assistant, and a question on it."""
    told = story(rng)
    return [Exchange(rng.choice(TELL), told.text), rng.choice(told.questions)]


def reading(rng: Random) -> Turns:
    """A story told by the user, with questions on it."""
    told = story(rng)
    frame = rng.choice(READ).format(text=told.text)
    first, *rest = rng.sample(told.questions, len(told.questions))
    return [Exchange(f"{frame} {first.ask}", first.answer), *rest[:2]]


CHATS = {task: 6, request: 6, small_talk: 1, memory: 2, tale: 2, reading: 2}


def chat(rng: Random) -> list[dict[str, str]]:
    """Messages of one to three turns, a fifth of them under a system message."""
    turns: Turns = []
    wanted = rng.randint(1, 3)
    while len(turns) < wanted:
        (part,) = rng.choices(tuple(CHATS), tuple(CHATS.values()))
        turns += part(rng)
    head = [{"role": "system", "content": Scene(rng).fill(rng.choice(SYSTEMS))}] if rng.random() < 0.2 else []
    return head + [
        {"role": role, "content": content}
        for turn in turns[:3]
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
