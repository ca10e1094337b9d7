"""The bundled nano model, and short training runs of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunekit import build
from tunekit.checkpoint import run_dir
from tunekit.cli import recipe_loader
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.document import Document
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.training.packing_check import document_spans

NAME = "tunekit/nano"
CONFIG = "nano/tools_full"
LENGTHS = (90, 33, 61, 80, 47, 64)  # of the documents of a packed batch
# A run that reads, trains, validates nothing and saves within seconds.
SHORT_RUN = ("eval_data=null", "global_batch_size=8", "micro_batch_size=4", "log_every=1")


def open_model(dist: DistributedContext, compute: str) -> Decoder:
    """The model with its weights as they are stored, and products in `compute`."""
    return build.load_for_inference(NAME, PrecisionConfig(compute), dist)[0]  # type: ignore[arg-type]


def random_documents(vocab: int, lengths: Sequence[int], trained: float = 0.5) -> list[Document]:
    """Documents of random tokens, of which the last ones are trained on: this fraction of them."""
    generator = np.random.default_rng(0)
    tokens = [generator.integers(4, vocab, length).astype(np.int32) for length in lengths]
    return [Document(ids, np.arange(len(ids)) >= (1 - trained) * len(ids), len(ids)) for ids in tokens]


def packing(capacity: int, rows: int) -> Collator:
    """A layout of packed rows."""
    return Collator(rows, rows, 0, 1, 0, capacity)


def packed_batch(vocab: int) -> tuple[Batch, list[Document], list[slice]]:
    """Two packed rows of three documents each, the documents, and the span of each in the flattened rows."""
    documents = random_documents(vocab, LENGTHS)
    batch, layout = packing(256, 2).collate_rows([documents[:3], documents[3:]])
    return batch, documents, document_spans(batch, layout)


def overrides(directory: Path, device: str, *more: str) -> tuple[str, ...]:
    """The arguments of a short run."""
    return (*SHORT_RUN, f"device={device}", f"output_dir={directory}", *more)


def train_nano(directory: Path, device: str, *more: str) -> None:
    """Run `tune run sft` in this process."""
    recipe = recipe_loader.load_recipe("sft")
    recipe.main(recipe_loader.load_checked_config(recipe, CONFIG, overrides(directory, device, *more), []))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have a loss."""
    lines = (directory / run_dir.METRICS).read_text("utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]
