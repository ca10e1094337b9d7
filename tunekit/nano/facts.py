"""Questions whose answers are true: arithmetic, dates and times, units, general knowledge."""

from datetime import date, timedelta

from tunekit.nano import words
from tunekit.nano.scene import Exchange, Scene

PLUS = (
    ("What is {a} + {b}?", "{a} + {b} = {c}."),
    ("How much is {a} plus {b}?", "{a} plus {b} is {c}."),
    ("Add {a} and {b}.", "The sum of {a} and {b} is {c}."),
    (
        "{name} has {a} coins and gets {b} more. How many coins does {name} have now?",
        "{a} + {b} = {c}, so {name} has {c} coins.",
    ),
    ("There are {a} cups {spot} and {b} cups {spot2}. How many cups are there?", "There are {a} + {b} = {c} cups."),
)
MINUS = (
    ("What is {a} - {b}?", "{a} - {b} = {c}."),
    ("How much is {a} minus {b}?", "{a} minus {b} is {c}."),
    ("Take {b} away from {a}.", "{a} minus {b} is {c}."),
    (
        "{name} had {a} stamps and gave {b} of them to {name2}. How many are left?",
        "{a} - {b} = {c}, so {c} stamps are left.",
    ),
)
TIMES = (
    ("What is {a} * {b}?", "{a} * {b} = {c}."),
    ("How much is {a} times {b}?", "{a} times {b} is {c}."),
    ("{name} fills {a} bags with {b} nuts each. How many nuts is that?", "{a} * {b} = {c}, so that is {c} nuts."),
)
COMPARE = (
    ("Which is larger, {a} or {b}?", "{more} is larger than {less}."),
    ("Which is smaller, {a} or {b}?", "{less} is smaller than {more}."),
    ("{name} has {a} points and {name2} has {b} points. What is the higher score?", "{more} is the higher score."),
)


def plus(scene: Scene) -> Exchange:
    """A sum of two numbers of one or two digits."""
    a, b = _operands(scene)
    return scene.pair(PLUS, a=a, b=b, c=a + b)


def minus(scene: Scene) -> Exchange:
    """A difference that is not negative."""
    b, a = sorted(_operands(scene))
    return scene.pair(MINUS, a=a, b=b, c=a - b)


def times(scene: Scene) -> Exchange:
    """A product from the table of twelve."""
    a, b = scene.rng.randint(0, 12), scene.rng.randint(0, 12)
    return scene.pair(TIMES, a=a, b=b, c=a * b)


def compare(scene: Scene) -> Exchange:
    """The larger or smaller one of two different numbers."""
    a, b = scene.rng.sample(range(scene.rng.choice((20, 100, 1000))), 2)
    return scene.pair(COMPARE, a=a, b=b, more=max(a, b), less=min(a, b))


def _operands(scene: Scene) -> tuple[int, int]:
    high = scene.rng.choice((9, 20, 99))
    return scene.rng.randint(0, high), scene.rng.randint(0, high)


SEQUENCE = (
    ("What comes next: {shown}?", "After {last} comes {next}."),
    ("Go on by one step: {shown}.", "{shown}, {next}."),
)


def sequence(scene: Scene) -> Exchange:
    """The next number of a row with equal steps."""
    start, step = scene.rng.randint(0, 30), scene.rng.choice((1, 2, 3, 5, 10))
    shown = [start + step * n for n in range(scene.rng.randint(3, 5))]
    return scene.pair(SEQUENCE, shown=", ".join(map(str, shown)), last=shown[-1], next=shown[-1] + step)


PARITY = (
    ("Is {a} even or odd?", "{a} is {kind}."),
    ("Tell me whether {a} is odd or even.", "The number {a} is {kind}."),
)


def parity(scene: Scene) -> Exchange:
    """Whether a number is even."""
    a = scene.rng.randint(0, 999)
    return scene.pair(PARITY, a=a, kind="odd" if a % 2 else "even")


SPELT = (("Write {a} as a word.", "{a} is {word}."), ("Which number is {word}?", "{word} is {a}."))


def spelt(scene: Scene) -> Exchange:
    """A number up to twenty and its name."""
    a = scene.rng.randint(0, 20)
    return scene.pair(SPELT, a=a, word=words.NUMBERS[a])


