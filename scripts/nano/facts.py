"""Questions and correct answers: arithmetic, dates and times, units, general knowledge."""

from datetime import date, timedelta

from scripts.nano import word_lists
from scripts.nano.templates import Exchange, TemplateContext

ADDITION_TEMPLATES = (
    ("What is {a} + {b}?", "{a} + {b} = {c}."),
    ("How much is {a} plus {b}?", "{a} plus {b} is {c}."),
    ("Add {a} and {b}.", "The sum of {a} and {b} is {c}."),
    (
        "{name} has {a} coins and gets {b} more. How many coins does {name} have now?",
        "{a} + {b} = {c}, so {name} has {c} coins.",
    ),
    ("There are {a} cups {spot} and {b} cups {spot2}. How many cups are there?", "There are {a} + {b} = {c} cups."),
)
SUBTRACTION_TEMPLATES = (
    ("What is {a} - {b}?", "{a} - {b} = {c}."),
    ("How much is {a} minus {b}?", "{a} minus {b} is {c}."),
    ("Take {b} away from {a}.", "{a} minus {b} is {c}."),
    (
        "{name} had {a} stamps and gave {b} of them to {name2}. How many are left?",
        "{a} - {b} = {c}, so {c} stamps are left.",
    ),
)
MULTIPLICATION_TEMPLATES = (
    ("What is {a} * {b}?", "{a} * {b} = {c}."),
    ("How much is {a} times {b}?", "{a} times {b} is {c}."),
    ("{name} fills {a} bags with {b} nuts each. How many nuts is that?", "{a} * {b} = {c}, so that is {c} nuts."),
)
COMPARISON_TEMPLATES = (
    ("Which is larger, {a} or {b}?", "{more} is larger than {less}."),
    ("Which is smaller, {a} or {b}?", "{less} is smaller than {more}."),
    ("{name} has {a} points and {name2} has {b} points. What is the higher score?", "{more} is the higher score."),
)


def make_addition_question(context: TemplateContext) -> Exchange:
    """Sum of two numbers from 0 to 99."""
    a, b = sample_operands(context)
    return context.render_exchange(ADDITION_TEMPLATES, a=a, b=b, c=a + b)


def make_subtraction_question(context: TemplateContext) -> Exchange:
    """Difference of two numbers; not negative."""
    b, a = sorted(sample_operands(context))
    return context.render_exchange(SUBTRACTION_TEMPLATES, a=a, b=b, c=a - b)


def make_multiplication_question(context: TemplateContext) -> Exchange:
    """Product of two factors from 0 to 12."""
    a, b = context.rng.randint(0, 12), context.rng.randint(0, 12)
    return context.render_exchange(MULTIPLICATION_TEMPLATES, a=a, b=b, c=a * b)


def make_comparison_question(context: TemplateContext) -> Exchange:
    """Larger or smaller one of two different numbers."""
    a, b = context.rng.sample(range(context.rng.choice((20, 100, 1000))), 2)
    return context.render_exchange(COMPARISON_TEMPLATES, a=a, b=b, more=max(a, b), less=min(a, b))


def sample_operands(context: TemplateContext) -> tuple[int, int]:
    high = context.rng.choice((9, 20, 99))
    return context.rng.randint(0, high), context.rng.randint(0, high)


SEQUENCE_TEMPLATES = (
    ("What comes next: {shown}?", "After {last} comes {next}."),
    ("Go on by one step: {shown}.", "{shown}, {next}."),
)


def make_sequence_question(context: TemplateContext) -> Exchange:
    """Next number of an arithmetic sequence."""
    start, step = context.rng.randint(0, 30), context.rng.choice((1, 2, 3, 5, 10))
    shown = [start + step * n for n in range(context.rng.randint(3, 5))]
    return context.render_exchange(
        SEQUENCE_TEMPLATES, shown=", ".join(map(str, shown)), last=shown[-1], next=shown[-1] + step
    )


