"""Some steps of training on any layout, and what came of them. Lean: every rank imports it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tests import pairs
from tunekit import assemble
from tunekit.adapters import Full
from tunekit.checkpoint.folder import Folder
from tunekit.data.rows import Text
from tunekit.data.steps.batch import IGNORE, Batch
from tunekit.formats import Plain
from tunekit.generate import Sampling, complete
from tunekit.memory import Memory
from tunekit.optim import AdamW
from tunekit.parallel.choice import Parallel
from tunekit.parallel.run import Run
from tunekit.parallel.tensors import whole
from tunekit.precision import Precision
from tunekit.recipes import sft

FP32 = Precision("fp32", "fp32", "fp32")
ROWS, LENGTH, VOCAB = 4, 24, 96


@dataclass(frozen=True)
class Case:
    """What is trained, how, and where."""

    folder: Path
    adapter: Full = Full()
    weights: Plain = Plain()
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    optimizer: AdamW = AdamW(lr=0.01)
    precision: Precision = FP32
    packed: bool = False
    micro_batch: int = 1
    clip: float = 0.5
    steps: int = 5
    length: int = LENGTH  # of rows
    vocab: int = VOCAB  # ids from which rows are drawn
    pairs: Literal["", "whole", "shared"] = ""  # what both begin with is written twice or once


@dataclass
class Outcome:
    """Losses and lengths of gradients, and every trained tensor, whole."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def batches(case: Case, step: int, run: Run) -> list[Batch]:
    """This rank's micro-batches of a step; every row has another number of learnt tokens."""
    if case.pairs:
        return pairs.batches(case.pairs == "shared", run.reader, run.sizes.readers, case.micro_batch)
    draw = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, case.vocab, (ROWS, case.length), generator=draw)
    learnt = torch.rand(rows.shape, generator=draw) < torch.tensor([0.2, 0.9, 0.5, 0.7])[:, None]
    targets = F.pad(rows[:, 1:], (0, 1), value=IGNORE).masked_fill(~learnt, IGNORE)
    mine = range(run.reader, ROWS, run.sizes.readers)
    parts = [list(mine)[i : i + case.micro_batch] for i in range(0, len(mine), case.micro_batch)]
    return [made(rows[part], targets[part], case.packed) for part in parts]


def made(rows: Tensor, targets: Tensor, packed: bool) -> Batch:
    """A batch of whole rows, or of rows in which documents of odd lengths stand side by side."""
    length, offsets = rows.shape[1], None
    positions = torch.arange(length).expand_as(rows)
    if packed:
        bounds = [0]
        for row in range(len(rows)):
            bounds += [row * length + end for end in (7, 16, length)]
        offsets = torch.tensor(bounds, dtype=torch.int32)
        positions = torch.cat([torch.arange(n) for n in (7, 9, length - 16)]).expand_as(rows)
    return Batch(rows, targets, positions, offsets, int((targets != IGNORE).sum()), rows.numel())


def trained(case: Case) -> Outcome:
    """A few steps as the recipe takes them."""
    found = Outcome()
    with Run(7, "cpu", case.parallel) as run:
        source = Folder.open(case.folder)
        model = assemble.model(source, case.weights, case.adapter, case.precision, case.memory, run)
        cfg = sft.SFT(model="m", data=Text("t"), out="o", adapter=case.adapter, clip=case.clip)
        cfg = replace(cfg, optimizer=case.optimizer)
        optimizer = case.optimizer.build(case.adapter.trained(model))
        update = case.memory.update(optimizer, case.clip, run)
        for step in range(case.steps):
            run.seed_step(step)
            taken = sft.train_step(model, batches(case, step, run), cfg, update, run)
            found.losses.append(float(taken.loss))
            found.norms.append(float(taken.norm))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        found.tensors = {name: whole(p).clone() for name, p in named}
    return found


def answers(folders: list[Path], parallel: Parallel) -> list[tuple[Tensor, list[list[int]]]]:
    """What models say: all their logits, and some tokens of their own."""
    torch.set_num_threads(1)
    return [answer(folder, parallel) for folder in folders]


def answer(folder: Path, parallel: Parallel) -> tuple[Tensor, list[list[int]]]:
    with Run(7, "cpu", parallel) as run, torch.no_grad():
        model = assemble.model(Folder.open(folder), Plain(), Full(), FP32, Memory(), run).eval()
        logits = model(torch.arange(14).view(2, 7))
        return logits, complete(model, [[1, 2, 3], [5, 6, 7, 8, 9]], Sampling(tokens=6), frozenset())


def several(cases: list[Case]) -> list[Outcome]:
    """One case after the other, in one start of the ranks."""
    torch.set_num_threads(1)
    return [trained(case) for case in cases]


def trained_and_asked(cases: list[Case], folders: list[Path], parallel: Parallel) -> tuple[list[Outcome], list[Any]]:
    """All that a start of ranks can do."""
    return several(cases), answers(folders, parallel)
