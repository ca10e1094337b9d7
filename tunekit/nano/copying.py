"""Questions answered from what stands in them: words to repeat, lists to order, records and passages to look into."""

import json

from tunekit.nano import words
from tunekit.nano.scene import Exchange, Scene

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


def repeat(scene: Scene) -> Exchange:
    """A span of any kind, word for word."""
    return scene.pair(REPEAT, span=scene.fill(scene.rng.choice(SPANS)), rest=scene.fill(scene.rng.choice(SPANS)))


NTH = (
    ("What is the {place} word of: {row}", "{item}"),
    ("Quote the {place} word. {row}", '"{item}"'),
    ("{row}. Which word is the {place}?", 'The {place} word is "{item}".'),
)


def nth(scene: Scene) -> Exchange:
    """The n-th word of a row that only copying can give."""
    row = _row(scene, ("word", "word", "thing", "name", "color", "number", "animal", "food"))
    at = scene.rng.randrange(-1, len(row))
    return scene.pair(NTH, row=" ".join(row), item=row[at], place="last" if at == -1 else words.ORDER[at])


def _row(scene: Scene, kinds: tuple[str, ...]) -> list[str]:
    return scene.several(scene.rng.choice(kinds), scene.rng.randint(3, 6))


ORDER = (
    ("Sort: {row}", "{sorted}"),
    ("Put these in order: {row}", "{sorted}"),
    ("Reverse this list: {row}", "{reversed}"),
    ("Say this list backwards: {row}", "{reversed}"),
    ("How many items are in this list? {row}", "There are {count} items in the list."),
    ("Count: {row}", "{count}"),
    ("Take {gone} out of this list: {row}", "{kept}"),
    ("Put {more} at the end of this list: {row}", "{row}, {more}"),
    ("Give me the first and the last item of: {row}", "{first} and {last}"),
    ("Swap the first two: {row}", "{swapped}"),
)
MEMBER = (
    ("Is {item} in this list? {row}", "Yes, {item} is in the list."),
    ("Is {more} in this list? {row}", "No, {more} is not in the list."),
)


def listing(scene: Scene) -> Exchange:
    """A list sorted, reversed, counted, cut, joined or asked about."""
    row = _row(scene, ("word", "thing", "name", "city", "color", "number", "email", "song"))
    key = int if row[0].isdigit() else str
    gone = scene.rng.choice(row)
    known = {
        "row": row,
        "sorted": sorted(row, key=key),
        "reversed": row[::-1],
        "kept": [item for item in row if item != gone],
        "swapped": [row[1], row[0], *row[2:]],
    }
    more = str(scene.rng.randint(1000, 1099)) if key is int else scene["word9"]
    plain = {"gone": gone, "item": gone, "more": more, "first": row[0], "last": row[-1], "count": len(row)}
    return scene.pair(ORDER + MEMBER, **{slot: ", ".join(items) for slot, items in known.items()}, **plain)


EXTREME = (
    ("Which number is the largest: {row}?", "{most} is the largest."),
    ("Which number is the smallest: {row}?", "{least} is the smallest."),
)


def extreme(scene: Scene) -> Exchange:
    """The largest or smallest of some numbers."""
    row = scene.rng.sample(range(scene.rng.choice((20, 100, 1000))), scene.rng.randint(3, 5))
    return scene.pair(EXTREME, row=", ".join(map(str, row)), most=max(row), least=min(row))


FIELDS = {  # field of a record: the slot of its value
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


def lookup(scene: Scene) -> Exchange:
    """One field of a record, in one of several spellings."""
    record = _record(scene)
    field = scene.rng.choice(tuple(record))
    text = scene.rng.choice((_plain(record), _lines(record), _json(record), _json({scene["word"]: _typed(record)})))
    return scene.pair(LOOKUP, record=text, field=field, value=record[field])


def rewrite(scene: Scene) -> Exchange:
    """A record from one spelling to the other, or with one field changed."""
    record = _record(scene)
    field = scene.rng.choice(tuple(record))
    new = scene[f"{FIELDS[field]}9"]
    known = {"plain": _plain(record), "json": _json(record), "changed": _json(record | {field: new})}
    return scene.pair(REWRITE, fields=", ".join(record), field=field, new=new, **known)


def _record(scene: Scene) -> dict[str, str]:
    fields = scene.rng.sample(tuple(FIELDS), scene.rng.randint(2, 4))
    return {field: scene[f"{FIELDS[field]}{n}"] for n, field in enumerate(fields, 1)}


def _plain(record: dict[str, str]) -> str:
    return ", ".join(f"{field}: {value}" for field, value in record.items())


def _lines(record: dict[str, str]) -> str:
    return "\n".join(f"{field} = {value}" for field, value in record.items())


def _json(record: dict) -> str:
    return json.dumps(_typed(record), ensure_ascii=False)


def _typed(record: dict) -> dict:
    return {field: int(value) if str(value).isdigit() else value for field, value in record.items()}


TOLD = (  # what is told; what can be asked about it; the record that says the same
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


def told(scene: Scene) -> Exchange:
    """A question on one sentence, or the sentence as a record."""
    sentence, pairs, fields = scene.rng.choice(TOLD)
    sentence = scene.fill(sentence)
    if scene.rng.random() < 0.4:
        return Exchange(f"{sentence} As a record:", _json({field: scene[field] for field in fields}))
    ask, answer = scene.pair(pairs)
    return Exchange(f"{sentence} {ask}", answer)


TASKS = {repeat: 4, nth: 2, listing: 3, extreme: 1, lookup: 4, rewrite: 3, told: 4}