PARITY_TEMPLATES = (
    ("Is {a} even or odd?", "{a} is {kind}."),
    ("Tell me whether {a} is odd or even.", "The number {a} is {kind}."),
)


def make_parity_question(context: TemplateContext) -> Exchange:
    """Even or odd numbers."""
    a = context.rng.randint(0, 999)
    return context.render_exchange(PARITY_TEMPLATES, a=a, kind="odd" if a % 2 else "even")


NUMBER_WORD_TEMPLATES = (("Write {a} as a word.", "{a} is {word}."), ("Which number is {word}?", "{word} is {a}."))


def make_number_word_question(context: TemplateContext) -> Exchange:
    """Names of the numbers from 0 to 20."""
    a = context.rng.randint(0, 20)
    return context.render_exchange(NUMBER_WORD_TEMPLATES, a=a, word=word_lists.NUMBER_WORDS[a])


DAYS_LATER_TEMPLATES = (
    ("What day comes {count} days after {start}?", "{count} days after {start} comes {end}."),
    ("Today is {start}. What day is it in {count} days?", "If today is {start}, in {count} days it is {end}."),
    ("What day was {count} days before {end}?", "{count} days before {end} was {start}."),
)
NEXT_DAY_TEMPLATES = (
    ("What day comes after {start}?", "After {start} comes {end}."),
    ("What day comes before {end}?", "Before {end} comes {start}."),
    ("Today is {start}. What day is tomorrow?", "Tomorrow is {end}."),
    ("Today is {end}. What day was yesterday?", "Yesterday was {start}."),
)


def make_weekday_question(context: TemplateContext) -> Exchange:
    """Weekday up to a week before or after another."""
    start, count = context.rng.randrange(7), context.rng.randint(1, 7)
    end = word_lists.DAYS[(start + count) % 7]
    return context.render_exchange(
        NEXT_DAY_TEMPLATES if count == 1 else DAYS_LATER_TEMPLATES, start=word_lists.DAYS[start], count=count, end=end
    )


MONTH_TEMPLATES = (
    ("Which month comes after {start}?", "After {start} comes {end}."),
    ("Which month comes before {end}?", "Before {end} comes {start}."),
    ("Which month is number {number} of the year?", "Month number {number} is {start}."),
    ("How many days does {start} have?", "{start} has {days} days."),
)


def make_month_question(context: TemplateContext) -> Exchange:
    """Order and length of the months."""
    month = context.rng.randrange(12)
    days = "28 or 29" if month == 1 else word_lists.MONTH_LENGTHS[month]
    end = word_lists.MONTHS[(month + 1) % 12]
    return context.render_exchange(
        MONTH_TEMPLATES, start=word_lists.MONTHS[month], end=end, number=month + 1, days=days
    )


DATE_ARITHMETIC_TEMPLATES = (
    ("What date is {count} days after {start}?", "{count} days after {start} is {end}."),
    (
        "{name} leaves on {start} and comes back {count} days later. When does {name} come back?",
        "{name} comes back on {end}.",
    ),
)
DATE_ORDER_TEMPLATES = (
    ("Which date is earlier, {x} or {y}?", "{first} is before {last}."),
    ("Which date is later, {x} or {y}?", "{last} is after {first}."),
)


def make_date_question(context: TemplateContext) -> Exchange:
    """Date arithmetic, and order of dates, in 2023, which has no leap day."""
    start = date(2023, 1, 1) + timedelta(days=context.rng.randrange(345))
    count = context.rng.randint(2, 20)
    end = start + timedelta(days=count)
    if context.rng.random() < 0.5:
        return context.render_exchange(
            DATE_ARITHMETIC_TEMPLATES, start=format_date(start), end=format_date(end), count=count
        )
    x, y = context.rng.sample((start, end), 2)
    return context.render_exchange(
        DATE_ORDER_TEMPLATES, x=format_date(x), y=format_date(y), first=format_date(start), last=format_date(end)
    )


def format_date(day: date) -> str:
    return f"{word_lists.MONTHS[day.month - 1]} {day.day}"


