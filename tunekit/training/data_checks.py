"""The checks of a run's rows: at the start of every training, and for `tune data`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunekit.data.dataloader.base import DataLoader
from tunekit.data.row_checks import CheckContext, CheckTarget, Finding, run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.losses.reward import RewardLoss
from tunekit.optim.config import LRSchedulerConfig, resolve_steps

MOST = 8  # lines in the log


def check_targets(cfg: Any, loaders: Mapping[str, DataLoader | None], tokenizer: Tokenizer) -> list[CheckTarget]:
    """The parts of a config, measured: what is learnt first."""
    return [
        CheckTarget(part, loader.parts, tokenizer, check_context(cfg, part, loader, tokenizer.vocab))
        for part, loader in loaders.items()
        if loader is not None
    ]


def check_context(cfg: Any, part: str, loader: DataLoader, vocab: int | None) -> CheckContext:
    """What the config does with rows. Not every recipe has a schedule."""
    told, limit = vars(cfg), vars(cfg)[part].max_length
    packed = None if loader.order.capacity is None else np.diff(loader.order.plan(0).bounds)
    loss = told.get("loss")
    scored = loss.told if isinstance(loss, RewardLoss) else None
    if part != "data" or not isinstance(told.get("lr_scheduler"), LRSchedulerConfig):
        return CheckContext(limit, vocab, packed, scored=scored)
    steps = told["max_steps"] or loader.steps(
        told["epochs"]
    )  # a stream has no epochs: a config without steps is refused
    return CheckContext(limit, vocab, packed, steps, resolve_steps(told["lr_scheduler"].warmup_steps, steps), scored)


def check_data(cfg: Any, loaders: Mapping[str, DataLoader | None], tokenizer: Tokenizer, run) -> None:
    """Log a summary and the findings. Raise UserError if the data is unusable, unless `data_checks: warn`."""
    training_data = loaders["data"]
    assert training_data is not None
    run.tell(f"data: {training_data.report}")
    found = run_data_checks(*check_targets(cfg, loaders, tokenizer))
    wrong = [finding for finding in found if finding.severity == "wrong" and cfg.data_checks == "error"]
    print_findings([finding for finding in found if finding not in wrong], run)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0]}{more}; `tune data` shows it, `data_checks: warn` goes on all the same")


def warn_data(cfg: Any, data: DataLoader, tokenizer: Tokenizer, run) -> None:
    """Tell what rows show that only answers are measured on."""
    print_findings(run_data_checks(*check_targets(cfg, {"data": data}, tokenizer)), run)


def print_findings(found: list[Finding], run) -> None:
    """A line for each finding that is no mere note."""
    worth = [finding for finding in found if finding.severity != "note"]
    for finding in worth[:MOST]:
        run.tell(f"{finding.severity}: {finding}")
    if len(worth) > MOST:
        run.tell(f"{len(worth) - MOST} more: `tune data` tells them all")
