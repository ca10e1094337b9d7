"""Training text of the bundled model: python -m scripts.nano.corpus DIRECTORY [--rows N] [--chats N] [--seed S]"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from scripts.nano import copying, facts
from scripts.nano.chats import make_chat
from scripts.nano.jsonl import write_rows
from scripts.nano.stories import make_story
from scripts.nano.templates import TemplateContext, sample_weighted

NUM_TEXTS, NUM_CHATS = 110_000, 36_000  # rows that the bundled model was trained on
MIN_CHARS, MAX_CHARS = 150, 800  # of a row of text: about 40 to 250 tokens
QUESTION_FORMATS = (
    "Question: {question}\nAnswer: {answer}\n",
    "Q: {question}\nA: {answer}\n",
    "{question} -> {answer}\n",
    "{question}\n{answer}\n\n",
    "- {question}\n  {answer}\n",
    "Ask: {question}\nReply: {answer}\n",
)


def make_question_text(rng: Random) -> str:
    """Questions and answers in one format. Half of the texts have only one kind of question."""
    question_format = rng.choice(QUESTION_FORMATS)
    task_weights = rng.choice(
        (facts.TASK_WEIGHTS, copying.TASK_WEIGHTS, copying.TASK_WEIGHTS, facts.TASK_WEIGHTS | copying.TASK_WEIGHTS)
    )
    makers = rng.choices(tuple(task_weights), tuple(task_weights.values()), k=6)
    if rng.random() < 0.5:
        makers = makers[:1] * 6
    min_chars, text = rng.randint(MIN_CHARS, MAX_CHARS // 2), ""
    for make_question in makers:
        text += question_format.format(**make_question(TemplateContext(rng))._asdict())
        if len(text) > min_chars:
            break
    return text.strip()


def make_story_text(rng: Random) -> str:
    """A story, with questions about it in half of the texts."""
    story = make_story(rng)
    if rng.random() < 0.5:
        return story.text
    question_format = rng.choice(QUESTION_FORMATS)
    questions = "".join(question_format.format(**exchange._asdict()) for exchange in story.questions)
    return f"{story.text}\n{questions.rstrip()}"


TEXT_WEIGHTS = {make_question_text: 3, make_story_text: 2}


def make_text_row(rng: Random) -> dict:
    return {"text": sample_weighted(rng, TEXT_WEIGHTS)(rng)}


def make_chat_row(rng: Random) -> dict:
    return {"messages": make_chat(rng)}


# Generator of rows; minimum and maximum characters of a row
ROW_KINDS: dict[str, tuple[Callable[[Random], dict], int, int]] = {
    "text": (make_text_row, MIN_CHARS, MAX_CHARS),
    "chat": (make_chat_row, 0, 1500),
}


def iter_rows(kind: str, count: int, seed: str, seen: set[str]) -> Iterator[dict]:
    """Rows without duplicates. Rows in `seen` are skipped, and new ones are added to it."""
    make_row, min_chars, max_chars = ROW_KINDS[kind]
    rng = Random(seed)
    while count:
        row = make_row(rng)
        line = json.dumps(row, ensure_ascii=False)
        if min_chars <= len(line) <= max_chars and line not in seen:
            seen.add(line)
            count -= 1
            yield row


def write_corpus(directory: Path, seed: int, **counts: int) -> None:
    """Write `<kind>.jsonl`, and `<kind>_test.jsonl` with 1/20 of its number of rows, at most 500, and another seed."""
    for kind, count in counts.items():
        seen: set[str] = set()
        for name, size in ((kind, count), (f"{kind}_test", min(500, max(1, count // 20)))):
            write_rows(directory / f"{name}.jsonl", iter_rows(kind, size, f"{seed} {name}", seen))


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
