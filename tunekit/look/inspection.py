"""The checks of a run's rows: at the start of every training, and for `tune data`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunekit.data.checks import Finding, Subject, Use, inspect
from tunekit.data.steps.served import Loader
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.losses.reward import Scoring
from tunekit.optim import Schedule, count

MOST = 8  # lines in the log


def subjects(cfg: Any, loaders: Mapping[str, Loader | None], tokenizer: Tokenizer) -> list[Subject]:
    """The parts of a config, measured: what is learnt first."""
    return [
        Subject(part, loader.parts, tokenizer, use(cfg, part, loader, tokenizer.vocab))
        for part, loader in loaders.items()
        if loader is not None
    ]


def use(cfg: Any, part: str, loader: Loader, vocab: int | None) -> Use:
    """What the config does with rows. Not every recipe has a schedule."""
    told, limit = vars(cfg), vars(cfg)[part].length
    packed = None if loader.order.capacity is None else np.diff(loader.order.plan(0).bounds)
    loss = told.get("loss")
    scored = loss.told if isinstance(loss, Scoring) else None
    if part != "data" or not isinstance(told.get("schedule"), Schedule):
        return Use(limit, vocab, packed, scored=scored)
    steps = told["steps"] or loader.steps(told["epochs"])  # a stream has no epochs: a config without steps is refused
    return Use(limit, vocab, packed, steps, count(told["schedule"].warmup, steps), scored)


def begin(cfg: Any, loaders: Mapping[str, Loader | None], tokenizer: Tokenizer, run) -> None:
    """Tell what the rows show. UserError, unless `checks: tell`, if nothing useful can come of training on them."""
    found = inspect(*subjects(cfg, loaders, tokenizer))
    wrong = [finding for finding in found if finding.severity == "wrong" and cfg.checks == "stop"]
    tell([finding for finding in found if finding not in wrong], run)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0]}{more}; `tune data` shows it, `checks: tell` goes on all the same")


def remark(cfg: Any, data: Loader, tokenizer: Tokenizer, run) -> None:
    """Tell what rows show that only answers are measured on."""
    tell(inspect(*subjects(cfg, {"data": data}, tokenizer)), run)


def tell(found: list[Finding], run) -> None:
    """A line for each finding that is no mere note."""
    worth = [finding for finding in found if finding.severity != "note"]
    for finding in worth[:MOST]:
        run.tell(f"{finding.severity}: {finding}")
    if len(worth) > MOST:
        run.tell(f"{len(worth) - MOST} more: `tune data` tells them all")
