"""Training text of the bundled model: python -m scripts.nano.corpus DIRECTORY [--rows N] [--chats N] [--seed S]"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from scripts.nano import copying, facts
from scripts.nano.chats import make_chat
from scripts.nano.jsonl import write_rows
from scripts.nano.scene import Scene, choose_weighted
from scripts.nano.stories import make_story

NUM_TEXTS, NUM_CHATS = 110_000, 36_000  # rows that the bundled model was trained on
MIN_CHARS, MAX_CHARS = 150, 800  # of a row of text: about 40 to 250 tokens
STYLES = (
    "Question: {question}\nAnswer: {answer}\n",
    "Q: {question}\nA: {answer}\n",
    "{question} -> {answer}\n",
    "{question}\n{answer}\n\n",
    "- {question}\n  {answer}\n",
    "Ask: {question}\nReply: {answer}\n",
)


def make_exercises(rng: Random) -> str:
    """Questions and answers in one style; half of the rows have one kind of question only."""
    style = rng.choice(STYLES)
    tasks = rng.choice((facts.TASKS, copying.TASKS, copying.TASKS, facts.TASKS | copying.TASKS))
    makers = rng.choices(tuple(tasks), tuple(tasks.values()), k=6)
    if rng.random() < 0.5:
        makers = makers[:1] * 6
    min_chars, text = rng.randint(MIN_CHARS, MAX_CHARS // 2), ""
    for make in makers:
        text += style.format(**make(Scene(rng))._asdict())
        if len(text) > min_chars:
            break
    return text.strip()


def make_story_text(rng: Random) -> str:
    """A story, in half of the rows with questions about it."""
    story = make_story(rng)
    if rng.random() < 0.5:
        return story.text
    style = rng.choice(STYLES)
    return story.text + "\n" + "".join(style.format(**exchange._asdict()) for exchange in story.questions).rstrip()


TEXTS = {make_exercises: 3, make_story_text: 2}  # with relative frequencies


def make_text_row(rng: Random) -> dict:
    return {"text": choose_weighted(rng, TEXTS)(rng)}


def make_chat_row(rng: Random) -> dict:
    return {"messages": make_chat(rng)}


ROWS: dict[str, tuple[Callable[[Random], dict], int, int]] = {  # maker; minimum and maximum characters of a line
    "text": (make_text_row, MIN_CHARS, MAX_CHARS),
    "chat": (make_chat_row, 0, 1500),
}


def iter_rows(kind: str, count: int, seed: str, previous: set[str]) -> Iterator[dict]:
    """Rows that differ from each other and from all in `previous`, which is updated."""
    make, min_chars, max_chars = ROWS[kind]
    rng = Random(seed)
    while count:
        row = make(rng)
        line = json.dumps(row, ensure_ascii=False)
        if min_chars <= len(line) <= max_chars and line not in previous:
            previous.add(line)
            count -= 1
            yield row


def write_corpus(directory: Path, seed: int, **counts: int) -> None:
    """Write `<kind>.jsonl`, and `<kind>_test.jsonl` with a twentieth as many rows (at most 500) from another seed."""
    for kind, count in counts.items():
        previous: set[str] = set()
        for name, size in ((kind, count), (f"{kind}_test", min(500, max(1, count // 20)))):
            write_rows(directory / f"{name}.jsonl", iter_rows(kind, size, f"{seed} {name}", previous))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=NUM_TEXTS, help="rows of plain text")
    parser.add_argument("--chats", type=int, default=NUM_CHATS, help="conversations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_corpus(args.directory, args.seed, text=args.rows, chat=args.chats)


if __name__ == "__main__":
    main()
