"""Questions with true answers: arithmetic, dates and times, units, general knowledge."""

from datetime import date, timedelta

from scripts.nano import words
from scripts.nano.scene import Exchange, Scene

ADDITION = (
    ("What is {a} + {b}?", "{a} + {b} = {c}."),
    ("How much is {a} plus {b}?", "{a} plus {b} is {c}."),
    ("Add {a} and {b}.", "The sum of {a} and {b} is {c}."),
    (
        "{name} has {a} coins and gets {b} more. How many coins does {name} have now?",
        "{a} + {b} = {c}, so {name} has {c} coins.",
    ),
    ("There are {a} cups {spot} and {b} cups {spot2}. How many cups are there?", "There are {a} + {b} = {c} cups."),
)
SUBTRACTION = (
    ("What is {a} - {b}?", "{a} - {b} = {c}."),
    ("How much is {a} minus {b}?", "{a} minus {b} is {c}."),
    ("Take {b} away from {a}.", "{a} minus {b} is {c}."),
    (
        "{name} had {a} stamps and gave {b} of them to {name2}. How many are left?",
        "{a} - {b} = {c}, so {c} stamps are left.",
    ),
)
MULTIPLICATION = (
    ("What is {a} * {b}?", "{a} * {b} = {c}."),
    ("How much is {a} times {b}?", "{a} times {b} is {c}."),
    ("{name} fills {a} bags with {b} nuts each. How many nuts is that?", "{a} * {b} = {c}, so that is {c} nuts."),
)
COMPARISON = (
    ("Which is larger, {a} or {b}?", "{more} is larger than {less}."),
    ("Which is smaller, {a} or {b}?", "{less} is smaller than {more}."),
    ("{name} has {a} points and {name2} has {b} points. What is the higher score?", "{more} is the higher score."),
)


def make_addition(scene: Scene) -> Exchange:
    """The sum of two numbers of one or two digits."""
    a, b = draw_operands(scene)
    return scene.fill_exchange(ADDITION, a=a, b=b, c=a + b)


def make_subtraction(scene: Scene) -> Exchange:
    """The difference of two numbers; never negative."""
    b, a = sorted(draw_operands(scene))
    return scene.fill_exchange(SUBTRACTION, a=a, b=b, c=a - b)


def make_multiplication(scene: Scene) -> Exchange:
    """A product of two factors up to 12."""
    a, b = scene.rng.randint(0, 12), scene.rng.randint(0, 12)
    return scene.fill_exchange(MULTIPLICATION, a=a, b=b, c=a * b)


def make_comparison(scene: Scene) -> Exchange:
    """The larger or the smaller of two different numbers."""
    a, b = scene.rng.sample(range(scene.rng.choice((20, 100, 1000))), 2)
    return scene.fill_exchange(COMPARISON, a=a, b=b, more=max(a, b), less=min(a, b))


def draw_operands(scene: Scene) -> tuple[int, int]:
    high = scene.rng.choice((9, 20, 99))
    return scene.rng.randint(0, high), scene.rng.randint(0, high)


SEQUENCE = (
    ("What comes next: {shown}?", "After {last} comes {next}."),
    ("Go on by one step: {shown}.", "{shown}, {next}."),
)


def make_sequence(scene: Scene) -> Exchange:
    """The next number of an arithmetic sequence."""
    start, step = scene.rng.randint(0, 30), scene.rng.choice((1, 2, 3, 5, 10))
    shown = [start + step * n for n in range(scene.rng.randint(3, 5))]
    return scene.fill_exchange(SEQUENCE, shown=", ".join(map(str, shown)), last=shown[-1], next=shown[-1] + step)


PARITY = (
    ("Is {a} even or odd?", "{a} is {kind}."),
    ("Tell me whether {a} is odd or even.", "The number {a} is {kind}."),
)


def make_parity(scene: Scene) -> Exchange:
    """Even or odd numbers."""
    a = scene.rng.randint(0, 999)
    return scene.fill_exchange(PARITY, a=a, kind="odd" if a % 2 else "even")


NUMBER_WORD = (("Write {a} as a word.", "{a} is {word}."), ("Which number is {word}?", "{word} is {a}."))


def make_number_word(scene: Scene) -> Exchange:
    """Numbers up to 20 as words."""
    a = scene.rng.randint(0, 20)
    return scene.fill_exchange(NUMBER_WORD, a=a, word=words.NUMBER_WORDS[a])


DAYS_LATER = (
    ("What day comes {count} days after {start}?", "{count} days after {start} comes {end}."),
    ("Today is {start}. What day is it in {count} days?", "If today is {start}, in {count} days it is {end}."),
    ("What day was {count} days before {end}?", "{count} days before {end} was {start}."),
)
NEXT_DAY = (
    ("What day comes after {start}?", "After {start} comes {end}."),
    ("What day comes before {end}?", "Before {end} comes {start}."),
    ("Today is {start}. What day is tomorrow?", "Tomorrow is {end}."),
    ("Today is {end}. What day was yesterday?", "Yesterday was {start}."),
)


def make_weekday(scene: Scene) -> Exchange:
    """Weekdays some days before or after another."""
    start, count = scene.rng.randrange(7), scene.rng.randint(1, 7)
    end = words.DAYS[(start + count) % 7]
    return scene.fill_exchange(NEXT_DAY if count == 1 else DAYS_LATER, start=words.DAYS[start], count=count, end=end)


