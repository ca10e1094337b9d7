"""What a teacher expects of rows, on disk: for each learnt token its likeliest ids and how likely it finds them.

A folder holds blocks, each of which appears whole or not at all: a writer that was cut off goes on behind them. In a
block every rank that wrote has files of its own: `keys` and `counts` of documents, `ids` and `logs` of their tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.checkpoint import atomic
from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import ConcatDataset
from tunekit.data.dataloader.unpack import unpack_documents
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.kernels.kl_divergence import TopKTargets, index_in_rows, top_k_targets
from tunekit.models.decoder import Decoder, Head

INFO_FILE = "about.json"
BLOCK = 2**18  # tokens of documents in a block
DTYPES = {"keys": np.uint64, "counts": np.int64, "ids": np.int32, "logs": np.float32}


@dataclass(frozen=True)
class TopKLogits:
    """What is kept of each learnt token."""

    top: int  # ids
    temperature: float
    ids: int  # of those of the vocabulary that student and teacher both embed
    total: int  # of the teacher

    def compute(self, model: Decoder, batch: Batch) -> TopKTargets:
        """By the teacher, in the order of learnt tokens."""
        rows = (batch.targets.flatten() != IGNORE).nonzero().squeeze(1)
        found: list[TopKTargets] = []

        def read(hidden: Tensor, head: Head) -> Tensor:
            found.append(top_k_targets(hidden.flatten(0, 1), head, rows, self.top, self.temperature, self.ids))
            return hidden[:0]

        model(batch.tokens, batch.positions, batch.layout, read=read)
        return found[0]


@torch.no_grad()
def write_teacher_logits(
    folder: Path, about: dict[str, Any], kept: TopKLogits, model: Decoder, data: DataLoader, run: DistributedContext
) -> None:
    """All that is not there yet. All ranks ask, and each writes what it has asked."""
    documents = ConcatDataset(data.datasets)
    blocks = list(iter_blocks(documents.lengths))
    run.run_on_main(
        lambda: atomic.write_text_atomic(folder / INFO_FILE, json.dumps({**about, "blocks": len(blocks)}, indent=2))
    )
    layout = Collator(
        data.collator.global_batch_size,
        data.collator.micro_batch_size,
        run.dp_rank,
        run.dims.dp_size,
        data.collator.pad_id,
        None,
    )
    left = run.run_on_main(
        lambda: [number for number in range(len(blocks)) if not atomic.is_complete(block_path(folder, number))]
    )
    done = len(documents) - sum(len(blocks[number]) for number in left)
    how = {"unit": "row", "initial": done, "leave": False, "disable": not run.is_main_process or None}
    with tqdm(None, "asking the teacher", len(documents), **how) as bar:
        for number in left:
            run.heartbeat.beat(number, "ask")
            done += len(blocks[number])
            found = []
            for batch in iter_batches(documents, blocks[number], layout):
                found.append((batch, kept.compute(model, batch.to(run.device))))
                bar.update(min(len(batch.tokens) * run.dims.dp_size, done - bar.n))
            with atomic.SharedAtomicDir(block_path(folder, number), run) as partial:
                if run.coords.context == run.coords.tensor == 0:
                    write_block(partial, run.dp_rank, found)
            bar.update(done - bar.n)


def block_path(folder: Path, number: int) -> Path:
    """Where a block is."""
    return folder / f"{number:05d}"


def iter_blocks(lengths: np.ndarray) -> Iterator[range]:
    """Documents of each block, whoever writes it."""
    ends = np.flatnonzero(np.diff(np.cumsum(lengths, dtype=np.int64) // BLOCK, append=-1)) + 1
    yield from map(range, [0, *ends[:-1].tolist()], ends.tolist())


def iter_batches(documents: ConcatDataset, block: range, layout: Collator) -> Iterator[Batch]:
    """Micro-batches of this rank, of documents of a block: those of like length together."""
    order = sorted(block, key=lambda i: int(documents.lengths[i]))
    for first in range(0, len(order), layout.global_batch_size):
        yield from layout.micro_batches(
            documents, [np.array([i]) for i in order[first : first + layout.global_batch_size]]
        )


def write_block(folder: Path, reader: int, found: Sequence[tuple[Batch, TopKTargets]]) -> None:
    """The files of a rank."""
    spans = [span for batch, _ in found for span in unpack_documents(batch)]
    columns = {
        "keys": [span.key for span in spans],
        "counts": [span.num_target_tokens for span in spans],
        "ids": torch.cat([top.ids for _, top in found]).cpu().numpy(),
        "logs": torch.cat([top.logs for _, top in found]).float().cpu().numpy(),
    }
    for name, column in columns.items():
        np.asarray(column, DTYPES[name]).tofile(folder / f"{reader:05d}.{name}")


def is_complete(folder: Path) -> bool:
    """Whether all blocks are there."""
    if not (folder / INFO_FILE).is_file():
        return False
    return all(atomic.is_complete(block_path(folder, number)) for number in range(read_info(folder)["blocks"]))


def read_info(folder: Path) -> dict[str, Any]:
    """What is stored there, in words and numbers."""
    return json.loads((folder / INFO_FILE).read_text("utf-8"))


class TeacherLogits:
    """The files of some folders, mapped."""

    def __init__(self, folders: Sequence[Path], info: TopKLogits) -> None:
        self.folders, self.kept = folders, info
        files = sorted(file for folder in folders for file in folder.glob("?????/*.keys"))
        self.keys = np.concatenate([np.fromfile(file, np.uint64) for file in files])
        self.counts = np.concatenate([np.fromfile(file.with_suffix(".counts"), np.int64) for file in files])
        self.ids = LogitShards([self.map_file(file, "ids", info.top) for file in files])
        self.logs = LogitShards([self.map_file(file, "logs", info.top + 1) for file in files])

    @staticmethod
    def map_file(file: Path, name: str, width: int) -> np.ndarray:
        path = file.with_suffix(f".{name}")
        if not path.stat().st_size:  # of a rank to which nothing fell; no file without bytes can be mapped
            return np.empty((0, width), DTYPES[name])
        return np.memmap(path, DTYPES[name], "r").reshape(-1, width)

    @cached_property
    def order(self) -> np.ndarray:
        return np.argsort(self.keys, kind="stable")

    @cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.counts) - self.counts

    def targets_of(self, model: Decoder, batch: Batch) -> TopKTargets:
        """What is stored of the learnt tokens of a batch that are here."""
        ranges = [self.find(span.key, span.num_target_tokens) for span in unpack_documents(batch)]
        nth = (batch.targets != IGNORE).flatten().cumsum(0).view_as(batch.targets) - 1
        here = model.cp_sharding.local_tokens(nth.where(batch.targets != IGNORE, -1), -1).flatten()
        rows = (here >= 0).nonzero().squeeze(1)
        some, device = here[rows].cpu(), batch.tokens.device
        ids, logs = (torch.from_numpy(part.read(ranges))[some].to(device) for part in (self.ids, self.logs))
        return TopKTargets(ids, logs, index_in_rows(rows, len(here)), self.kept.total)

    def find(self, key: int, count: int) -> slice:
        """The tokens of a document."""
        at = int(np.searchsorted(self.keys, np.uint64(key), sorter=self.order))
        number = int(self.order[at]) if at < len(self.order) else -1
        if number < 0 or int(self.keys[number]) != key or self.counts[number] != count:
            told = "nothing is stored of a row that comes now: delete them to have the teacher asked again"
            raise UserError(f"{', '.join(map(str, self.folders))}: {told}")
        return slice(int(self.starts[number]), int(self.starts[number]) + count)


class LogitShards:
    """Rows of several arrays, numbered through."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays, self.firsts = arrays, np.cumsum([0, *(len(array) for array in arrays)])

    def read(self, ranges: Sequence[slice]) -> np.ndarray:
        """A copy of some; each range lies within one array."""
        found = [np.empty_like(self.arrays[0][:0])]
        for some in ranges:
            number = int(np.searchsorted(self.firsts, some.start, side="right")) - 1
            first = int(self.firsts[number])
            found.append(self.arrays[number][some.start - first : some.stop - first])
        return np.concatenate(found)
