"""Questions whose answers are contained in the question: copying, lists, records, and reading comprehension."""

import json

from scripts.nano import words
from scripts.nano.scene import Exchange, Scene

REPEAT = (
    ("Repeat: {span}", "{span}"),
    ("Say this again: {span}", "{span}"),
    ('Copy the text between the quotes: {rest} "{span}"', "{span}"),
    ("Put quotes around this: {span}", '"{span}"'),
    ("Write this twice: {span}", "{span} {span}"),
    ('What did {name} say? {name} said "{span}" and went away.', '{name} said "{span}".'),
    ("Write {span} in brackets.", "[{span}]"),
)
SPANS = (
    "{word}",
    "{word} {word2}",
    "{word} {word2} {word3}",
    "{name} {word}",
    "{thing} {thing2} {thing3}",
    "{number} {word}",
    "{code}",
    "{email}",
    "{time}",
    "{song}",
    "{message}",
    "{chore}",
    "{event}",
    "{expression}",
    "{name} {surname}",
    "{city}, {city2} and {city3}",
    "the {color} {thing} {spot}",
    "{date} at {time}",
)


def make_repetition(scene: Scene) -> Exchange:
    """Verbatim repetition of a text."""
    return scene.fill_exchange(
        REPEAT, span=scene.fill(scene.rng.choice(SPANS)), rest=scene.fill(scene.rng.choice(SPANS))
    )


NTH_WORD = (
    ("What is the {place} word of: {row}", "{item}"),
    ("Quote the {place} word. {row}", '"{item}"'),
    ("{row}. Which word is the {place}?", 'The {place} word is "{item}".'),
)


def make_nth_word(scene: Scene) -> Exchange:
    """The n-th word of a list."""
    items = draw_items(scene, ("word", "word", "thing", "name", "color", "number", "animal", "food"))
    index = scene.rng.randrange(-1, len(items))
    ordinal = "last" if index == -1 else words.ORDINALS[index]
    return scene.fill_exchange(NTH_WORD, row=" ".join(items), item=items[index], place=ordinal)


def draw_items(scene: Scene, kinds: tuple[str, ...]) -> list[str]:
    return scene.draw_words(scene.rng.choice(kinds), scene.rng.randint(3, 6))


LIST = (
    ("Sort: {row}", "{sorted}"),
    ("Put these in order: {row}", "{sorted}"),
    ("Reverse this list: {row}", "{reversed}"),
    ("Say this list backwards: {row}", "{reversed}"),
    ("How many items are in this list? {row}", "There are {count} items in the list."),
    ("Count: {row}", "{count}"),
    ("Take {removed} out of this list: {row}", "{remaining}"),
    ("Put {added} at the end of this list: {row}", "{row}, {added}"),
    ("Give me the first and the last item of: {row}", "{first} and {last}"),
    ("Swap the first two: {row}", "{swapped}"),
)
MEMBERSHIP = (
    ("Is {item} in this list? {row}", "Yes, {item} is in the list."),
    ("Is {added} in this list? {row}", "No, {added} is not in the list."),
)


def make_list_operation(scene: Scene) -> Exchange:
    """A list that is sorted, reversed, counted, shortened, extended, or searched."""
    items = draw_items(scene, ("word", "thing", "name", "city", "color", "number", "email", "song"))
    is_numeric = items[0].isdigit()
    removed = scene.rng.choice(items)
    lists = {
        "row": items,
        "sorted": sorted(items, key=int if is_numeric else str),
        "reversed": items[::-1],
        "remaining": [item for item in items if item != removed],
        "swapped": [items[1], items[0], *items[2:]],
    }
    added = str(scene.rng.randint(1000, 1099)) if is_numeric else scene["word9"]
    values = {"removed": removed, "item": removed, "added": added, "first": items[0], "last": items[-1]}
    formatted = {slot: ", ".join(row) for slot, row in lists.items()}
    return scene.fill_exchange(LIST + MEMBERSHIP, **formatted, **values, count=len(items))


EXTREMUM = (
    ("Which number is the largest: {row}?", "{largest} is the largest."),
    ("Which number is the smallest: {row}?", "{smallest} is the smallest."),
)


def make_extremum(scene: Scene) -> Exchange:
    """The largest or the smallest of some numbers."""
    numbers = scene.rng.sample(range(scene.rng.choice((20, 100, 1000))), scene.rng.randint(3, 5))
    return scene.fill_exchange(EXTREMUM, row=", ".join(map(str, numbers)), largest=max(numbers), smallest=min(numbers))


FIELDS = {  # field of a record: slot of its value
    "name": "name",
    "city": "city",
    "day": "day",
    "time": "time",
    "date": "date",
    "color": "color",
    "size": "few",
    "age": "amount",
    "price": "number",
    "code": "code",
    "email": "email",
    "pet": "animal",
    "job": "job",
    "song": "song",
    "event": "event",
    "task": "chore",
    "note": "message",
    "item": "thing",
    "food": "food",
    "artist": "artist",
    "unit": "unit",
    "span": "span",
    "word": "word",
    "language": "language",
    "room": "room",
    "friend": "name",
    "sum": "expression",
}
LOOKUP = (
    ("{record}\nWhat is the {field}?", "{value}"),
    ("{record}\nTell me the {field}.", "The {field} is {value}."),
    ("{record}\n{field} =", "{value}"),
    ("{record}\nWhich field is {value}?", "{field}"),
)
REWRITE = (
    ("Write this as a record: {plain}", "{json}"),
    ("{plain}\nThe same as a record:", "{json}"),
    ("Read this record aloud: {json}", "{plain}"),
    ("Which fields does this record have? {json}", "{fields}"),
    ("Set the {field} to {new} in {json}", "{changed}"),
)