MONTH = (
    ("Which month comes after {start}?", "After {start} comes {end}."),
    ("Which month comes before {end}?", "Before {end} comes {start}."),
    ("Which month is number {number} of the year?", "Month number {number} is {start}."),
    ("How many days does {start} have?", "{start} has {days} days."),
)


def make_month(scene: Scene) -> Exchange:
    """Order and length of the months."""
    month = scene.rng.randrange(12)
    days = "28 or 29" if month == 1 else words.MONTH_LENGTHS[month]
    end = words.MONTHS[(month + 1) % 12]
    return scene.fill_exchange(MONTH, start=words.MONTHS[month], end=end, number=month + 1, days=days)


DATE = (
    ("What date is {count} days after {start}?", "{count} days after {start} is {end}."),
    (
        "{name} leaves on {start} and comes back {count} days later. When does {name} come back?",
        "{name} comes back on {end}.",
    ),
)
EARLIER = (
    ("Which date is earlier, {x} or {y}?", "{first} is before {last}."),
    ("Which date is later, {x} or {y}?", "{last} is after {first}."),
)


def make_date(scene: Scene) -> Exchange:
    """Date arithmetic and order of dates, in a year without a leap day."""
    start = date(2023, 1, 1) + timedelta(days=scene.rng.randrange(345))
    count = scene.rng.randint(2, 20)
    end = start + timedelta(days=count)
    if scene.rng.random() < 0.5:
        return scene.fill_exchange(DATE, start=format_date(start), end=format_date(end), count=count)
    x, y = scene.rng.sample((start, end), 2)
    return scene.fill_exchange(
        EARLIER, x=format_date(x), y=format_date(y), first=format_date(start), last=format_date(end)
    )


def format_date(day: date) -> str:
    return f"{words.MONTHS[day.month - 1]} {day.day}"


TIME = (
    ("It is {start}. What time is it in {count} minutes?", "{count} minutes after {start} it is {end}."),
    ("The train leaves at {start} and takes {count} minutes. When does it arrive?", "It arrives at {end}."),
    ("What time is {count} minutes before {end}?", "{count} minutes before {end} it is {start}."),
)


def make_time(scene: Scene) -> Exchange:
    """Times some minutes before or after another."""
    start, count = scene.rng.randrange(0, 23 * 60, 5), scene.rng.choice((5, 10, 15, 20, 30, 45))
    return scene.fill_exchange(TIME, start=format_time(start), end=format_time(start + count), count=count)


def format_time(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"


TO_SMALLER = (
    ("How many {small} are {n} {large}?", "{n} {large} are {m} {small}."),
    ("Convert {n} {large} to {small}.", "{n} {large} = {m} {small}."),
    ("{name} needs {n} {large}. How many {small} is that?", "That is {n} * {factor} = {m} {small}."),
)
TO_LARGER = (("How many {large} are {m} {small}?", "{m} {small} are {n} {large}."),)


def make_unit_conversion(scene: Scene) -> Exchange:
    """Conversions between two units."""
    (large, small), factor = scene.rng.choice(tuple(words.UNITS.items()))
    n = scene.rng.randint(2, 12)
    return scene.fill_exchange(TO_SMALLER + TO_LARGER, n=n, large=large, small=small, factor=factor, m=n * factor)


CAPITAL = (
    ("What is the capital of {country}?", "The capital of {country} is {city}."),
    ("In which country is {city}?", "{city} is in {country}."),
)
OPPOSITE = (
    ("What is the opposite of {x}?", "The opposite of {x} is {y}."),
    ("Give me a word that means the opposite of {y}.", "The opposite of {y} is {x}."),
)
TRANSLATION = (
    ("What is {english} in {tongue}?", 'In {tongue}, {english} is "{foreign}".'),
    ('What does "{foreign}" mean in {tongue}?', 'The {tongue} word "{foreign}" means {english}.'),
)
ANIMAL_SOUND = (
    ("Which animal {sound}?", "The {animal} {sound}."),
    ("What sound does a {animal} make?", "A {animal} {sound}."),
)


def make_knowledge(scene: Scene) -> Exchange:
    """Capitals, opposites, translations, and animal sounds."""
    rng = scene.rng
    city, country = rng.choice(tuple(words.CAPITALS.items()))
    x, y = rng.choice(tuple(words.OPPOSITES.items()))
    english, foreign = rng.choice(tuple(words.DICTIONARY.items()))
    tongue = rng.randrange(3)
    animal, sound = rng.choice(tuple(words.SOUNDS.items()))
    values = {
        "english": english,
        "foreign": foreign[tongue],
        "tongue": words.LANGUAGES[tongue],
        "animal": animal,
        "sound": sound,
    }
    return scene.fill_exchange(
        rng.choice((CAPITAL, OPPOSITE, TRANSLATION, ANIMAL_SOUND)), city=city, country=country, x=x, y=y, **values
    )


TASKS = {  # with relative frequencies
    make_addition: 3,
    make_subtraction: 3,
    make_multiplication: 2,
    make_comparison: 2,
    make_sequence: 1,
    make_parity: 1,
    make_number_word: 1,
    make_weekday: 2,
    make_month: 2,
    make_date: 2,
    make_time: 2,
    make_unit_conversion: 2,
    make_knowledge: 3,
}