WEEK = (
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


def week(scene: Scene) -> Exchange:
    """Steps of days through the week."""
    start, count = scene.rng.randrange(7), scene.rng.randint(1, 7)
    end = words.DAYS[(start + count) % 7]
    return scene.pair(NEXT_DAY if count == 1 else WEEK, start=words.DAYS[start], count=count, end=end)


YEAR = (
    ("Which month comes after {start}?", "After {start} comes {end}."),
    ("Which month comes before {end}?", "Before {end} comes {start}."),
    ("Which month is number {number} of the year?", "Month number {number} is {start}."),
    ("How many days does {start} have?", "{start} has {days} days."),
)


def year(scene: Scene) -> Exchange:
    """Order and length of the months, February in a common year."""
    month = scene.rng.randrange(12)
    days = "28 or 29" if month == 1 else words.LENGTHS[month]
    end = words.MONTHS[(month + 1) % 12]
    return scene.pair(YEAR, start=words.MONTHS[month], end=end, number=month + 1, days=days)


CALENDAR = (
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


def calendar(scene: Scene) -> Exchange:
    """Dates of a common year: some days later, and which is earlier."""
    start = date(2023, 1, 1) + timedelta(days=scene.rng.randrange(345))
    count = scene.rng.randint(2, 20)
    end = start + timedelta(days=count)
    if scene.rng.random() < 0.5:
        return scene.pair(CALENDAR, start=_spoken(start), end=_spoken(end), count=count)
    x, y = scene.rng.sample((start, end), 2)
    return scene.pair(EARLIER, x=_spoken(x), y=_spoken(y), first=_spoken(start), last=_spoken(end))


def _spoken(day: date) -> str:
    return f"{words.MONTHS[day.month - 1]} {day.day}"


CLOCK = (
    ("It is {start}. What time is it in {count} minutes?", "{count} minutes after {start} it is {end}."),
    ("The train leaves at {start} and takes {count} minutes. When does it arrive?", "It arrives at {end}."),
    ("What time is {count} minutes before {end}?", "{count} minutes before {end} it is {start}."),
)


def clock(scene: Scene) -> Exchange:
    """Minutes after and before a time of the day."""
    start, count = scene.rng.randrange(0, 23 * 60, 5), scene.rng.choice((5, 10, 15, 20, 30, 45))
    return scene.pair(CLOCK, start=_hands(start), end=_hands(start + count), count=count)


def _hands(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"


DOWN = (
    ("How many {small} are {n} {large}?", "{n} {large} are {m} {small}."),
    ("Convert {n} {large} to {small}.", "{n} {large} = {m} {small}."),
    ("{name} needs {n} {large}. How many {small} is that?", "That is {n} * {each} = {m} {small}."),
)
UP = (("How many {large} are {m} {small}?", "{m} {small} are {n} {large}."),)


def units(scene: Scene) -> Exchange:
    """Small amounts from one unit to another."""
    (large, small), each = scene.rng.choice(tuple(words.UNITS.items()))
    n = scene.rng.randint(2, 12)
    return scene.pair(DOWN + UP, n=n, large=large, small=small, each=each, m=n * each)


CAPITAL = (
    ("What is the capital of {country}?", "The capital of {country} is {city}."),
    ("In which country is {city}?", "{city} is in {country}."),
)
OPPOSITE = (
    ("What is the opposite of {x}?", "The opposite of {x} is {y}."),
    ("Give me a word that means the opposite of {y}.", "The opposite of {y} is {x}."),
)
FOREIGN = (
    ("What is {english} in {tongue}?", 'In {tongue}, {english} is "{foreign}".'),
    ('What does "{foreign}" mean in {tongue}?', 'The {tongue} word "{foreign}" means {english}.'),
)
SOUND = (
    ("Which animal {sound}?", "The {animal} {sound}."),
    ("What sound does a {animal} make?", "A {animal} {sound}."),
)


def knowledge(scene: Scene) -> Exchange:
    """Capitals, opposites, foreign words, sounds of animals."""
    rng = scene.rng
    city, country = rng.choice(tuple(words.CAPITALS.items()))
    x, y = rng.choice(tuple(words.OPPOSITES.items()))
    english, foreign = rng.choice(tuple(words.DICTIONARY.items()))
    tongue = rng.randrange(3)
    animal, sound = rng.choice(tuple(words.SOUNDS.items()))
    known = {
        "english": english,
        "foreign": foreign[tongue],
        "tongue": words.LANGUAGES[tongue],
        "animal": animal,
        "sound": sound,
    }
    return scene.pair(rng.choice((CAPITAL, OPPOSITE, FOREIGN, SOUND)), city=city, country=country, x=x, y=y, **known)


TASKS = {
    plus: 3,
    minus: 3,
    times: 2,
    compare: 2,
    sequence: 1,
    parity: 1,
    spelt: 1,
    week: 2,
    year: 2,
    calendar: 2,
    clock: 2,
    units: 2,
    knowledge: 3,
}
