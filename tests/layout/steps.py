"""Some steps of training on any layout, and what came of them. Lean: every rank imports it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tests import pairs
from tests.helpers.optimizer_step import step_optimizer
from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.sharding import full_tensor
from tunekit.generation.generate import SamplingConfig, generate_batch
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NoQuantization
from tunekit.recipes import sft

FP32 = PrecisionConfig("fp32", "fp32", "fp32")
ROWS, LENGTH, VOCAB = 4, 24, 96


@dataclass(frozen=True)
class Case:
    """What is trained, how, and where."""

    folder: Path
    adapter: NoAdapter = NoAdapter()
    weights: NoQuantization = NoQuantization()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    optimizer: AdamWConfig = AdamWConfig(lr=0.01)
    precision: PrecisionConfig = FP32
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


def batches(case: Case, step: int, run: DistributedContext) -> list[Batch]:
    """This rank's micro-batches of a step; every row has another number of learnt tokens."""
    if case.pairs:
        return pairs.make_batches(case.pairs == "shared", run.dp_rank, run.dims.dp_size, case.micro_batch)
    draw = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, case.vocab, (ROWS, case.length), generator=draw)
    learnt = torch.rand(rows.shape, generator=draw) < torch.tensor([0.2, 0.9, 0.5, 0.7])[:, None]
    targets = F.pad(rows[:, 1:], (0, 1), value=IGNORE).masked_fill(~learnt, IGNORE)
    mine = range(run.dp_rank, ROWS, run.dims.dp_size)
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
    with DistributedContext(7, "cpu", case.parallel) as run:
        source = HFCheckpoint.open(case.folder)
        model = build.build_model(source, case.weights, case.adapter, case.precision, case.memory, run)
        cfg = sft.SFTConfig(
            model="m", data=TextDataset("t"), output_dir="o", adapter=case.adapter, max_grad_norm=case.clip
        )
        cfg = replace(cfg, optimizer=case.optimizer)
        optimizer = case.optimizer.build(case.adapter.param_groups(model))
        train_optimizer = case.memory.wrap_optimizer(optimizer, run)
        for step in range(case.steps):
            run.seed_step(step)
            loss = sft.forward_backward(model, batches(case, step, run), cfg, run)
            found.losses.append(float(loss))
            found.norms.append(float(step_optimizer(train_optimizer, case.clip)))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        found.tensors = {name: full_tensor(p).clone() for name, p in named}
    return found


def answers(folders: list[Path], parallel: ParallelConfig) -> list[tuple[Tensor, list[list[int]]]]:
    """What models say: all their logits, and some tokens of their own."""
    torch.set_num_threads(1)
    return [answer(folder, parallel) for folder in folders]


def answer(folder: Path, parallel: ParallelConfig) -> tuple[Tensor, list[list[int]]]:
    with DistributedContext(7, "cpu", parallel) as run, torch.no_grad():
        model = build.build_model(
            HFCheckpoint.open(folder), NoQuantization(), NoAdapter(), FP32, MemoryConfig(), run
        ).eval()
        logits = model(torch.arange(14).view(2, 7))
        return logits, generate_batch(
            model, [[1, 2, 3], [5, 6, 7, 8, 9]], SamplingConfig(max_new_tokens=6), frozenset()
        )


def several(cases: list[Case]) -> list[Outcome]:
    """One case after the other, in one start of the ranks."""
    torch.set_num_threads(1)
    return [trained(case) for case in cases]


def trained_and_asked(
    cases: list[Case], folders: list[Path], parallel: ParallelConfig
) -> tuple[list[Outcome], list[Any]]:
    """All that a start of ranks can do."""
    return several(cases), answers(folders, parallel)
