"""Teacher logits on disk: the top-k token ids of each target token, with their log-probabilities.

A directory contains blocks that are written atomically, so an interrupted writer continues after the last one. In a
block, each rank has its own files: `keys` and `counts` of documents, `ids` and `logs` of their target tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from tunekit.data.dataloader.unpack import unpack_documents
from tunekit.data.preprocess.tokenized_dataset import ConcatDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.kernels.kl_divergence import TopKTargets, index_in_rows, top_k_targets
from tunekit.models.decoder import Decoder, Head

INFO_FILE = "about.json"
BLOCK = 2**18  # tokens of documents in a block
DTYPES = {"keys": np.uint64, "counts": np.int64, "ids": np.int32, "logs": np.float32}


@dataclass(frozen=True)
class TopKLogits:
    """Format of stored logits. The fields are also keys of the info file."""

    top: int  # k: token ids per target token
    temperature: float
    ids: int  # number of token ids that student and teacher both embed
    total: int  # number of token ids of the teacher

    def compute(self, model: Decoder, batch: Batch) -> TopKTargets:
        """Run the teacher on a batch. Results are in the order of target tokens."""
        rows = (batch.targets.flatten() != IGNORE).nonzero().squeeze(1)
        results: list[TopKTargets] = []

        def read(hidden: Tensor, head: Head) -> Tensor:
            results.append(top_k_targets(hidden.flatten(0, 1), head, rows, self.top, self.temperature, self.ids))
            return hidden[:0]

        model(batch.tokens, batch.positions, batch.layout, head_fn=read)
        return results[0]


@torch.no_grad()
def write_teacher_logits(
    directory: Path,
    info: dict[str, Any],
    logits: TopKLogits,
    model: Decoder,
    data: DataLoader,
    dist: DistributedContext,
) -> None:
    """Compute and write the missing blocks. Collective: each data parallel rank writes the logits of its rows."""
    documents = ConcatDataset(data.datasets)
    blocks = list(iter_blocks(documents.lengths))
    dist.run_on_main(
        lambda: atomic.write_text_atomic(directory / INFO_FILE, json.dumps({**info, "blocks": len(blocks)}, indent=2))
    )
    layout = replace(data.collator, capacity=None)
    left = dist.run_on_main(
        lambda: [number for number in range(len(blocks)) if not atomic.is_complete(block_path(directory, number))]
    )
    done = len(documents) - sum(len(blocks[number]) for number in left)
    options = {"unit": "row", "initial": done, "leave": False, "disable": not dist.is_main_process or None}
    with tqdm(None, "computing teacher logits", len(documents), **options) as bar:
        for number in left:
            dist.heartbeat.record(number, "ask")
            done += len(blocks[number])
            results = []
            for batch in iter_batches(documents, blocks[number], layout):
                results.append((batch, logits.compute(model, batch.to(dist.device))))
                bar.update(min(len(batch.tokens) * dist.dims.dp_size, done - bar.n))
            with atomic.AtomicDir(block_path(directory, number), dist) as partial:
                if dist.coords.context == dist.coords.tensor == 0:
                    write_block(partial, dist.dp_rank, results)
            bar.update(done - bar.n)


def block_path(directory: Path, number: int) -> Path:
    """Directory of a block."""
    return directory / f"{number:05d}"


def iter_blocks(lengths: np.ndarray) -> Iterator[range]:
    """Document indices of each block; they do not depend on the number of ranks."""
    ends = np.flatnonzero(np.diff(np.cumsum(lengths, dtype=np.int64) // BLOCK, append=-1)) + 1
    yield from map(range, [0, *ends[:-1].tolist()], ends.tolist())


def iter_batches(documents: ConcatDataset, block: range, layout: Collator) -> Iterator[Batch]:
    """Micro-batches of this rank with the documents of a block, sorted by length."""
    order = sorted(block, key=lambda i: int(documents.lengths[i]))
    for first in range(0, len(order), layout.global_batch_size):
        yield from layout.micro_batches(
            documents, [np.array([i]) for i in order[first : first + layout.global_batch_size]]
        )


def write_block(directory: Path, dp_rank: int, results: Sequence[tuple[Batch, TopKTargets]]) -> None:
    """Write the files of this rank for a block."""
    spans = [span for batch, _ in results for span in unpack_documents(batch)]
    columns = {
        "keys": [span.key for span in spans],
        "counts": [span.num_target_tokens for span in spans],
        "ids": torch.cat([top.ids for _, top in results]).cpu().numpy(),
        "logs": torch.cat([top.log_probs for _, top in results]).float().cpu().numpy(),
    }
    for name, column in columns.items():
        np.asarray(column, DTYPES[name]).tofile(directory / f"{dp_rank:05d}.{name}")


def is_complete(directory: Path) -> bool:
    """Whether all blocks exist."""
    if not (directory / INFO_FILE).is_file():
        return False
    return all(atomic.is_complete(block_path(directory, number)) for number in range(read_info(directory)["blocks"]))


def read_info(directory: Path) -> dict[str, Any]:
    """Read the info file of a directory."""
    return json.loads((directory / INFO_FILE).read_text("utf-8"))


class TeacherLogits:
    """Memory-mapped files of several directories."""

    def __init__(self, directories: Sequence[Path], info: TopKLogits) -> None:
        self.directories, self.info = directories, info
        files = sorted(file for directory in directories for file in directory.glob("?????/*.keys"))
        self.keys = np.concatenate([np.fromfile(file, np.uint64) for file in files])
        self.counts = np.concatenate([np.fromfile(file.with_suffix(".counts"), np.int64) for file in files])
        self.ids = LogitShards([self.map_file(file, "ids", info.top) for file in files])
        self.logs = LogitShards([self.map_file(file, "logs", info.top + 1) for file in files])

    @staticmethod
    def map_file(file: Path, name: str, width: int) -> np.ndarray:
        path = file.with_suffix(f".{name}")
        if not path.stat().st_size:  # a rank without rows; empty files cannot be mapped
            return np.empty((0, width), DTYPES[name])
        return np.memmap(path, DTYPES[name], "r").reshape(-1, width)

    @cached_property
    def order(self) -> np.ndarray:
        return np.argsort(self.keys, kind="stable")

    @cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.counts) - self.counts

    def targets_of(self, model: Decoder, batch: Batch) -> TopKTargets:
        """Stored logits of the target tokens of a batch on this rank."""
        ranges = [self.find(span.key, span.num_target_tokens) for span in unpack_documents(batch)]
        nth = (batch.targets != IGNORE).flatten().cumsum(0).view_as(batch.targets) - 1
        local_nth = model.cp_sharding.local_tokens(nth.where(batch.targets != IGNORE, -1), -1).flatten()
        rows = (local_nth >= 0).nonzero().squeeze(1)
        selected, device = local_nth[rows].cpu(), batch.tokens.device
        ids, logs = (torch.from_numpy(shards.read(ranges))[selected].to(device) for shards in (self.ids, self.logs))
        return TopKTargets(ids, logs, index_in_rows(rows, len(local_nth)), self.info.total)

    def find(self, key: int, count: int) -> slice:
        """Rows of the target tokens of a document. Raises UserError if it is not stored."""
        at = int(np.searchsorted(self.keys, np.uint64(key), sorter=self.order))
        number = int(self.order[at]) if at < len(self.order) else -1
        if number < 0 or int(self.keys[number]) != key or self.counts[number] != count:
            paths = ", ".join(map(str, self.directories))
            raise UserError(f"{paths}: a row of this run is missing. Delete the files to compute them again.")
        return slice(int(self.starts[number]), int(self.starts[number]) + count)


class LogitShards:
    """Concatenation of several arrays along their rows, without copying."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays, self.firsts = arrays, np.cumsum([0, *(len(array) for array in arrays)])

    def read(self, ranges: Sequence[slice]) -> np.ndarray:
        """Copy of the rows in these ranges, each of which must not cross arrays."""
        chunks = [np.empty_like(self.arrays[0][:0])]
        for row_range in ranges:
            index = int(np.searchsorted(self.firsts, row_range.start, side="right")) - 1
            first = int(self.firsts[index])
            chunks.append(self.arrays[index][row_range.start - first : row_range.stop - first])
        return np.concatenate(chunks)
