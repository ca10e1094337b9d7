"""Checks of the rows of a config: before every training run, and for `tune data`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tunekit import build
from tunekit.data.check_target import CheckContext, CheckTarget, ColumnReaders, Finding, LabelRule
from tunekit.data.column_checks import UNUSED, column_findings
from tunekit.data.column_usage import ColumnUsage, merge_reports
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.data.embedding_datasets import RetrievalDataset
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.readers.open_dataset import find_data_files
from tunekit.data.row_checks import run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.losses.embedding import EmbeddingLoss
from tunekit.losses.reward import RewardLoss, class_names
from tunekit.optim.config import resolve_steps
from tunekit.training.config import HasLoss, TrainConfig

MAX_LINES = 8  # in the log
NUM_SAMPLED_ROWS = 100  # rows whose columns are checked without reading all rows


@runtime_checkable
class ReadsColumns(Protocol):
    """A config with rewards or an environment, which read the columns of rows by name."""

    @property
    def column_readers(self) -> ColumnReaders: ...


def check_targets(cfg: Any, loaders: Mapping[str, DataLoader | None], tokenizer: Tokenizer) -> list[CheckTarget]:
    """The datasets of a config with what the checks need to know about them. `loaders`: by config key."""
    return [
        CheckTarget(
            key,
            loader.datasets,
            loader.mixture.prepare_tokenizer(tokenizer),
            check_context(cfg, key, loader, tokenizer.vocab_size),
        )
        for key, loader in loaders.items()
        if loader is not None
    ]


def check_context(cfg: Any, key: str, loader: DataLoader, vocab: int | None) -> CheckContext:
    """How the config uses the rows of one key: limits, packing, steps and warmup, labels."""
    max_length = loader.mixture.max_length
    packed = None if loader.mixture.capacity is None else np.diff(loader.first_plan.bounds)
    scored = cfg.loss.target if isinstance(cfg, HasLoss) and isinstance(cfg.loss, RewardLoss | EmbeddingLoss) else None
    is_set = has_num_negatives(getattr(cfg, key))
    usage = {"label_rule": find_label_rule(cfg), "column_readers": find_column_readers(cfg)}
    if key != "data" or not isinstance(cfg, TrainConfig):
        return CheckContext(max_length, vocab, packed, reward_target=scored, has_num_negatives=is_set, **usage)
    num_steps = cfg.max_steps or loader.num_steps(cfg.epochs)  # a streamed dataset needs max_steps
    warmup_steps = resolve_steps(cfg.lr_scheduler.warmup_steps, num_steps)
    length_key = "epochs" if cfg.max_steps is None else "max_steps"
    return CheckContext(max_length, vocab, packed, num_steps, warmup_steps, scored, is_set, length_key, **usage)


def find_label_rule(cfg: Any) -> LabelRule | None:
    """Labels that the loss of a config cannot use; None if there is no such loss."""
    loss = cfg.loss if isinstance(cfg, HasLoss) else None
    if isinstance(loss, RewardLoss) and isinstance(cfg, TrainConfig):
        return loss.label_rule(loss.score_head(0, len(class_names(cfg.data))).labels)
    return loss.label_rule if isinstance(loss, EmbeddingLoss) else None


def find_column_readers(cfg: Any) -> ColumnReaders:
    """Columns that the rewards and the environment of a config read."""
    return cfg.column_readers if isinstance(cfg, ReadsColumns) else ColumnReaders()


def has_num_negatives(data: DatasetConfig | MixtureBase) -> bool:
    """Whether `num_negatives` of all retrieval datasets of a config is set, not that of the first row."""
    datasets = MixtureBase.from_config(data).dataset_configs
    return all(dataset.num_negatives is not None for dataset in datasets if isinstance(dataset, RetrievalDataset))


def check_data(
    cfg: Any, loaders: Mapping[str, DataLoader | None], tokenizer: Tokenizer, dist: DistributedContext
) -> list[Finding]:
    """Log a summary and the findings, and return them. Raise UserError if the data is unusable.

    With `data_checks: warn`, unusable data is only logged.
    """
    training_data = loaders["data"]
    assert training_data is not None
    dist.log(f"data: {training_data.summary}")
    check_loss_weights(cfg, loaders.values())
    log_new_columns(cfg, "data", training_data, dist)
    findings = run_data_checks(*check_targets(cfg, loaders, tokenizer))
    report_findings(cfg, findings, dist)
    return findings


def report_findings(cfg: Any, findings: list[Finding], dist: DistributedContext) -> None:
    """Log findings. Raise UserError for the first one that is wrong, unless `data_checks: warn`."""
    errors = [finding for finding in findings if finding.severity == "wrong" and cfg.data_checks == "error"]
    log_findings([finding for finding in findings if finding not in errors], dist)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        problem = str(errors[0]).removesuffix(".")
        raise UserError(f"{problem}{more}. Inspect the rows with `tune data`, or set data_checks=warn.")


def check_columns(cfg: Any, key: str, loader: DataLoader, dist: DistributedContext) -> None:
    """Log the findings about columns. Raise UserError as `check_data` does."""
    report_findings(cfg, describe_columns(cfg, key, loader.datasets), dist)


def log_new_columns(cfg: Any, key: str, loader: DataLoader, dist: DistributedContext) -> None:
    """Log the findings about columns that only later blocks of streaming data have, when these are read."""
    known = {report.name for dataset in loader.datasets for report in dataset.summary.columns}

    def log_block(dataset: TokenizedDataset) -> None:
        names = {report.name for report in dataset.summary.columns}
        if not names <= known:
            known.update(names)
            log_findings(describe_columns(cfg, key, [dataset]), dist)

    loader.add_check(log_block)


def describe_columns(cfg: Any, key: str, datasets: Sequence[TokenizedDataset]) -> list[Finding]:
    """Findings about the columns of datasets."""
    reports = merge_reports(*(dataset.summary.columns for dataset in datasets))
    num_rows = sum(dataset.summary.rows or len(dataset) for dataset in datasets)
    return [*column_findings(key, reports, num_rows, find_column_readers(cfg))]


def column_warnings(cfg: TrainConfig) -> Iterator[str]:
    """Warnings about columns of the first rows in local files that are not used."""
    tokenizer = cfg.open_tokenizer()
    for key, data in (("data", cfg.data), ("eval_data", cfg.eval_data)):
        for config in () if data is None else MixtureBase.from_config(data).resolve().dataset_configs:
            if not find_data_files(config.source, config.split):
                continue
            usage, rows = ColumnUsage(), [*islice(config.open_rows().rows, NUM_SAMPLED_ROWS)]
            config.encode_rows(config.prepare_tokenizer(tokenizer), rows, usage)
            yield from map(str, column_findings(key, usage.reports, len(rows), find_column_readers(cfg)))


def check_loss_weights(cfg: Any, loaders: Iterable[DataLoader | None]) -> None:
    """Raise UserError for a message weight between 0 and 1, now or when its row is read, if the loss cannot apply it.

    Cached rows may be from a recipe that can.
    """
    if isinstance(cfg, HasLoss) and isinstance(cfg.loss, CrossEntropy) and cfg.loss.measure is None:
        return
    for loader in loaders:
        if loader is not None:
            loader.add_check(TokenizedDataset.require_equal_weights)


def long_row_warnings(cfg: TrainConfig) -> Iterator[str]:
    """Warnings about a `max_length` above the context of the model. Reads no rows.

    Packed rows are not checked: their documents may be shorter.
    """
    context = build.read_checkpoint(cfg).spec.context
    for key, data in (("data", cfg.data), ("eval_data", cfg.eval_data)):
        if data is not None and not data.packing and data.max_length > context:
            limit = f"the {context:,} positions of {cfg.model} (max_position_embeddings)"
            yield f"{key}.max_length: {data.max_length:,} exceeds {limit}. `tune data` counts the longer rows."


def warn_data(cfg: Any, data: DataLoader, tokenizer: Tokenizer, dist: DistributedContext) -> None:
    """Log the findings about the rows of an evaluation."""
    log_findings(run_data_checks(*check_targets(cfg, {"data": data}, tokenizer)), dist)


def log_findings(findings: list[Finding], dist: DistributedContext) -> None:
    """Log warnings and errors, and of the notes only columns that are not used."""
    important = [finding for finding in findings if finding.severity != "note" or finding.kind == UNUSED]
    for finding in important[:MAX_LINES]:
        dist.log(f"{finding.severity}: {finding}")
    if len(important) > MAX_LINES:
        dist.log(f"{len(important) - MAX_LINES} more. `tune data` shows all of them.")
