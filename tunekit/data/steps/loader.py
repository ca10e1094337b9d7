"""From what a recipe's `data:` says to what it steps through."""

from pathlib import Path

from tunekit.data.prepared import prepare
from tunekit.data.prepared.documents import BAD_ROWS, Documents
from tunekit.data.rows import Rows
from tunekit.data.steps.batch import Layout
from tunekit.data.steps.mapped import Mapped
from tunekit.data.steps.mix import Mixed, streams
from tunekit.data.steps.served import Loader
from tunekit.data.steps.stream import Blocks, Feed, Passing, Streaming
from tunekit.data.steps.streamed import Streamed
from tunekit.data.tokenizer import Tokenizer


def load(
    choice: Rows | Mixed,
    tokenizer: Tokenizer,
    batch: int,
    micro_batch: int,
    run,
    folder: Path | None = None,
    fresh: bool = False,
) -> Loader:
    """What a recipe's `data:` says, ready to be stepped through; UserError names the first row that is wrong.

    `folder` is the run's, for the list of rows that were skipped; with `fresh`, the run does not go on, and no line of
    an earlier one stays there. Rank 0 shows a bar.
    """
    mix = Mixed.of(choice)
    listed = None if folder is None or not run.is_main else folder / BAD_ROWS
    if listed is not None and (fresh or not streams(mix)):
        listed.unlink(missing_ok=True)
    loader = opened(mix, tokenizer, (batch, micro_batch), run, listed)
    if tokenizer.vocab is not None:
        loader.check(tokenizer.vocab)
    return loader


def opened(mix: Mixed, tokenizer: Tokenizer, sizes: tuple[int, int], run, listed: Path | None) -> Loader:
    """`sizes`: rows of a step, and of a micro-batch."""
    mix = mix.settled()
    pad, owned = mix.prepare(tokenizer).pad, any(rows.JUDGED for rows in mix.sources)
    layout = Layout(*sizes, run.reader, run.sizes.readers, pad, mix.capacity, mix.each, owned)
    if streams(mix):
        return Streamed(mix, Blocks(mix, feeds(mix, tokenizer, run, listed), run.seed, layout.batch), layout)
    parts = tuple(prepare.documents(rows, tokenizer, run) for rows in mix.sources)
    for part in parts:
        listed_bad_rows(part, listed)
    return Mapped(mix, parts, layout, run.seed)


def feeds(mix: Mixed, tokenizer: Tokenizer, run, listed: Path | None) -> list[Feed]:
    """The sources of a mix of which some at least are streams."""
    found: list[Feed] = []
    for part, rows in enumerate(mix.sources):
        if rows.stream:
            found.append(Streaming(rows, tokenizer, listed))
        else:
            documents = prepare.documents(rows, tokenizer, run)
            listed_bad_rows(documents, listed)
            found.append(Passing(documents, rows.EACH, run.seed + part, mix.shuffle))
    return found


def listed_bad_rows(documents: Documents, file: Path | None) -> None:
    """Add the rows that were skipped to a list."""
    if file is not None and documents.prepared.bad_rows is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as lines:
            lines.write(documents.prepared.bad_rows.read_bytes())
