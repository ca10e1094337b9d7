"""From what a recipe's `data:` says to what it steps through."""

from pathlib import Path

from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Collator
from tunekit.data.dataloader.map_style import MapDataLoader
from tunekit.data.dataloader.mixture import MixtureBase, is_streaming
from tunekit.data.dataloader.stream_blocks import BlockStream, DocumentFeed, MapFeed, StreamFeed
from tunekit.data.dataloader.streaming import StreamingDataLoader
from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess import preprocess
from tunekit.data.preprocess.tokenized_dataset import BAD_ROWS, TokenizedDataset
from tunekit.data.tokenizer import Tokenizer


def build_dataloader(
    choice: DatasetConfig | MixtureBase,
    tokenizer: Tokenizer,
    batch: int,
    micro_batch: int,
    run,
    folder: Path | None = None,
    fresh: bool = False,
) -> DataLoader:
    """What a recipe's `data:` says, ready to be stepped through; UserError names the first row that is wrong.

    `folder` is the run's, for the list of rows that were skipped; with `fresh`, the run does not go on, and no line of
    an earlier one stays there. Rank 0 shows a bar.
    """
    mix = MixtureBase.from_config(choice)
    listed = None if folder is None or not run.is_main else folder / BAD_ROWS
    if listed is not None and (fresh or not is_streaming(mix)):
        listed.unlink(missing_ok=True)
    loader = make_dataloader(mix, tokenizer, (batch, micro_batch), run, listed)
    if tokenizer.vocab is not None:
        loader.check_vocab(tokenizer.vocab)
    return loader


def make_dataloader(
    mix: MixtureBase, tokenizer: Tokenizer, sizes: tuple[int, int], run, listed: Path | None
) -> DataLoader:
    """`sizes`: rows of a step, and of a micro-batch."""
    mix = mix.resolve()
    pad, owned = mix.prepare_tokenizer(tokenizer).pad, any(rows.has_document_ids for rows in mix.dataset_configs)
    layout = Collator(*sizes, run.reader, run.sizes.readers, pad, mix.capacity, mix.docs_per_row, owned)
    if is_streaming(mix):
        return StreamingDataLoader(
            mix, BlockStream(mix, make_feeds(mix, tokenizer, run, listed), run.seed, layout.global_batch_size), layout
        )
    parts = tuple(preprocess.preprocess_dataset(rows, tokenizer, run) for rows in mix.dataset_configs)
    for part in parts:
        append_bad_rows(part, listed)
    return MapDataLoader(mix, parts, layout, run.seed)


def make_feeds(mix: MixtureBase, tokenizer: Tokenizer, run, listed: Path | None) -> list[DocumentFeed]:
    """The sources of a mix of which some at least are streams."""
    found: list[DocumentFeed] = []
    for part, rows in enumerate(mix.dataset_configs):
        if rows.streaming:
            found.append(StreamFeed(rows, tokenizer, listed))
        else:
            documents = preprocess.preprocess_dataset(rows, tokenizer, run)
            append_bad_rows(documents, listed)
            found.append(MapFeed(documents, rows.docs_per_row, run.seed + part, mix.shuffle))
    return found


def append_bad_rows(documents: TokenizedDataset, file: Path | None) -> None:
    """Add the rows that were skipped to a list."""
    if file is not None and documents.prepared.bad_rows is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as lines:
            lines.write(documents.prepared.bad_rows.read_bytes())
