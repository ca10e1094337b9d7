"""Questions that contain the answer: copying, lists, records, and reading comprehension."""

import json

from scripts.nano import word_lists
from scripts.nano.templates import Exchange, TemplateContext

REPETITION_TEMPLATES = (
    ("Repeat: {span}", "{span}"),
    ("Say this again: {span}", "{span}"),
    ('Copy the text between the quotes: {rest} "{span}"', "{span}"),
    ("Put quotes around this: {span}", '"{span}"'),
    ("Write this twice: {span}", "{span} {span}"),
    ('What did {name} say? {name} said "{span}" and went away.', '{name} said "{span}".'),
    ("Write {span} in brackets.", "[{span}]"),
)
SPAN_TEMPLATES = (
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


def make_repetition_question(context: TemplateContext) -> Exchange:
    """Verbatim repetition of a text."""
    return context.render_exchange(
        REPETITION_TEMPLATES,
        span=context.render(context.rng.choice(SPAN_TEMPLATES)),
        rest=context.render(context.rng.choice(SPAN_TEMPLATES)),
    )


NTH_WORD_TEMPLATES = (
    ("What is the {place} word of: {row}", "{item}"),
    ("Quote the {place} word. {row}", '"{item}"'),
    ("{row}. Which word is the {place}?", 'The {place} word is "{item}".'),
)


def make_nth_word_question(context: TemplateContext) -> Exchange:
    """N-th word of a list."""
    items = sample_items(context, ("word", "word", "thing", "name", "color", "number", "animal", "food"))
    index = context.rng.randrange(-1, len(items))
    ordinal = "last" if index == -1 else word_lists.ORDINALS[index]
    return context.render_exchange(NTH_WORD_TEMPLATES, row=" ".join(items), item=items[index], place=ordinal)


def sample_items(context: TemplateContext, kinds: tuple[str, ...]) -> list[str]:
    return context.sample_values(context.rng.choice(kinds), context.rng.randint(3, 6))


LIST_TEMPLATES = (
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
MEMBERSHIP_TEMPLATES = (
    ("Is {item} in this list? {row}", "Yes, {item} is in the list."),
    ("Is {added} in this list? {row}", "No, {added} is not in the list."),
)


def make_list_question(context: TemplateContext) -> Exchange:
    """Sorting, reversing, counting, shortening, extending, or searching a list."""
    items = sample_items(context, ("word", "thing", "name", "city", "color", "number", "email", "song"))
    is_numeric = items[0].isdigit()
    removed = context.rng.choice(items)
    lists = {
        "row": items,
        "sorted": sorted(items, key=int if is_numeric else str),
        "reversed": items[::-1],
        "remaining": [item for item in items if item != removed],
        "swapped": [items[1], items[0], *items[2:]],
    }
    added = str(context.rng.randint(1000, 1099)) if is_numeric else context["word9"]
    values = {"removed": removed, "item": removed, "added": added, "first": items[0], "last": items[-1]}
    formatted = {slot: ", ".join(row) for slot, row in lists.items()}
    return context.render_exchange(LIST_TEMPLATES + MEMBERSHIP_TEMPLATES, **formatted, **values, count=len(items))


EXTREMUM_TEMPLATES = (
    ("Which number is the largest: {row}?", "{largest} is the largest."),
    ("Which number is the smallest: {row}?", "{smallest} is the smallest."),
)


def make_extremum_question(context: TemplateContext) -> Exchange:
    """Largest or smallest number of a list."""
    numbers = context.rng.sample(range(context.rng.choice((20, 100, 1000))), context.rng.randint(3, 5))
    return context.render_exchange(
        EXTREMUM_TEMPLATES, row=", ".join(map(str, numbers)), largest=max(numbers), smallest=min(numbers)
    )


FIELD_SLOTS = {  # template slot of the value of each record field
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
LOOKUP_TEMPLATES = (
    ("{record}\nWhat is the {field}?", "{value}"),
    ("{record}\nTell me the {field}.", "The {field} is {value}."),
    ("{record}\n{field} =", "{value}"),
    ("{record}\nWhich field is {value}?", "{field}"),
)
REWRITING_TEMPLATES = (
    ("Write this as a record: {plain}", "{json}"),
    ("{plain}\nThe same as a record:", "{json}"),
    ("Read this record aloud: {json}", "{plain}"),
    ("Which fields does this record have? {json}", "{fields}"),
    ("Set the {field} to {new} in {json}", "{changed}"),
)


def make_record_lookup_question(context: TemplateContext) -> Exchange:
    """Value of a field of a record, which is formatted as text, lines or JSON."""
    record = sample_record(context)
    field = context.rng.choice(tuple(record))
    nested = {context["word"]: convert_numbers(record)}
    texts = (format_inline(record), format_lines(record), format_json(record), format_json(nested))
    return context.render_exchange(LOOKUP_TEMPLATES, record=context.rng.choice(texts), field=field, value=record[field])


def make_record_rewriting_question(context: TemplateContext) -> Exchange:
    """Conversion of a record to another format, or a change of one field."""
    record = sample_record(context)
    field = context.rng.choice(tuple(record))
    new = context[f"{FIELD_SLOTS[field]}9"]
    values = {
        "plain": format_inline(record),
        "json": format_json(record),
        "changed": format_json(record | {field: new}),
    }
    return context.render_exchange(REWRITING_TEMPLATES, fields=", ".join(record), field=field, new=new, **values)


def sample_record(context: TemplateContext) -> dict[str, str]:
    fields = context.rng.sample(tuple(FIELD_SLOTS), context.rng.randint(2, 4))
    return {field: context[f"{FIELD_SLOTS[field]}{number}"] for number, field in enumerate(fields, 1)}


def format_inline(record: dict[str, str]) -> str:
    return ", ".join(f"{field}: {value}" for field, value in record.items())


def format_lines(record: dict[str, str]) -> str:
    return "\n".join(f"{field} = {value}" for field, value in record.items())


def format_json(record: dict) -> str:
    return json.dumps(convert_numbers(record), ensure_ascii=False)


def convert_numbers(record: dict) -> dict:
    return {field: int(value) if str(value).isdigit() else value for field, value in record.items()}


PASSAGES = (  # sentence, questions with answers, fields of the equivalent record
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


def make_comprehension_question(context: TemplateContext) -> Exchange:
    """Question about a sentence, or conversion of the sentence to a record."""
    sentence, questions, fields = context.rng.choice(PASSAGES)
    sentence = context.render(sentence)
    if context.rng.random() < 0.4:
        return Exchange(f"{sentence} As a record:", format_json({field: context[field] for field in fields}))
    question, answer = context.render_exchange(questions)
    return Exchange(f"{sentence} {question}", answer)


TASK_WEIGHTS = {
    make_repetition_question: 4,
    make_nth_word_question: 2,
    make_list_question: 3,
    make_extremum_question: 1,
    make_record_lookup_question: 4,
    make_record_rewriting_question: 3,
    make_comprehension_question: 4,
}