TIME_TEMPLATES = (
    ("It is {start}. What time is it in {count} minutes?", "{count} minutes after {start} it is {end}."),
    ("The train leaves at {start} and takes {count} minutes. When does it arrive?", "It arrives at {end}."),
    ("What time is {count} minutes before {end}?", "{count} minutes before {end} it is {start}."),
)


def make_time_question(context: TemplateContext) -> Exchange:
    """Time some minutes before or after another."""
    start, count = context.rng.randrange(0, 23 * 60, 5), context.rng.choice((5, 10, 15, 20, 30, 45))
    return context.render_exchange(
        TIME_TEMPLATES, start=format_time(start), end=format_time(start + count), count=count
    )


def format_time(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"


TO_SMALLER_UNIT_TEMPLATES = (
    ("How many {small} are {n} {large}?", "{n} {large} are {m} {small}."),
    ("Convert {n} {large} to {small}.", "{n} {large} = {m} {small}."),
    ("{name} needs {n} {large}. How many {small} is that?", "That is {n} * {factor} = {m} {small}."),
)
TO_LARGER_UNIT_TEMPLATES = (("How many {large} are {m} {small}?", "{m} {small} are {n} {large}."),)


def make_unit_conversion_question(context: TemplateContext) -> Exchange:
    """Conversions between two units."""
    (large, small), factor = context.rng.choice(tuple(word_lists.UNIT_FACTORS.items()))
    n = context.rng.randint(2, 12)
    return context.render_exchange(
        TO_SMALLER_UNIT_TEMPLATES + TO_LARGER_UNIT_TEMPLATES, n=n, large=large, small=small, factor=factor, m=n * factor
    )


CAPITAL_TEMPLATES = (
    ("What is the capital of {country}?", "The capital of {country} is {city}."),
    ("In which country is {city}?", "{city} is in {country}."),
)
OPPOSITE_TEMPLATES = (
    ("What is the opposite of {x}?", "The opposite of {x} is {y}."),
    ("Give me a word that means the opposite of {y}.", "The opposite of {y} is {x}."),
)
TRANSLATION_TEMPLATES = (
    ("What is {english} in {tongue}?", 'In {tongue}, {english} is "{foreign}".'),
    ('What does "{foreign}" mean in {tongue}?', 'The {tongue} word "{foreign}" means {english}.'),
)
ANIMAL_SOUND_TEMPLATES = (
    ("Which animal {sound}?", "The {animal} {sound}."),
    ("What sound does a {animal} make?", "A {animal} {sound}."),
)


def make_knowledge_question(context: TemplateContext) -> Exchange:
    """Capitals, opposites, translations, and animal sounds."""
    rng = context.rng
    city, country = rng.choice(tuple(word_lists.CAPITALS.items()))
    x, y = rng.choice(tuple(word_lists.OPPOSITES.items()))
    english, translations = rng.choice(tuple(word_lists.TRANSLATIONS.items()))
    language_index = rng.randrange(3)
    animal, sound = rng.choice(tuple(word_lists.ANIMAL_SOUNDS.items()))
    values = {
        "english": english,
        "foreign": translations[language_index],
        "tongue": word_lists.LANGUAGES[language_index],
        "animal": animal,
        "sound": sound,
    }
    return context.render_exchange(
        rng.choice((CAPITAL_TEMPLATES, OPPOSITE_TEMPLATES, TRANSLATION_TEMPLATES, ANIMAL_SOUND_TEMPLATES)),
        city=city,
        country=country,
        x=x,
        y=y,
        **values,
    )


TASK_WEIGHTS = {
    make_addition_question: 3,
    make_subtraction_question: 3,
    make_multiplication_question: 2,
    make_comparison_question: 2,
    make_sequence_question: 1,
    make_parity_question: 1,
    make_number_word_question: 1,
    make_weekday_question: 2,
    make_month_question: 2,
    make_date_question: 2,
    make_time_question: 2,
    make_unit_conversion_question: 2,
    make_knowledge_question: 3,
}
