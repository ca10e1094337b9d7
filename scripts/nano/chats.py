"""Conversations of a user and an assistant without tool calls: questions, requests, stories and small talk."""

from random import Random

from scripts.nano import copying, facts
from scripts.nano.stories import make_story
from scripts.nano.templates import Exchange, Message, TemplateContext, capitalize_first, sample_weighted, to_messages
from scripts.nano.tool_requests import TOOL_REQUESTS

SYSTEM_PROMPT_TEMPLATES = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in plain English.",
    "Answer the questions of the user.",
    "You are {name}, a {job} from {city}.",
    "Today is {day}, {date}. It is {time}.",
    "You help people in {city}.",
)
SMALL_TALK_TEMPLATES = (
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
RECALL_TEMPLATES = (  # statement of the user, reply, later question about the statement, answer
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
STORY_PROMPT_TEMPLATES = ("Read this: {text}", "Here is a story. {text}", "{text}\nI have a question on this.")


def make_question(rng: Random) -> list[Exchange]:
    """A question of the fact or copying tasks."""
    return [sample_weighted(rng, rng.choice((facts.TASK_WEIGHTS, copying.TASK_WEIGHTS)))(TemplateContext(rng))]


def make_action_request(rng: Random) -> list[Exchange]:
    """A request for an action, answered in prose."""
    request = rng.choice(TOOL_REQUESTS)
    context = TemplateContext(rng)
    return [Exchange(context.render(rng.choice(request.prompts)), context.render_sentence(*request.replies))]


def make_small_talk(rng: Random) -> list[Exchange]:
    """A greeting or other small talk."""
    return [TemplateContext(rng).render_exchange(SMALL_TALK_TEMPLATES)]


def make_recall_question(rng: Random) -> list[Exchange]:
    """A statement and a question about it, in half of the conversations with another exchange between."""
    context = TemplateContext(rng)
    statement, reply, question, answer = (context.render(template) for template in rng.choice(RECALL_TEMPLATES))
    distractors = rng.choice((make_question, make_action_request))(rng) if rng.random() < 0.5 else []
    return [Exchange(statement, capitalize_first(reply)), *distractors, Exchange(question, capitalize_first(answer))]


def make_story_request(rng: Random) -> list[Exchange]:
    """A story by the assistant, followed by a question about it."""
    story = make_story(rng)
    return [Exchange(rng.choice(STORY_REQUESTS), story.text), rng.choice(story.questions)]


def make_story_comprehension(rng: Random) -> list[Exchange]:
    """A story by the user, with up to three questions about it."""
    story = make_story(rng)
    story_prompt = rng.choice(STORY_PROMPT_TEMPLATES).format(text=story.text)
    first, *remaining = rng.sample(story.questions, len(story.questions))
    return [Exchange(f"{story_prompt} {first.question}", first.answer), *remaining[:2]]


EXCHANGE_WEIGHTS = {
    make_question: 6,
    make_action_request: 6,
    make_small_talk: 1,
    make_recall_question: 2,
    make_story_request: 2,
    make_story_comprehension: 2,
}


def make_chat(rng: Random) -> list[Message]:
    """Messages of one to three turns. One fifth of the conversations start with a system message."""
    exchanges: list[Exchange] = []
    num_turns = rng.randint(1, 3)
    while len(exchanges) < num_turns:
        exchanges += sample_weighted(rng, EXCHANGE_WEIGHTS)(rng)
    messages = to_messages(exchanges[:3])
    if rng.random() < 0.2:
        system_prompt = TemplateContext(rng).render(rng.choice(SYSTEM_PROMPT_TEMPLATES))
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages
