"""Requests for tools. Answers are prose in the corpus, and tool calls in JSON in the dataset `tunekit/tools`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolRequest:
    """Name of a tool, template slots of its arguments, prompts, and replies in prose."""

    tool: str
    argument_slots: dict[str, str]
    prompts: tuple[str, ...]
    replies: tuple[str, ...]


TOOL_REQUESTS = (
    ToolRequest(
        "get_weather",
        {"city": "city", "day": "day"},
        (
            "What is the weather in {city} on {day}?",
            "How will the weather be in {city} on {day}?",
            "Will it rain in {city} on {day}?",
            "Tell me the weather for {day} in {city}.",
            "I travel to {city} on {day}. What will the weather be like?",
        ),
        ("I hope it will be {weather} in {city} on {day}.", "On {day} it may be {weather} in {city}."),
    ),
    ToolRequest(
        "set_alarm",
        {"time": "time", "day": "day"},
        (
            "Please set an alarm for {time} on {day}.",
            "Wake me up at {time} on {day}.",
            "On {day} I have to get up at {time}.",
            "Set the alarm to {time} for {day}, please.",
        ),
        ("Sure, I will set an alarm for {time} on {day}.", "Of course, I will wake you up at {time} on {day}."),
    ),
    ToolRequest(
        "set_timer",
        {"amount": "amount", "unit": "span"},
        (
            "Set a timer for {amount} {span}.",
            "Start a timer of {amount} {span}, please.",
            "Tell me when {amount} {span} are over.",
            "I need a timer for {amount} {span}.",
        ),
        ("The timer is set to {amount} {span}.", "I will tell you when {amount} {span} are over."),
    ),
    ToolRequest(
        "add_reminder",
        {"task": "chore", "time": "time"},
        (
            "Remind me to {chore} at {time}.",
            "At {time} I have to {chore}. Remind me.",
            "Do not let me forget to {chore} at {time}.",
            "Please remind me at {time} to {chore}.",
        ),
        ("I will remind you at {time} to {chore}.", "Sure, at {time} I will tell you to {chore}."),
    ),
    ToolRequest(
        "send_message",
        {"to": "name", "text": "message"},
        (
            'Send {name} the message "{message}".',
            "Tell {name}: {message}",
            'Write to {name}: "{message}"',
            "Please text {name} that {message}",
        ),
        ("I will tell {name} that {message}.", "Yes, {name} will hear it from me: {message}."),
    ),
    ToolRequest(
        "convert_units",
        {"amount": "amount", "from": "unit", "to": "target"},
        (
            "Convert {amount} {unit} to {target}.",
            "How many {target} are {amount} {unit}?",
            "What is {amount} {unit} in {target}?",
            "Please turn {amount} {unit} into {target}.",
        ),
        (
            "I do not know how many {target} are {amount} {unit}.",
            "{amount} {unit} in {target}? That is hard.",
        ),
    ),
    ToolRequest(
        "calculate",
        {"expression": "expression"},
        (
            "Calculate {expression}.",
            "How much is {expression}?",
            "Please work out {expression} for me.",
            "What do I get for {expression}?",
        ),
        ("You want to know {expression}. Let me think about it.", "I would need some paper for {expression}."),
    ),
    ToolRequest(
        "add_event",
        {"title": "event", "day": "day", "time": "time"},
        (
            "Put {event} in my calendar on {day} at {time}.",
            "On {day} at {time} I have {event}. Note it down.",
            "Add {event} to my calendar for {day} at {time}.",
            "Please plan {event} on {day} at {time}.",
        ),
        ("I noted it: {event} on {day} at {time}.", "Fine, on {day} at {time} you have {event}."),
    ),
    ToolRequest(
        "play_music",
        {"song": "song", "artist": "artist"},
        (
            "Play {song} by {artist}.",
            "I want to hear {song} by {artist}.",
            "Put on {song} by {artist}, please.",
            "Can you play the song {song} from {artist}?",
        ),
        ("Here comes {song} by {artist}.", "I like {song} by {artist} too."),
    ),
    ToolRequest(
        "translate",
        {"word": "noun", "language": "language"},
        (
            "Translate {noun} into {language}.",
            "What is the {language} word for {noun}?",
            "How do you say {noun} in {language}?",
            "I need the word {noun} in {language}.",
        ),
        ("I do not know the {language} word for {noun} yet.", "{noun} in {language}? I will look it up for you."),
    ),
)
