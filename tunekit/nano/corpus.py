"""Writes the text that the nano learns from: `python -m tunekit.nano.corpus <folder> --rows N --chats N --seed S`."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tunekit.nano import copying, facts
from tunekit.nano.chats import chat
from tunekit.nano.scene import Scene
from tunekit.nano.stories import story

TEXTS, CHATS = 110_000, 36_000  # rows of the nano's own corpus
SHORTEST, LONGEST = 150, 800  # characters of a row: some 40 to 250 tokens
STYLES = (
    "Question: {ask}\nAnswer: {answer}\n",
    "Q: {ask}\nA: {answer}\n",
    "{ask} -> {answer}\n",
    "{ask}\n{answer}\n\n",
    "- {ask}\n  {answer}\n",
    "Ask: {ask}\nReply: {answer}\n",
)


def sheet(rng: Random) -> str:
    """Tasks in one style; half of the sheets keep to one kind of task."""
    style = rng.choice(STYLES)
    tasks = rng.choice((facts.TASKS, copying.TASKS, copying.TASKS, facts.TASKS | copying.TASKS))
    kinds = rng.choices(tuple(tasks), tuple(tasks.values()), k=6)
    if rng.random() < 0.5:
        kinds = kinds[:1] * 6
    wanted, text = rng.randint(SHORTEST, LONGEST // 2), ""
    for kind in kinds:
        text += style.format(**kind(Scene(rng))._asdict())
        if len(text) > wanted:
            break
    return text.strip()


def tale(rng: Random) -> str:
    """A story, with questions on it half of the time."""
    told = story(rng)
    if rng.random() < 0.5:
        return told.text
    style = rng.choice(STYLES)
    return told.text + "\n" + "".join(style.format(**asked._asdict()) for asked in told.questions).rstrip()


PAGES = {sheet: 3, tale: 2}


def page(rng: Random) -> dict:
    """A row of plain text."""
    (make,) = rng.choices(tuple(PAGES), tuple(PAGES.values()))
    return {"text": make(rng)}


def conversation(rng: Random) -> dict:
    """A row of chat messages."""
    return {"messages": chat(rng)}


KINDS: dict[str, tuple[Callable[[Random], dict], int, int]] = {  # how a row is made; fewest and most characters of it
    "text": (page, SHORTEST, LONGEST),
    "chat": (conversation, 0, 1500),
}


def rows(kind: str, count: int, seed: str, seen: set[str]) -> Iterator[str]:
    """`count` lines of JSON, each unlike all in `seen`, which grows by them."""
    make, shortest, longest = KINDS[kind]
    rng = Random(seed)
    while count:
        line = json.dumps(make(rng), ensure_ascii=False)
        if shortest <= len(line) <= longest and line not in seen:
            seen.add(line)
            count -= 1
            yield line + "\n"


def write(folder: Path, seed: int, **counts: int) -> None:
    """Writes `<kind>.jsonl` and, from another seed, a twentieth as many rows (500 at most) of `<kind>_test.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, count in counts.items():
        seen: set[str] = set()
        for name, part in ((kind, count), (f"{kind}_test", min(500, max(1, count // 20)))):
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(rows(kind, part, f"{seed} {name}", seen))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=TEXTS, help="rows of plain text")
    parser.add_argument("--chats", type=int, default=CHATS, help="conversations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.folder, args.seed, text=args.rows, chat=args.chats)


if __name__ == "__main__":
    main()
