"""Build the data loader of a config."""

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
from tunekit.distributed.context import DistributedContext


def build_dataloader(
    config: DatasetConfig | MixtureBase,
    tokenizer: Tokenizer,
    global_batch_size: int,
    micro_batch_size: int,
    dist: DistributedContext,
    run_dir: Path | None = None,
    overwrite: bool = False,
) -> DataLoader:
    """Data loader of a dataset or mixture. Raise UserError for the first invalid row. Rank 0 shows a progress bar.

    Skipped rows are listed in `run_dir`. With `overwrite`, the list of an earlier run is deleted.
    """
    mixture = MixtureBase.from_config(config)
    bad_rows_file = None if run_dir is None or not dist.is_main_process else run_dir / BAD_ROWS
    if bad_rows_file is not None and (overwrite or not is_streaming(mixture)):
        bad_rows_file.unlink(missing_ok=True)
    loader = make_dataloader(mixture, tokenizer, (global_batch_size, micro_batch_size), dist, bad_rows_file)
    if tokenizer.vocab_size is not None:
        loader.check_vocab(tokenizer.vocab_size)
    return loader


def make_dataloader(
    mixture: MixtureBase,
    tokenizer: Tokenizer,
    batch_sizes: tuple[int, int],
    dist: DistributedContext,
    bad_rows_file: Path | None,
) -> DataLoader:
    """Data loader of a mixture. `batch_sizes` are the rows of a step and of a micro-batch."""
    mixture = mixture.resolve()
    pad_id = mixture.prepare_tokenizer(tokenizer).pad
    with_document_ids = any(config.has_document_ids for config in mixture.dataset_configs)
    collator = Collator(
        *batch_sizes,
        dist.dp_rank,
        dist.dims.dp_size,
        pad_id,
        mixture.capacity,
        mixture.docs_per_row,
        with_document_ids,
    )
    if is_streaming(mixture):
        feeds: list[DocumentFeed] = []
        for i, config in enumerate(mixture.dataset_configs):
            if config.streaming:
                feeds.append(StreamFeed(config, tokenizer, bad_rows_file))
            else:
                dataset = load_dataset(config, tokenizer, dist, bad_rows_file)
                feeds.append(MapFeed(dataset, config.docs_per_row, dist.seed + i, mixture.shuffle))
        stream = BlockStream(mixture, feeds, dist.seed, collator.global_batch_size)
        return StreamingDataLoader(mixture, stream, collator)
    datasets = (load_dataset(config, tokenizer, dist, bad_rows_file) for config in mixture.dataset_configs)
    return MapDataLoader(mixture, tuple(datasets), collator, dist.seed)


def load_dataset(
    config: DatasetConfig, tokenizer: Tokenizer, dist: DistributedContext, bad_rows_file: Path | None
) -> TokenizedDataset:
    """Preprocess a dataset, and append its skipped rows to a JSON Lines file."""
    dataset = preprocess.preprocess_dataset(config, tokenizer, dist)
    if bad_rows_file is not None and dataset.summary.bad_rows is not None:
        bad_rows_file.parent.mkdir(parents=True, exist_ok=True)
        with bad_rows_file.open("ab") as file:
            file.write(dataset.summary.bad_rows.read_bytes())
    return dataset
