"""Training steps on any layout, and their results. Has few imports because each rank loads it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import preference_pairs
from tests.helpers.optimizer_step import step_optimizer
from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, Batch, LossWeights
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.sharding import full_tensor
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig, SGDConfig
from tunekit.quantization.config import NoQuantization
from tunekit.recipes import sft

FP32 = PrecisionConfig("fp32", "fp32", "fp32")
ROWS, LENGTH, VOCAB = 4, 24, 96


@dataclass(frozen=True)
class Case:
    """Model, data, method and layout of a training run."""

    folder: Path
    adapter: NoAdapter = NoAdapter()
    weights: NoQuantization = NoQuantization()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    optimizer: AdamWConfig | SGDConfig = AdamWConfig(lr=0.01)
    precision: PrecisionConfig = FP32
    packed: bool = False
    micro_batch: int = 1
    clip: float = 0.5
    steps: int = 3
    length: int = LENGTH  # of rows
    vocab: int = VOCAB  # tokens of rows are below this
    loss: CrossEntropy = CrossEntropy()
    weighted: bool = False  # target tokens have weights
    pairs: Literal["", "whole", "shared"] = ""  # the common prefix is repeated (whole) or shared


@dataclass
class Outcome:
    """Losses, gradient norms, and all trained tensors, unsharded."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def make_micro_batches(case: Case, step: int, dist: DistributedContext) -> list[Batch]:
    """Micro-batches of this rank for a step. Each row has a different number of target tokens."""
    if case.pairs:
        return preference_pairs.make_batches(case.pairs == "shared", dist.dp_rank, dist.dims.dp_size, case.micro_batch)
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, case.vocab, (ROWS, case.length), generator=generator)
    is_target = torch.rand(rows.shape, generator=generator) < torch.tensor([0.2, 0.9, 0.5, 0.7])[:, None]
    targets = F.pad(rows[:, 1:], (0, 1), value=IGNORE).masked_fill(~is_target, IGNORE)
    local_rows = range(dist.dp_rank, ROWS, dist.dims.dp_size)
    groups = [list(local_rows)[i : i + case.micro_batch] for i in range(0, len(local_rows), case.micro_batch)]
    weights = torch.rand(rows.shape, generator=generator) if case.weighted else None
    return [
        make_batch(rows[group], targets[group], case.packed, None if weights is None else weights[group])
        for group in groups
    ]


def make_batch(rows: Tensor, targets: Tensor, packed: bool, weights: Tensor | None = None) -> Batch:
    """Batch of padded rows, or of rows that contain several documents of odd lengths."""
    length, cu_seqlens = rows.shape[1], None
    positions = torch.arange(length).expand_as(rows)
    if packed:
        bounds = [0]
        for row in range(len(rows)):
            bounds += [row * length + end for end in (7, 16, length)]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        positions = torch.cat([torch.arange(n) for n in (7, 9, length - 16)]).expand_as(rows)
    loss_weights = None if weights is None else LossWeights(weights, float(weights[targets != IGNORE].sum()))
    counts = int((targets != IGNORE).sum()), rows.numel()
    return Batch(rows, targets, positions, cu_seqlens, *counts, loss_weights=loss_weights)


def train_case(case: Case) -> Outcome:
    """Train a few steps as the recipe does."""
    outcome = Outcome()
    with DistributedContext(7, "cpu", case.parallel) as dist:
        source = HFCheckpoint.open(case.folder)
        model = build.build_model(source, case.weights, case.adapter, case.precision, case.memory, dist)
        cfg = sft.SFTConfig(
            model="m", data=TextDataset("t"), output_dir="o", adapter=case.adapter, max_grad_norm=case.clip
        )
        cfg = replace(cfg, optimizer=case.optimizer, loss=case.loss)
        case.loss.prepare(model)
        optimizer = case.optimizer.build(case.optimizer.apply_lr_pattern(case.adapter.param_groups(model), model))
        train_optimizer = case.memory.wrap_optimizer(optimizer, dist)
        for step in range(case.steps):
            dist.seed_step(step)
            loss = sft.forward_backward(model, make_micro_batches(case, step, dist), cfg, dist)
            outcome.losses.append(float(loss))
            outcome.norms.append(float(step_optimizer(train_optimizer, case.clip)))
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        outcome.tensors = {name: full_tensor(p).clone() for name, p in parameters}
    return outcome


def generate_answers(folders: list[Path], parallel: ParallelConfig) -> list[tuple[Tensor, list[list[int]]]]:
    """Logits and greedy answers of each model."""
    torch.set_num_threads(1)
    return [generate_answer(folder, parallel) for folder in folders]


def generate_answer(folder: Path, parallel: ParallelConfig) -> tuple[Tensor, list[list[int]]]:
    with DistributedContext(7, "cpu", parallel) as dist, torch.no_grad():
        model = build.build_model(
            HFCheckpoint.open(folder), NoQuantization(), NoAdapter(), FP32, MemoryConfig(), dist
        ).eval()
        logits = model(torch.arange(14).view(2, 7))
        return logits, generate_batch(
            model, [[1, 2, 3], [5, 6, 7, 8, 9]], SamplingConfig(max_new_tokens=6), frozenset()
        )


def train_cases(cases: list[Case]) -> list[Outcome]:
    """Train all cases in one start of the ranks."""
    torch.set_num_threads(1)
    return [train_case(case) for case in cases]


def train_and_generate(
    cases: list[Case], folders: list[Path], parallel: ParallelConfig
) -> tuple[list[Outcome], list[Any]]:
    """Train and generate in one start of the ranks."""
    return train_cases(cases), generate_answers(folders, parallel)