def make_lookup(scene: Scene) -> Exchange:
    """One field of a record in one of several formats."""
    record = draw_record(scene)
    field = scene.rng.choice(tuple(record))
    nested = {scene["word"]: convert_numbers(record)}
    texts = (format_inline(record), format_lines(record), format_json(record), format_json(nested))
    return scene.fill_exchange(LOOKUP, record=scene.rng.choice(texts), field=field, value=record[field])


def make_rewriting(scene: Scene) -> Exchange:
    """A record converted to another format, or with one field changed."""
    record = draw_record(scene)
    field = scene.rng.choice(tuple(record))
    new = scene[f"{FIELDS[field]}9"]
    values = {
        "plain": format_inline(record),
        "json": format_json(record),
        "changed": format_json(record | {field: new}),
    }
    return scene.fill_exchange(REWRITE, fields=", ".join(record), field=field, new=new, **values)


def draw_record(scene: Scene) -> dict[str, str]:
    fields = scene.rng.sample(tuple(FIELDS), scene.rng.randint(2, 4))
    return {field: scene[f"{FIELDS[field]}{number}"] for number, field in enumerate(fields, 1)}


def format_inline(record: dict[str, str]) -> str:
    return ", ".join(f"{field}: {value}" for field, value in record.items())


def format_lines(record: dict[str, str]) -> str:
    return "\n".join(f"{field} = {value}" for field, value in record.items())


def format_json(record: dict) -> str:
    return json.dumps(convert_numbers(record), ensure_ascii=False)


def convert_numbers(record: dict) -> dict:
    return {field: int(value) if str(value).isdigit() else value for field, value in record.items()}


PASSAGES = (  # sentence; questions and answers; fields of the equivalent record
    (
        "{name} lives in {city} and has a {color} {thing}.",
        (
            ("Where does {name} live?", "{name} lives in {city}."),
            ("Who lives in {city}?", "{name} lives in {city}."),
            ("What does {name} have?", "{name} has a {color} {thing}."),
            ("What color is the {thing}?", "The {thing} is {color}."),
        ),
        ("name", "city", "color", "thing"),
    ),
    (
        "{name} meets {name2} in {city} on {day} at {time}.",
        (
            ("When does {name} meet {name2}?", "{name} meets {name2} on {day} at {time}."),
            ("Who meets {name2}?", "{name} meets {name2}."),
            ("In which city do they meet?", "They meet in {city}."),
            ("On which day is it?", "It is on {day}."),
            ("At what time is it?", "It is at {time}."),
        ),
        ("name", "city", "day", "time"),
    ),
    (
        "Please {chore} on {day} at {time}.",
        (
            ("What is to be done?", "{chore}"),
            ("When is it to be done?", "on {day} at {time}"),
            ("At what time?", "at {time}"),
        ),
        ("chore", "day", "time"),
    ),
    (
        'Send {name} the message "{message}".',
        (
            ("Who gets the message?", "{name}"),
            ("What does the message say?", "{message}"),
            ("Quote it.", '"{message}"'),
        ),
        ("name", "message"),
    ),
    (
        "We have {event} on {date} at {time}.",
        (("What do we have?", "{event}"), ("On which date?", "on {date}"), ("When does it start?", "at {time}")),
        ("event", "date", "time"),
    ),
    (
        "{name} sings {song} for {amount} minutes in {city}.",
        (
            ("Which song is it?", "{song}"),
            ("Who sings?", "{name}"),
            ("How long?", "{amount} minutes"),
            ("Where?", "in {city}"),
        ),
        ("name", "song", "amount", "city"),
    ),
    (
        "The {language} word {word} costs {name} {amount} points.",
        (
            ("Which word is it?", "{word}"),
            ("Which language is it?", "{language}"),
            ("How many points?", "{amount}"),
        ),
        ("language", "word", "amount"),
    ),
    (
        "The {job} {name} {surname} has the number {code} and the address {email}.",
        (
            ("What is the number of {name}?", "{code}"),
            ("What is the address of {name}?", "{email}"),
            ("What is the last name of {name}?", "{surname}"),
            ("Who is the {job}?", "{name} {surname}"),
        ),
        ("job", "name", "surname", "code", "email"),
    ),
)


def make_comprehension(scene: Scene) -> Exchange:
    """A question about one sentence, or the sentence as a record."""
    sentence, questions, fields = scene.rng.choice(PASSAGES)
    sentence = scene.fill(sentence)
    if scene.rng.random() < 0.4:
        return Exchange(f"{sentence} As a record:", format_json({field: scene[field] for field in fields}))
    question, answer = scene.fill_exchange(questions)
    return Exchange(f"{sentence} {question}", answer)


TASKS = {  # with relative frequencies
    make_repetition: 4,
    make_nth_word: 2,
    make_list_operation: 3,
    make_extremum: 1,
    make_lookup: 4,
    make_rewriting: 3,
    make_comprehension: 4,
}
