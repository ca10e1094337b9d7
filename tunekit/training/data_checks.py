"""Checks of the rows of a config: before every training run, and for `tune data`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tunekit import build
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.data.embedding_datasets import RetrievalDataset
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.row_checks import CheckContext, CheckTarget, Finding, run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.losses.embedding import EmbeddingLoss
from tunekit.losses.reward import RewardLoss
from tunekit.optim.config import resolve_steps
from tunekit.training.config import HasLoss, TrainConfig

MAX_LINES = 8  # in the log


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
    if key != "data" or not isinstance(cfg, TrainConfig):
        return CheckContext(max_length, vocab, packed, reward_target=scored, has_num_negatives=is_set)
    num_steps = cfg.max_steps or loader.num_steps(cfg.epochs)  # a streamed dataset needs max_steps
    warmup_steps = resolve_steps(cfg.lr_scheduler.warmup_steps, num_steps)
    length_key = "epochs" if cfg.max_steps is None else "max_steps"
    return CheckContext(max_length, vocab, packed, num_steps, warmup_steps, scored, is_set, length_key)


def has_num_negatives(data: DatasetConfig | MixtureBase) -> bool:
    """Whether `num_negatives` of all retrieval datasets of a config is set, not that of the first row."""
    datasets = MixtureBase.from_config(data).dataset_configs
    return all(dataset.num_negatives is not None for dataset in datasets if isinstance(dataset, RetrievalDataset))


def check_data(
    cfg: Any, loaders: Mapping[str, DataLoader | None], tokenizer: Tokenizer, dist: DistributedContext
) -> None:
    """Log a summary and the findings. Raise UserError if the data is unusable, unless `data_checks: warn`."""
    training_data = loaders["data"]
    assert training_data is not None
    dist.log(f"data: {training_data.summary}")
    check_loss_weights(cfg, loaders.values())
    findings = run_data_checks(*check_targets(cfg, loaders, tokenizer))
    errors = [finding for finding in findings if finding.severity == "wrong" and cfg.data_checks == "error"]
    log_findings([finding for finding in findings if finding not in errors], dist)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        problem = f"{errors[0]}{more}".removesuffix(".")
        raise UserError(f"{problem}. Inspect the rows with `tune data`, or set data_checks=warn.")


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
    """Log warnings and errors, not notes."""
    important = [finding for finding in findings if finding.severity != "note"]
    for finding in important[:MAX_LINES]:
        dist.log(f"{finding.severity}: {finding}")
    if len(important) > MAX_LINES:
        dist.log(f"{len(important) - MAX_LINES} more. `tune data` shows all of them.")
